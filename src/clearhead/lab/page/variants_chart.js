// Line charts over integers as SVG; lines differ in dash pattern and name, not only in colour.
import {drawn, element} from "./dom.js";
import {shown} from "./worked_dom.js";

const WIDTH = 360, HEIGHT = 180, LEFT = 44, RIGHT = 12, TOP = 8, BOTTOM = 36;

// An axis range with a margin around the values, and its ticks.
function spanOf(numbers) {
  let low = Math.min(...numbers), high = Math.max(...numbers);
  if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
  const margin = 0.05 * (high - low), rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= rough * 0.999);
  [low, high] = [low - margin, high + margin];
  const first = Math.ceil(low / step), count = Math.floor(high / step) - first + 1;
  const ticks = Array.from({length: count}, (_, at) => (first + at) * step);
  return {low, high, ticks, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9))};
}

export function lineChart({title, across, places, lines}) {
  const numbers = lines.flatMap(({values}) => values).filter((value) => value !== null);
  const figure = element("figure", {class: "chart"}, element("figcaption", {text: title}));
  if (!numbers.length) {
    figure.append(element("p", {class: "hint", text: "There is nothing to draw."}));
    return figure;
  }
  const {low, high, ticks, digits} = spanOf(numbers), first = places[0], last = places.at(-1);
  const x = (place) => LEFT + ((place - first) / (last - first || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const ends = lines.map(({name, values}) => {
    const own = values.filter((value) => value !== null);
    return `${name}: ${own.length ? `${shown(Math.min(...own), 2)} to ${shown(Math.max(...own), 2)}` : "none"}`;
  });
  const label = `${title}. ${ends.join(". ")}.`;
  const picture = drawn("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label});
  const text = (x, y, words, anchor) => drawn("text", {x, y, "text-anchor": anchor, class: "tick", text: words});
  const signed = (words) => words.replace("-", "−");
  for (const value of ticks) {
    picture.append(drawn("line", {x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value), class: "rule"}),
      text(LEFT - 5, y(value) + 4, signed(value.toFixed(digits)), "end"));
  }
  const middle = Math.round((first + last) / 2);
  for (const place of [first, middle, last]) {
    picture.append(text(x(place), HEIGHT - BOTTOM + 16, signed(String(place)), "middle"));
  }
  picture.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, across, "middle"));
  for (const {values, look} of lines) picture.append(drawn("path", {d: path(places, values, x, y), class: `line ${look}`}));
  figure.append(picture);
  if (lines.length > 1) figure.append(element("p", {class: "legend"}, ...lines.map(legend)));
  return figure;
}

function legend({name, look}) {
  const sample = drawn("path", {d: "M1 4H23", class: `line ${look}`});
  return element("span", {}, drawn("svg", {viewBox: "0 0 24 8", class: "key", "aria-hidden": "true"}, sample), name);
}

// A line with gaps at missing values; a value between two gaps is a dot.
function path(places, values, x, y) {
  let made = "", open = false;
  values.forEach((value, at) => {
    if (value === null) {
      open = false;
      return;
    }
    const point = `${x(places[at]).toFixed(1)} ${y(value).toFixed(1)}`;
    const alone = !open && (values[at + 1] ?? null) === null;
    made += open ? `L${point}` : alone ? `M${point}l0.01 0` : `M${point}`;
    open = true;
  });
  return made;
}
