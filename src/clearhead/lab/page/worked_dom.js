// Numbers, waiting and Python, as the worked example and the variants share them.
import {element} from "./dom.js";

// A number as the sheets show it: a proper minus, four places, powers of ten where those would hide it.
export function shown(number, digits = 4) {
  if (number === null) return "−∞";
  const size = Math.abs(number);
  if (size === 0) return (0).toFixed(digits);
  const plain = size >= 0.5 * 10 ** -digits && size < 1e5;
  return (plain ? number.toFixed(digits) : number.toExponential(2)).replace(/-/g, "−");
}

// The number that a text means, or null: no words, no infinities, nothing beyond ``most``.
export function readNumber(text, most) {
  const plain = text.trim().replace(/−/g, "-").replace(",", ".");
  if (!/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?$/iu.test(plain)) return null;
  const number = Number(plain);
  return Math.abs(number) <= most ? number : null;
}

// Calls back once nothing more has come for ``wait`` milliseconds.
export function settled(wait, done) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(done, wait);
  };
}

// Python to read, copy and take away.
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
