// DOM elements and texts. Text from the data is only set as textContent or drawn on a canvas.

const SVG = "http://www.w3.org/2000/svg";

function finish(made, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export function element(tag, properties = {}, ...children) {
  return finish(document.createElement(tag), properties, children);
}

export function drawn(tag, properties = {}, ...children) {
  return finish(document.createElementNS(SVG, tag), properties, children);
}

export function byId(id) {
  return document.getElementById(id);
}

// Scrolls one element, or the document, until the item is in view, as far as needed or to its top. scrollIntoView would
// scroll a page that embeds this one too.
export function showWithin(scroller, item, {toTop = false} = {}) {
  const start = scroller === document.scrollingElement ? 0 : scroller.getBoundingClientRect().top;
  const inner = item.getBoundingClientRect(), above = inner.top - start, below = inner.bottom - start - scroller.clientHeight;
  scroller.scrollTop += toTop ? above : Math.min(0, above) + Math.max(0, below);
}

const SPACES = {"\n": "↵", "\t": "⇥", " ": "␣", "": "∅"};

// A readable token: subword markers become spaces, invisible characters become symbols.
export function readable(text) {
  const plain = text.replace(/^[Ġ▁]/u, " ").replace(/Ċ/gu, "\n");
  if (plain.trim() === "") return plain === "" ? SPACES[""] : [...plain].map((each) => SPACES[each] ?? "␣").join("");
  return plain.trim().replace(/[\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/gu, "�");
}

const SPECIAL = /^(<.*>|\[.*\])$/u;

// How a token continues running text: joined to the previous one, or after a space. WordPiece vocabularies mark
// continuations (##), SentencePiece and byte vocabularies mark the start of a word (▁, Ġ, a space).
export function joiner(texts) {
  const letters = texts.includes(" ") && texts.every((text) => [...text].length <= 1);
  const begins = texts.some((text) => /^[▁Ġ ]./u.test(text));
  return (text) => {
    if (letters) return {joined: true, shown: text === " " ? "\u00a0" : readable(text)};
    if (/^##./u.test(text)) return {joined: true, shown: text.slice(2)};
    return {joined: begins && !/^[▁ĠĊ\s]/u.test(text) && !SPECIAL.test(text), shown: readable(text)};
  };
}

// The direction of a text: that of its first letter with a direction.
export function direction(texts) {
  const first = texts.find((text) => /\p{L}/u.test(text) && !SPECIAL.test(text)) ?? "";
  return /^\P{L}*[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/u.test(first) ? "rtl" : "ltr";
}

// GPT-2 maps each byte to a character: printable ones to themselves, the others to U+0100 and up, in order.
const BYTES = new Map();
for (let byte = 0, others = 0; byte < 256; byte++) {
  const itself = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  BYTES.set(String.fromCodePoint(itself ? byte : 256 + others++), byte);
}

// Tokens of a byte vocabulary decoded to text, except the marker of a word's start.
export function decoded(texts) {
  const ofBytes = texts.some((text) => /^[ĠĊ]/u.test(text)) && texts.every((text) => SPECIAL.test(text) || [...text].every((letter) => BYTES.has(letter)));
  if (!ofBytes) return texts;
  const reader = new TextDecoder("utf-8", {fatal: true});
  return texts.map((text) => {
    if (SPECIAL.test(text)) return text;
    const begins = text.startsWith("Ġ") && text.length > 1, bytes = Uint8Array.from([...text.slice(begins ? 1 : 0)], (letter) => BYTES.get(letter));
    try {
      return `${begins ? "Ġ" : ""}${reader.decode(bytes)}`;
    } catch {
      // Part of a multi-byte character.
      return `${begins ? "Ġ" : ""}⟨${Array.from(bytes, (byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ")}⟩`;
    }
  });
}

export function shown(number, digits = 4) {
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "NaN" : number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  const text = size === 0 ? "0" : size >= 1e-4 && size < 1e5 ? number.toFixed(digits) : number.toExponential(2);
  return text.replaceAll("-", "−");
}

// Arrow keys move within a group of elements, of which one is in the tab order.
export function walk(group, items, choose) {
  group.addEventListener("keydown", (event) => {
    const list = items();
    const here = list.indexOf(event.target.closest("[data-place]"));
    if (here < 0 || event.altKey || event.metaKey || event.ctrlKey) return;
    const below = (sign) => nearestRow(list, here, sign);
    const next = {
      ArrowRight: () => here + 1, ArrowLeft: () => here - 1, ArrowDown: () => below(1), ArrowUp: () => below(-1),
      Home: () => 0, End: () => list.length - 1,
    }[event.key]?.();
    if (next === undefined) return;
    event.preventDefault();
    if (next < 0 || next >= list.length) return;
    choose(next);
    items()[next]?.focus();
  });
}

// The nearest element on the next line below, or above.
function nearestRow(list, here, sign) {
  const from = list[here].getBoundingClientRect();
  let best = -1, bestGap = Infinity;
  list.forEach((each, at) => {
    const box = each.getBoundingClientRect();
    const down = sign * (box.top - from.top);
    if (down < 4) return;
    const far = down * 1000 + Math.abs(box.left - from.left);
    if (far < bestGap) [best, bestGap] = [at, far];
  });
  return best;
}
