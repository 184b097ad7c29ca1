// A small matrix on a canvas: a mask, or a head's weights. One cell is selected, by pointer or by arrow keys.
import {css, painterOf, themed} from "./colours.js";
import {element} from "./dom.js";

const LABELS_FROM = 9, EDGE = 3;
const MOVES = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};

export class SquareMap {
  constructor({label, labels = false, choose}) {
    Object.assign(this, {labels, choose, numbers: [], words: [], chosen: null, tiles: null});
    this.canvas = element("canvas", {
      class: "square", tabindex: 0, role: "application", "aria-roledescription": "map, arrow keys move in it", "aria-label": label,
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const at = this.placeOf(event);
      if (at) this.choose(at);
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  // ``numbers`` by query and key, null if forbidden; ``tiles`` is the side of the tiles to outline; ``colour`` is the
  // single colour of allowed cells, for a mask.
  show(numbers, words, {tiles = null, colour = null, label = null} = {}) {
    Object.assign(this, {numbers, words, tiles, colour});
    if (label) this.canvas.setAttribute("aria-label", label);
    this.draw();
  }

  choosePlace(place) {
    this.chosen = place;
    this.draw();
  }

  key(event) {
    const move = MOVES[event.key], side = this.numbers.length;
    if (!move || !side || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const [query, key] = this.chosen ?? [0, 0], clamped = (place) => Math.max(0, Math.min(side - 1, place));
    this.choose(this.chosen ? [clamped(query + move[0]), clamped(key + move[1])] : [0, 0]);
  }

  // The position of the matrix and the size of a cell, in CSS pixels.
  get layout() {
    const width = this.canvas.clientWidth, side = Math.max(1, this.numbers.length);
    const labelled = this.labels && (width - 52) / side >= LABELS_FROM;
    const left = labelled ? 46 : EDGE, top = labelled ? 46 : EDGE;
    return {left, top, size: (width - left - EDGE) / side, labelled};
  }

  placeOf(event) {
    const box = this.canvas.getBoundingClientRect(), {left, top, size} = this.layout;
    const place = [Math.floor((event.clientY - box.top - top) / size), Math.floor((event.clientX - box.left - left) / size)];
    return place.every((at) => at >= 0 && at < this.numbers.length) ? place : null;
  }

  draw() {
    const ratio = devicePixelRatio || 1, width = this.canvas.clientWidth, side = this.numbers.length;
    if (!width || !side) return;
    Object.assign(this.canvas, {width: Math.round(width * ratio), height: Math.round(width * ratio)});
    const pen = this.canvas.getContext("2d"), {left, top, size, labelled} = this.layout;
    pen.scale(ratio, ratio);
    const paint = painterOf("root"), gap = size > 7 ? 1 : 0;
    // Cell borders on whole pixels, to avoid seams between small cells.
    const edge = (from, at) => Math.round((from + at * size) * ratio) / ratio;
    this.numbers.forEach((row, query) => row.forEach((number, key) => {
      const x = edge(left, key), y = edge(top, query);
      pen.fillStyle = this.colour && number !== null ? this.colour : css(paint(number ?? NaN));
      pen.fillRect(x, y, edge(left, key + 1) - x - gap, edge(top, query + 1) - y - gap);
    }));
    if (labelled) this.write(pen, left, top, size);
    if (this.tiles) this.lines(pen, left, top, size);
    if (this.chosen && this.chosen.every((at) => at < side)) this.frame(pen, left, top, size);
  }

  write(pen, left, top, size) {
    pen.fillStyle = themed("--soft");
    pen.font = `${Math.min(12, size)}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    this.words.forEach((word, at) => {
      pen.textAlign = "right";
      pen.fillText(word, left - 4, top + (at + 0.5) * size, left - 6);
      pen.save();
      pen.translate(left + (at + 0.5) * size, top - 4);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "left";
      pen.fillText(word, 0, 0, top - 6);
      pen.restore();
    });
  }

  lines(pen, left, top, size) {
    const whole = this.numbers.length * size;
    pen.strokeStyle = themed("--mark");
    pen.globalAlpha = 0.6;
    pen.lineWidth = 1;
    for (let at = this.tiles; at < this.numbers.length; at += this.tiles) {
      pen.beginPath();
      pen.moveTo(left + at * size - 0.5, top);
      pen.lineTo(left + at * size - 0.5, top + whole);
      pen.moveTo(left, top + at * size - 0.5);
      pen.lineTo(left + whole, top + at * size - 0.5);
      pen.stroke();
    }
    pen.globalAlpha = 1;
  }

  frame(pen, left, top, size) {
    const [query, key] = this.chosen;
    pen.strokeStyle = themed("--mark");
    pen.lineWidth = 2;
    pen.strokeRect(left + key * size - 1, top + query * size - 1, size + 1, size + 1);
  }
}
