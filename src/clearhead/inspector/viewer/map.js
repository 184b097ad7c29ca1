// One head as a matrix, with an overview, zoom and pan down to single weights.
import {SCALES, css, painterOf, printing} from "./colours.js";
import {byId, readable, shown} from "./dom.js";
import {Matrix} from "./painter.js";
import {change, state} from "./state.js";

const MOST_CSV = 250000;

export class MapView {
  constructor() {
    this.matrix = new Matrix(byId("map"), {
      onSelect: (query, key) => change({query, key}),
      onHover: (place) => this.hover(place),
      onMove: (zoom) => { this.moving = true; change({zoom}); this.moving = false; this.note(); },
    });
    byId("zoom-in").addEventListener("click", () => this.matrix.zoom(1.6));
    byId("zoom-out").addEventListener("click", () => this.matrix.zoom(1 / 1.6));
    byId("zoom-all").addEventListener("click", () => this.matrix.fit());
    byId("zoom-token").addEventListener("click", () => this.matrix.zoomTo(state.query, state.key));
  }

  render({numbers, texts}, changed) {
    this.numbers = numbers;
    this.texts = texts;
    const {matrix} = this;
    if (matrix.source !== numbers || changed.has("scale") || changed.has("theme")) {
      const asked = matrix.source === null ? state.zoom : "";
      if (asked) matrix.asked = asked;
      matrix.show(numbers, texts, state.scale);
      if (asked) matrix.restore(asked);
      legend(byId("legend"), byId("ticks"), state.scale);
    } else if (changed.has("zoom") && !this.moving && state.zoom) matrix.restore(state.zoom);
    if (matrix.chosen.row !== state.query || matrix.chosen.column !== state.key) matrix.choose(state.query, state.key);
    else matrix.draw();
    this.note();
  }

  note() {
    const {matrix} = this;
    if (!matrix.source) return;
    const {error} = matrix.source;
    const what = matrix.exact ? "Each cell is one weight, computed in this page"
      : `Each cell is the largest weight of ${matrix.source.overview.side} × ${matrix.source.overview.side}; zoom in for single weights`;
    byId("map-note").textContent = `${what}. Weights are within ${shown(error.weight, 5)} and scores within ${shown(error.score, 5)} of the library’s. ${printing() ? "Checked" : "Grey"}: the mask forbids it.`;
  }

  hover(place) {
    const tip = byId("tip");
    tip.hidden = !place;
    if (!place) return;
    tip.textContent = describe(this.numbers, this.texts, place.row, place.column);
    const box = byId("map").getBoundingClientRect();
    tip.style.left = `${Math.min(place.x + 16, box.width - 300)}px`;
    tip.style.top = `${Math.min(place.y + 18, box.height - 90)}px`;
  }

  svg() { return this.matrix.svg(); }
  png() { return this.matrix.png(); }

  csv() {
    const rows = [["query", "query token", "key", "key token", "allowed", "score", "weight"]];
    for (const {row, column} of this.matrix.cells()) {
      if (rows.length > MOST_CSV) break;
      const {queries, keys} = this.texts;
      rows.push([row, queries[row], column, keys[column], this.numbers.allowed(row, column), this.numbers.score(row, column), this.numbers.weight(row, column)]);
    }
    return rows;
  }
}

// A sentence with the query, key, weight and score.
export function describe(numbers, texts, row, column) {
  const start = `Query ${row} “${readable(texts.queries[row])}” → key ${column} “${readable(texts.keys[column])}”: `;
  if (!numbers.allowed(row, column)) return `${start}forbidden by the mask`;
  return `${start}weight ${shown(numbers.weight(row, column), 5)}, score ${shown(numbers.score(row, column), 3)}`;
}

export function legend(canvas, ticks, scale, signed = false) {
  const paint = painterOf(scale, signed), context = canvas.getContext("2d");
  const {place, ticks: marks} = SCALES[scale];
  const weightAt = (part) => {
    // The scale's inverse by bisection, as scales are increasing.
    let low = 0, high = 1;
    for (let turn = 0; turn < 30; turn++) {
      const middle = (low + high) / 2;
      if (place(middle) < part) low = middle;
      else high = middle;
    }
    return high;
  };
  for (let x = 0; x < canvas.width; x++) {
    const part = x / (canvas.width - 1);
    context.fillStyle = css(paint(signed ? Math.sign(part - 0.5) * weightAt(Math.abs(2 * part - 1)) : weightAt(part)));
    context.fillRect(x, 0, 1, canvas.height);
  }
  ticks.textContent = signed ? "−1 … 0 … 1" : `weight ${marks.join(" · ")} (${SCALES[scale].name})`;
}
