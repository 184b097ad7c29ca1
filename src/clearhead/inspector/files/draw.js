// Elements and colours. Text from the data only ever goes through textContent.
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") made.textContent = value;
    else if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

function byId(id) {
  return document.getElementById(id);
}

// One hue whose lightness alone carries the number, so that it reads the same to every kind of eye; the order
// of the stops follows the page, from the colour of its surface to the strongest contrast with it.
const RAMPS = {
  light: [[238, 243, 248], [186, 215, 235], [107, 165, 212], [36, 106, 174], [8, 44, 102]],
  dark: [[24, 34, 47], [27, 64, 108], [36, 111, 173], [99, 175, 226], [225, 243, 255]],
};

function theme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function heat(part) {
  const stops = RAMPS[theme()];
  const place = Math.min(Math.max(part, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((from, channel) => Math.round(from + (stops[low + 1][channel] - from) * (place - low)));
}

function css(rgb) {
  return `rgb(${rgb.join(" ")})`;
}

// A small map of numbers, one canvas pixel each; the style sheet enlarges it without smoothing.
function thumbnail(canvas, numbers, columns, colour) {
  canvas.width = columns;
  canvas.height = numbers.length / columns;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  numbers.forEach((number, place) => image.data.set([...colour(number), 255], 4 * place));
  context.putImageData(image, 0, 0);
}

function ink(part) {
  const [paper, pen] = theme() === "dark" ? [30, 240] : [246, 24];
  return Array(3).fill(Math.round(paper + (pen - paper) * part));
}

// Numbers as a strip of bars around zero, for the values of a step.
function strip(numbers) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const largest = Math.max(...numbers.map(Math.abs)) || 1;
  const below = Math.max(0, -Math.min(...numbers)) / largest;
  const above = Math.max(0, Math.max(...numbers)) / largest;
  const height = 30;
  const zero = height * (above / (above + below || 1));
  made.setAttribute("viewBox", `0 0 ${numbers.length * 4} ${height}`);
  made.setAttribute("preserveAspectRatio", "none");
  made.setAttribute("class", "strip");
  made.setAttribute("aria-hidden", "true");
  numbers.forEach((number, place) => {
    const tall = Math.max((Math.abs(number) / largest) * height / (above + below || 1), 0.4);
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const box = {x: place * 4 + 0.5, y: number >= 0 ? zero - tall : zero, width: 3, height: tall};
    for (const [name, value] of Object.entries(box)) bar.setAttribute(name, value);
    made.append(bar);
  });
  return made;
}

function shown(number) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  return size >= 1e-3 && size < 1e4 ? number.toFixed(4) : number.toExponential(1).replace("e", "\u202fe").replace("-", "\u2212");
}

function few(numbers, count = 3) {
  const head = Array.from(numbers.slice(0, count), (number) => number.toFixed(3));
  return `[${head.join(", ")}${numbers.length > count ? ", \u2026" : ""}]`;
}

// Arrow keys walk a group of elements of which one is in the tab order; ``columns`` makes it two-dimensional.
function walk(group, items, columns, choose) {
  group.addEventListener("keydown", (event) => {
    const here = items.indexOf(event.target.closest("[data-place]"));
    const row = here - (here % columns);
    const next = {
      ArrowRight: here + 1, ArrowLeft: here - 1, ArrowDown: here + columns, ArrowUp: here - columns,
      Home: event.ctrlKey ? 0 : row, End: event.ctrlKey ? items.length - 1 : Math.min(row + columns, items.length) - 1,
    }[event.key];
    if (here < 0 || next === undefined || event.altKey || event.metaKey) return;
    event.preventDefault();
    if (next < 0 || next >= items.length) return;
    items[next].focus();
    choose(next);
  });
}
