// A matrix of weights on a canvas: from the overview down to single weights, computed tile by tile when they are seen.
import {css, inkOn, painterOf, themed} from "./colours.js";
import {drawn, readable} from "./dom.js";

const TILE = 64;
const MOST_TILES = 900;
const SLICE_MS = 9;
const LEFT = 132, TOP = 104, EDGE = 8;
const LARGEST = 72;
const LABEL_FROM = 11, NUMBER_FROM = 44;
const MOST_RECTS = 20000;

export class Matrix {
  constructor(canvas, {signed = false, onSelect, onHover, onMove = () => {}}) {
    Object.assign(this, {canvas, signed, onSelect, onHover, onMove});
    this.context = canvas.getContext("2d");
    this.source = null;
    this.look = {left: 0, top: 0, size: 1};
    this.chosen = {row: 0, column: 0};
    this.tiles = new Map();
    this.wanted = [];
    this.frame = 0;
    this.longest = 0;
    new ResizeObserver(() => this.resized()).observe(canvas);
    this.listen();
  }

  get width() { return this.canvas.clientWidth - LEFT - EDGE; }
  get height() { return this.canvas.clientHeight - TOP - EDGE; }

  // Show other numbers; the place stays where it is if they are of the same sizes.
  show(source, texts, scale) {
    const same = this.source && this.source.rows === source.rows && this.source.columns === source.columns;
    Object.assign(this, {source, texts});
    this.repaint(scale);
    if (!same) this.fit();
  }

  repaint(scale) {
    this.paint = painterOf(scale, this.signed);
    this.tiles.clear();
    this.overview = this.source?.overview ? this.overviewCanvas() : null;
    this.draw();
  }

  resized() {
    const ratio = devicePixelRatio || 1;
    const width = Math.round(this.canvas.clientWidth * ratio), height = Math.round(this.canvas.clientHeight * ratio);
    if (width === 0 || (this.canvas.width === width && this.canvas.height === height)) return;
    const first = !this.sized;
    this.sized = true;
    Object.assign(this.canvas, {width, height});
    if (first && this.source) {
      if (this.asked) this.restore(this.asked);
      else this.fit();
    }
    this.draw();
  }

  get smallest() {
    return Math.min(this.width / this.source.columns, this.height / this.source.rows, LARGEST);
  }

  fit() {
    if (!this.source || this.width <= 0) return;
    this.look = {left: 0, top: 0, size: this.smallest};
    this.moved();
  }

  moved() {
    const {look, source} = this;
    look.size = Math.min(LARGEST, Math.max(this.smallest, look.size));
    look.left = Math.max(0, Math.min(look.left, source.columns - this.width / look.size));
    look.top = Math.max(0, Math.min(look.top, source.rows - this.height / look.size));
    this.onMove(`${look.left.toFixed(1)},${look.top.toFixed(1)},${look.size.toFixed(3)}`);
    this.draw();
  }

  // A place as ``onMove`` told it.
  restore(text) {
    this.asked = text;
    const [left, top, size] = text.split(",").map(Number);
    if (!this.sized || !this.source || ![left, top, size].every(Number.isFinite)) return;
    this.look = {left, top, size};
    this.moved();
  }

  // Around a point of the canvas; by itself around the chosen weight where that is in view, else the middle.
  zoom(factor, x = this.middle.x, y = this.middle.y) {
    const {look} = this, size = Math.min(LARGEST, Math.max(this.smallest, look.size * factor));
    look.left += (x - LEFT) / look.size - (x - LEFT) / size;
    look.top += (y - TOP) / look.size - (y - TOP) / size;
    look.size = size;
    this.moved();
  }

  get middle() {
    const {left, top, size} = this.look, {row, column} = this.chosen;
    const x = LEFT + (column + 0.5 - left) * size, y = TOP + (row + 0.5 - top) * size;
    const inside = x >= LEFT && y >= TOP && x <= LEFT + this.width && y <= TOP + this.height;
    return inside ? {x, y} : {x: LEFT + this.width / 2, y: TOP + this.height / 2};
  }

