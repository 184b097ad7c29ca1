// A matrix of weights on a canvas, from the overview down to single weights, computed in tiles as they become visible.
import {PLACE, drawAxes, matrixSvg} from "./axes.js";
import {inkOn, painterOf, printing, themed} from "./colours.js";

const TILE = 64;
const MOST_TILES = 900;
const SLICE_MS = 9;
const {left: LEFT, top: TOP, edge: EDGE} = PLACE;
const LARGEST = 72;
const NUMBER_FROM = 44;
// From this cell size on, pairs that only one of two masks allows are hatched; below, every fourth cell is filled.
const HATCH_FROM = 6;
const CHECK = 0xffdedede;

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

  // Show another head; the position is unchanged if the sizes are equal.
  show(source, texts, scale) {
    const same = this.source && this.source.rows === source.rows && this.source.columns === source.columns;
    Object.assign(this, {source, texts});
    this.repaint(scale);
    if (!same) this.fit();
  }

  repaint(scale) {
    this.resized();
    this.paint = painterOf(scale, this.signed);
    this.tiles.clear();
    this.overview = this.source?.overview ? this.overviewCanvas() : null;
    this.draw();
  }

  // On paper dots are finer than on a screen.
  get ratio() {
    return printing() ? 3 : devicePixelRatio || 1;
  }

  resized() {
    const {ratio} = this;
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
    const {look, source} = this, hatched = this.hatched;
    look.size = Math.min(LARGEST, Math.max(this.smallest, look.size));
    look.left = Math.max(0, Math.min(look.left, source.columns - this.width / look.size));
    look.top = Math.max(0, Math.min(look.top, source.rows - this.height / look.size));
    if (source.only && hatched !== this.hatched) this.tiles.clear();
    this.onMove(`${look.left.toFixed(1)},${look.top.toFixed(1)},${look.size.toFixed(3)}`);
    this.draw();
  }

  // The pair that ``onMove`` reported.
  restore(text) {
    this.asked = text;
    const [left, top, size] = text.split(",").map(Number);
    if (!this.sized || !this.source || ![left, top, size].every(Number.isFinite)) return;
    this.look = {left, top, size};
    this.moved();
  }

  // Zoom around a point of the canvas; by default the selected weight if it is in view, else the centre.
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

  get hatched() {
    return this.look.size >= HATCH_FROM;
  }

  overviewCanvas() {
    const {down, across, values, only} = this.source.overview;
    return this.pixels(across, down, values, only && ((row, column) => only[row * across + column]));
  }

  // ``only`` gives which of two masks alone allows a pair, 1 or 2, or 0; they are hatched / and \.
  pixels(width, height, values, only = null) {
    const canvas = document.createElement("canvas");
    Object.assign(canvas, {width, height});
    const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    for (let at = 0; at < values.length; at++) pixels[at] = this.paint(values[at]);
    // Forbidden pairs without colours: a checked pattern on white.
    for (let at = 0; printing() && at < values.length; at++) {
      if (Number.isNaN(values[at]) && (at + (width % 2 === 0 ? Math.floor(at / width) : 0)) % 2) pixels[at] = CHECK;
    }
    if (only) {
      const ink = pixelOf(themed("--text"));
      for (let row = 0, at = 0; row < height; row++) {
        for (let column = 0; column < width; column++, at++) {
          const kind = only(row, column);
          if (kind && (kind === 1 ? row + column : row - column + width * 4) % 4 === 0) pixels[at] = ink;
        }
      }
    }
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  draw() {
    // There are no animation frames while a page is printed.
    if (printing()) this.now();
    else if (!this.frame) this.frame = requestAnimationFrame(() => this.now());
  }

  // Whether every visible cell is a single weight.
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
    const {context, ratio} = this;
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
    if (this.source.only && this.exact && this.hatched) this.drawHatches();
    if (this.look.size >= NUMBER_FROM) this.drawNumbers();
    this.drawChosen();
    context.restore();
    drawAxes(this);
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

  // A tile's pixels; null if this frame has no time left to compute it.
  tile(down, across, began) {
    const name = `${down}.${across}`;
    let tile = this.tiles.get(name);
    if (tile) {
      this.tiles.delete(name);
      this.tiles.set(name, tile);
      return tile;
    }
    if (!printing() && performance.now() - began > SLICE_MS) {
      this.wanted.push(name);
      return null;
    }
    const {rows, columns} = this.source;
    const bottom = Math.min(rows, (down + 1) * TILE), right = Math.min(columns, (across + 1) * TILE);
    const values = this.source.tile(down * TILE, bottom, across * TILE, right);
    const only = this.source.only && !this.hatched ? (row, column) => this.source.only(row + down * TILE, column + across * TILE) : null;
    tile = this.pixels(right - across * TILE, bottom - down * TILE, values, only);
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

  drawHatches() {
    const {context} = this;
    context.beginPath();
    for (const {x, y, to} of this.hatches()) {
      context.moveTo(x, to.y);
      context.lineTo(to.x, y);
    }
    context.strokeStyle = themed("--text");
    context.lineWidth = 1;
    context.stroke();
  }

  // Hatches each cell that only one of two masks allows.
  *hatches() {
    const {size} = this.look, gap = size / 5;
    for (const {row, column, x, y} of this.cells()) {
      const kind = this.source.only(row, column);
      if (kind === 1) yield {x: x + gap, y: y + gap, to: {x: x + size - gap, y: y + size - gap}};
      if (kind === 2) yield {x: x + size - gap, y: y + gap, to: {x: x + gap, y: y + size - gap}};
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

  svg() { return matrixSvg(this); }

  png() {
    return new Promise((resolve) => this.canvas.toBlob(resolve, "image/png"));
  }
}

// A style sheet's colour as a pixel.
function pixelOf(colour) {
  const bytes = new Uint8ClampedArray([...[1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)), 255]);
  return new Uint32Array(bytes.buffer)[0];
}

// A weight as a text that fits in a cell.
function brief(weight) {
  const size = Math.abs(weight);
  const text = size === 0 ? "0" : size >= 0.001 ? weight.toFixed(3) : weight.toExponential(1);
  return text.replaceAll("-", "−");
}
