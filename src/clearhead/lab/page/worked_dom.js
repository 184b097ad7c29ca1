// Helpers for numbers, delays and Python, shared by the worked example and the variants.
import {element} from "./dom.js";

// A formatted number: a minus sign, four decimal places, or a power of ten if four places are too few.
export function shown(number, digits = 4) {
  if (number === null) return "−∞";
  const size = Math.abs(number);
  if (size === 0) return (0).toFixed(digits);
  const plain = size >= 0.5 * 10 ** -digits && size < 1e5;
  return (plain ? number.toFixed(digits) : number.toExponential(2)).replace(/-/g, "−");
}

// The number in a text; null if it is not a finite number up to ``most``.
export function readNumber(text, most) {
  const plain = text.trim().replace(/−/g, "-").replace(",", ".");
  if (!/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?$/iu.test(plain)) return null;
  const number = Number(plain);
  return Math.abs(number) <= most ? number : null;
}

// Calls back after ``wait`` milliseconds without another call.
export function settled(wait, done) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(done, wait);
  };
}

// A card with Python to read, copy and download.
export function pythonCard(title, hint) {
  const text = element("pre", {class: "python", tabindex: 0, "aria-label": title});
  const said = element("span", {class: "hint", role: "status"});
  const link = element("a", {class: "as-button", hidden: true, text: "Download"});
  const copy = element("button", {type: "button", text: "Copy", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      said.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(text);
      said.textContent = "Selected; copy it with the keyboard.";
    }
  }});
  const card = element("section", {class: "card python-card"},
    element("div", {class: "row"}, element("h2", {text: title}), copy, link, said),
    element("p", {class: "hint", text: hint}), text);
  return {
    card,
    show(script, name) {
      text.textContent = script;
      said.textContent = "";
      if (link.href) URL.revokeObjectURL(link.href);
      if (name) {
        link.href = URL.createObjectURL(new Blob([script], {type: "text/x-python"}));
        link.download = name;
        link.hidden = false;
      }
    },
  };
}