  zoomTo(row, column) {
    this.look.size = Math.max(this.look.size, 24);
    this.look.left = column - this.width / this.look.size / 2;
    this.look.top = row - this.height / this.look.size / 2;
    this.moved();
  }

  choose(row, column) {
    this.chosen = {row, column};
    const {look} = this, across = this.width / look.size, down = this.height / look.size;
    if (column < look.left || column + 1 > look.left + across) look.left = column - across / 2;
    if (row < look.top || row + 1 > look.top + down) look.top = row - down / 2;
    if (this.source && this.sized) this.moved();
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const column = Math.floor(this.look.left + (x - LEFT) / this.look.size);
    const row = Math.floor(this.look.top + (y - TOP) / this.look.size);
    const inside = x >= LEFT && y >= TOP && this.source && row < this.source.rows && column < this.source.columns;
    return {x, y, row, column, inside: Boolean(inside)};
  }

  listen() {
    const {canvas} = this;
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const {x, y} = this.at(event);
      if (event.shiftKey) this.pan(event.deltaY, 0);
      else this.zoom(Math.exp(-Math.max(-200, Math.min(200, event.deltaY)) * 0.003), x, y);
    }, {passive: false});
    canvas.addEventListener("pointerdown", (event) => {
      drag = {x: event.clientX, y: event.clientY, far: false};
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        const across = drag.x - event.clientX, down = drag.y - event.clientY;
        if (!drag.far && Math.hypot(across, down) < 4) return;
        Object.assign(drag, {x: event.clientX, y: event.clientY, far: true});
        this.pan(across, down);
      }
      const place = this.at(event);
      this.onHover(place.inside && !drag?.far ? place : null);
    });
    canvas.addEventListener("pointerup", (event) => {
      const place = this.at(event);
      if (drag && !drag.far && place.inside) this.onSelect(place.row, place.column);
      drag = null;
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointerleave", () => this.onHover(null));
    canvas.addEventListener("dblclick", (event) => {
      const place = this.at(event);
      if (place.inside) this.zoomTo(place.row, place.column);
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  pan(across, down) {
    this.look.left += across / this.look.size;
    this.look.top += down / this.look.size;
    this.moved();
  }

  key(event) {
    if (!this.source || event.altKey || event.metaKey || event.ctrlKey) return;
    const {row, column} = this.chosen, page = Math.max(1, Math.floor(this.height / this.look.size) - 1);
    const step = event.shiftKey ? 10 : 1;
    const go = (rows, columns) => () => this.onSelect(
      Math.min(this.source.rows - 1, Math.max(0, row + rows)), Math.min(this.source.columns - 1, Math.max(0, column + columns)));
    const action = {
      ArrowUp: go(-step, 0), ArrowDown: go(step, 0), ArrowLeft: go(0, -step), ArrowRight: go(0, step),
      PageUp: go(-page, 0), PageDown: go(page, 0), Home: go(0, -column), End: go(0, this.source.columns),
      "+": () => this.zoom(1.4), "=": () => this.zoom(1.4), "-": () => this.zoom(1 / 1.4), "0": () => this.fit(),
      Enter: () => this.zoomTo(row, column),
    }[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  overviewCanvas() {
    const {down, across, values} = this.source.overview;
    return this.pixels(across, down, values);
  }

  pixels(width, height, values) {
    const canvas = document.createElement("canvas");
    Object.assign(canvas, {width, height});
    const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    for (let at = 0; at < values.length; at++) pixels[at] = this.paint(values[at]);
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  draw() {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.now());
  }

  // Whether every weight in view is the exact one.
  get settled() {
    return !this.frame && this.wanted.length === 0;
  }

  get exact() {
    return !this.overview || this.look.size >= 1;
  }

  now() {
    const began = performance.now();
    this.frame = 0;
    if (!this.source || !this.sized) return;
    this.wanted = [];
    const {context} = this, ratio = devicePixelRatio || 1;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = themed("--card");
    context.fillRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP, this.width, this.height);
    context.clip();
    context.imageSmoothingEnabled = false;
    if (this.overview) this.drawOverview();
    if (this.exact) this.drawTiles(began);
    if (this.look.size >= NUMBER_FROM) this.drawNumbers();
    this.drawChosen();
    context.restore();
    this.drawAxes();
    this.longest = Math.max(this.longest, performance.now() - began);
    if (this.wanted.length > 0) this.draw();
  }

  drawOverview() {
    const {side} = this.source.overview, {left, top, size} = this.look;
    this.context.drawImage(this.overview, LEFT - left * size, TOP - top * size,
      this.overview.width * side * size, this.overview.height * side * size);
  }

  drawTiles(began) {
    const {left, top, size} = this.look, {rows, columns} = this.source;
    const last = {row: Math.min(rows, top + this.height / size), column: Math.min(columns, left + this.width / size)};
    for (let down = Math.floor(top / TILE); down * TILE < last.row; down++) {
      for (let across = Math.floor(left / TILE); across * TILE < last.column; across++) {
        const tile = this.tile(down, across, began);
        if (!tile) continue;
        const x = LEFT + (across * TILE - left) * size, y = TOP + (down * TILE - top) * size;
        this.context.drawImage(tile, x, y, tile.width * size, tile.height * size);
      }
    }
  }

  // A tile's pixels; null while there is no time left in this frame to compute it.
  tile(down, across, began) {
    const name = `${down}.${across}`;
    let tile = this.tiles.get(name);
    if (tile) {
      this.tiles.delete(name);
      this.tiles.set(name, tile);
      return tile;
    }
    if (performance.now() - began > SLICE_MS) {
      this.wanted.push(name);
      return null;
    }
    const {rows, columns} = this.source;
    const bottom = Math.min(rows, (down + 1) * TILE), right = Math.min(columns, (across + 1) * TILE);
    const values = this.source.tile(down * TILE, bottom, across * TILE, right);
    tile = this.pixels(right - across * TILE, bottom - down * TILE, values);
    this.tiles.set(name, tile);
    if (this.tiles.size > MOST_TILES) this.tiles.delete(this.tiles.keys().next().value);
    return tile;
  }

  *cells() {
    const {left, top, size} = this.look, {rows, columns} = this.source;
    const right = Math.min(columns, Math.ceil(left + this.width / size)), bottom = Math.min(rows, Math.ceil(top + this.height / size));
    for (let row = Math.floor(top); row < bottom; row++) {
      for (let column = Math.floor(left); column < right; column++) {
        yield {row, column, x: LEFT + (column - left) * size, y: TOP + (row - top) * size};
      }
    }
  }

  drawNumbers() {
    const {context} = this, half = this.look.size / 2;
    context.font = "11px ui-monospace, monospace";
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const {row, column, x, y} of this.cells()) {
      if (!this.source.allowed(row, column)) continue;
      const weight = this.source.weight(row, column);
      context.fillStyle = inkOn(this.paint(weight));
      context.fillText(brief(weight), x + half, y + half);
    }
  }

  drawChosen() {
    const {context} = this, {left, top, size} = this.look, {row, column} = this.chosen;
    const x = LEFT + (column - left) * size, y = TOP + (row - top) * size, wide = Math.max(size, 3);
    const across = Math.min(this.width, (this.source.columns - left) * size), down = Math.min(this.height, (this.source.rows - top) * size);
    context.lineWidth = 1;
    context.strokeStyle = themed("--mark");
    context.globalAlpha = 0.55;
    context.strokeRect(LEFT - 2, y - 0.5, across + 4, wide + 1);
    context.strokeRect(x - 0.5, TOP - 2, wide + 1, down + 4);
    context.globalAlpha = 1;
    context.lineWidth = 2;
    context.strokeRect(x - 1, y - 1, wide + 2, wide + 2);
  }

  drawAxes() {
    const {context} = this, {left, top, size} = this.look, {rows, columns} = this.source;
    context.textBaseline = "middle";
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = themed("--soft");
    context.textAlign = "left";
    context.fillText("queries ↓", 6, TOP - 10);
    context.textAlign = "right";
    context.fillText("keys →", LEFT - 8, 12);
    const step = size >= LABEL_FROM ? 1 : niceStep(64 / size);
    for (let row = Math.ceil(top / step) * step; row < Math.min(rows, top + this.height / size); row += step) {
      this.label(row, "queries", LEFT - 6, TOP + (row - top + (step === 1 ? 0.5 : 0)) * size, 0, row === this.chosen.row, step);
    }
    for (let column = Math.ceil(left / step) * step; column < Math.min(columns, left + this.width / size); column += step) {
      this.label(column, "keys", LEFT + (column - left + (step === 1 ? 0.5 : 0)) * size, TOP - 6, -Math.PI / 2, column === this.chosen.column, step);
    }
    if (step > 1) {
      this.label(this.chosen.row, "queries", LEFT - 6, TOP + (this.chosen.row - top) * size, 0, true, 1);
      this.label(this.chosen.column, "keys", LEFT + (this.chosen.column - left) * size, TOP - 6, -Math.PI / 2, true, 1);
    }
  }

  // One token on an axis, or its number where there is no room for all.
  label(place, axis, x, y, turn, chosen, step) {
    const along = turn ? x - LEFT : y - TOP;
    if (along < -1 || along > (turn ? this.width : this.height) + 1) return;
    const {context} = this, room = (turn ? TOP : LEFT) - 16;
    const text = step === 1 ? fitted(context, readable(this.texts[axis][place]), room) : String(place);
    context.save();
    context.translate(x, y);
    context.rotate(turn);
    context.textAlign = turn ? "left" : "right";
    context.font = `${chosen ? "600 " : ""}12px system-ui, sans-serif`;
    if (chosen) {
      const width = context.measureText(text).width + 8;
      context.fillStyle = themed("--mark");
      context.fillRect(turn ? -4 : 4 - width, -8, width, 16);
    }
    context.fillStyle = chosen ? themed("--card") : themed("--text");
    context.fillText(text, 0, 0.5);
    context.restore();
  }

  // The view as a drawing: each weight a rectangle, or the picture where there are too many.
  svg() {
    const {size} = this.look, width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    const made = drawn("svg", {xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`});
    const cells = (this.width / size) * (this.height / size);
    if (!this.exact || cells > MOST_RECTS) {
      made.append(drawn("image", {href: this.canvas.toDataURL("image/png"), width, height}));
      return made;
    }
    made.append(drawn("rect", {width, height, fill: themed("--card")}));
    const rows = new Set(), columns = new Set();
    for (const {row, column, x, y} of this.cells()) {
      const weight = this.source.allowed(row, column) ? this.source.weight(row, column) : NaN;
      const box = drawn("rect", {x: x.toFixed(2), y: y.toFixed(2), width: size.toFixed(2), height: size.toFixed(2), fill: css(this.paint(weight))});
      if (!Number.isNaN(weight)) box.append(drawn("title", {text: `${row} → ${column}: ${weight}`}));
      made.append(box);
      rows.add(row);
      columns.add(column);
    }
    if (size < LABEL_FROM) return made;
    const style = {"font-size": 12, "font-family": "sans-serif", fill: themed("--text"), "dominant-baseline": "middle"};
    for (const row of rows) {
      const y = TOP + (row - this.look.top + 0.5) * size;
      made.append(drawn("text", {...style, x: LEFT - 6, y, "text-anchor": "end", text: readable(this.texts.queries[row])}));
    }
    for (const column of columns) {
      const x = LEFT + (column - this.look.left + 0.5) * size;
      made.append(drawn("text", {...style, transform: `translate(${x} ${TOP - 6}) rotate(-90)`, text: readable(this.texts.keys[column])}));
    }
    return made;
  }

  png() {
    return new Promise((resolve) => this.canvas.toBlob(resolve, "image/png"));
  }
}

// A weight in the room of a cell.
function brief(weight) {
  const size = Math.abs(weight);
  const text = size === 0 ? "0" : size >= 0.001 ? weight.toFixed(3) : weight.toExponential(1);
  return text.replace("-", "−");
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((part) => part * power).find((step) => step >= Math.max(least, 2)) ?? Math.ceil(least);
}

// As much of a text as there is room for, never cutting a letter from its marks.
export function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = [...new Intl.Segmenter().segment(text)].map((each) => each.segment);
  while (letters.length > 1 && context.measureText(`${letters.join("")}…`).width > room) letters.pop();
  return `${letters.join("")}…`;
}
