// The data of every view: weights computed from queries and keys, exp(score - lse) under the mask.
import {readArray} from "./check.js";
import {decoded} from "./dom.js";

const KEPT_BYTES = 2 ** 28;

export class Model {
  constructor(page) {
    this.page = page;
    this.layers = page.layers;
    this.cache = new Map();
    this.sizes = new Map();
    this.masks = new Map();
  }

  // The indices of a run's layers.
  layersOf(run) {
    return [...this.layers.keys()].filter((layer) => this.layers[layer].run === run);
  }

  nameOf(layer) {
    return this.layers[layer].name || `layer ${layer}`;
  }

  // A picture as a canvas of its own size, with its grid of patches.
  picture(place) {
    this.pictures ??= new Map();
    if (!this.pictures.has(place)) this.pictures.set(place, this.readPicture(place));
    return this.pictures.get(place);
  }

  async readPicture(place) {
    const {pixels, rows, columns, first} = this.page.images[place], [height, width, channels] = pixels.shape;
    const bytes = await readArray(pixels, `images[${place}].pixels`), image = new ImageData(width, height);
    for (let at = 0; at < width * height; at++) {
      for (let channel = 0; channel < 3; channel++) image.data[at * 4 + channel] = bytes[at * channels + (channel % channels)];
      image.data[at * 4 + 3] = 255;
    }
    const canvas = canvasOf(image);
    for (let at = 0; at < image.data.length; at += 4) {
      const [red, green, blue] = image.data.subarray(at, at + 3);
      image.data.fill(0.2126 * red + 0.7152 * green + 0.0722 * blue, at, at + 3);
    }
    return {canvas, grey: canvasOf(image), rows, columns, first};
  }

  texts(layer) {
    const {queries, tokens} = this.layers[layer];
    return {queries: this.text(queries), keys: this.text(tokens)};
  }

  text(place) {
    this.spelled ??= new Map();
    if (!this.spelled.has(place)) this.spelled.set(place, decoded(this.page.texts[place]));
    return this.spelled.get(place);
  }

  // A head's data, decoded on first use; the cache evicts the least recently used head.
  head(layer, head) {
    const name = `${layer}.${head}`;
    let numbers = this.cache.get(name);
    if (numbers) this.cache.delete(name);
    else numbers = this.read(layer, head);
    this.cache.set(name, numbers);
    return numbers;
  }

  async read(layer, at) {
    const record = this.layers[layer], head = record.heads[at], path = `layers[${layer}].heads[${at}]`;
    const numbers = record.head_dim * (record.q_len + record.k_len) + (head.fix ? record.q_len * record.k_len : 0);
    this.sizes.set(`${layer}.${at}`, 4 * numbers);
    this.forget();
    const [query, key, lse, mask, table, fix, near, norms, rules] = await Promise.all([
      readArray(head.query, `${path}.query`), readArray(record.keys[head.key], `layers[${layer}].keys[${head.key}]`),
      readArray(head.lse, `${path}.lse`), this.mask(head.mask),
      head.table ? readArray(head.table, `${path}.table`) : null,
      head.fix ? readArray(head.fix, `${path}.fix`) : null,
      head.near ? readNear(head.near, `${path}.near`) : null,
      record.norms.length > 0 ? readArray(record.norms[head.key], `layers[${layer}].norms[${head.key}]`) : null,
      Promise.all(head.rules.map(async (rule, place) => rule.kind === "relative"
        ? {kind: rule.kind, bias: await readArray(rule.bias, `${path}.rules[${place}]`)} : rule)),
    ]);
    const made = new HeadNumbers(record, head, {query, key, lse, mask, table, fix, near, norms, rules});
    made.values = async () => made.carried ??= await this.values(layer, at);
    if (head.overview) {
      made.overview = blocksOf(made, head.overview.side, await readArray(head.overview.cells, `${path}.overview`));
      const [entropy, distance, first, received] = await Promise.all(
        ["entropy", "distance", "first", "received"].map((name) => readArray(head[name], `${path}.${name}`)));
      made.stored = {entropy, distance, first, received};
    }
    return made;
  }

  // Each key's value, and the correction of the sum of weighted values; null if the page does not store values.
  async values(layer, at) {
    const record = this.layers[layer], {key, rest} = record.heads[at];
    if (record.values.length === 0) return null;
    const [values, off] = await Promise.all([
      readArray(record.values[key], `layers[${layer}].values[${key}]`), readArray(rest, `layers[${layer}].heads[${at}].rest`),
    ]);
    return {values, rest: off, width: record.value_dim};
  }

  forget() {
    let bytes = 0;
    for (const size of this.sizes.values()) bytes += size;
    for (const name of this.cache.keys()) {
      if (bytes <= KEPT_BYTES || this.sizes.size <= 2) return;
      bytes -= this.sizes.get(name) ?? 0;
      this.sizes.delete(name);
      this.cache.delete(name);
    }
  }

  mask(place) {
    if (place === null) return null;
    if (!this.masks.has(place)) this.masks.set(place, this.readMask(place));
    return this.masks.get(place);
  }

  async readMask(place) {
    const mask = this.page.masks[place], path = `masks[${place}]`;
    if (mask.kind === "table") return {kind: "table", bits: await readArray(mask.bits, path)};
    const [start, stop] = await Promise.all([readArray(mask.start, path), readArray(mask.stop, path)]);
    return {kind: "runs", start, stop, runs: mask.start.shape[1]};
  }

  async thumb(layer, at) {
    const {q_len: rows, k_len: columns, heads} = this.layers[layer], head = heads[at];
    const cells = await readArray(head.thumb.cells, `layers[${layer}].heads[${at}].thumb`);
    return blocksOf({rows, columns, mask: await this.mask(head.mask)}, head.thumb.side, cells);
  }
}

async function readNear(near, path) {
  const [counts, places, fix] = await Promise.all(["counts", "places", "fix"].map((name) => readArray(near[name], `${path}.${name}`)));
  const starts = new Int32Array(counts.length + 1);
  for (let row = 0; row < counts.length; row++) starts[row + 1] = starts[row] + counts[row];
  return {starts, places, fix};
}

function canvasOf(image) {
  const canvas = document.createElement("canvas");
  Object.assign(canvas, {width: image.width, height: image.height});
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// The largest weight of each block of side x side, NaN where the mask forbids all of it.
function blocksOf({rows, columns, mask}, side, cells) {
  const down = Math.ceil(rows / side), across = Math.ceil(columns / side);
  const open = mask === null ? null : openBlocks(mask, rows, columns, side);
  return {side, down, across, values: Float32Array.from(cells, (cell, at) => (open === null || open[at] ? (cell / 255) ** 2 : NaN))};
}

// Which blocks contain a pair that the mask allows; cached in the mask, as many heads share one.
function openBlocks(mask, rows, columns, side) {
  mask.open ??= new Map();
  if (mask.open.has(side)) return mask.open.get(side);
  const across = Math.ceil(columns / side), open = new Uint8Array(Math.ceil(rows / side) * across);
  const bytes = Math.ceil(columns / 8);
  for (let row = 0; row < rows; row++) {
    const line = Math.floor(row / side) * across;
    if (mask.kind === "runs") {
      for (let run = row * mask.runs, end = run + mask.runs; run < end; run++) {
        if (mask.stop[run] <= mask.start[run]) continue;
        open.fill(1, line + Math.floor(mask.start[run] / side), line + Math.floor((mask.stop[run] - 1) / side) + 1);
      }
    } else {
      for (let byte = 0; byte < bytes; byte++) {
        const bits = mask.bits[row * bytes + byte];
        for (let bit = 0; bits >> bit; bit++) {
          if ((bits >> bit) & 1) open[line + Math.floor((byte * 8 + bit) / side)] = 1;
        }
      }
    }
  }
  mask.open.set(side, open);
  return open;
}

class HeadNumbers {
  constructor(layer, head, parts) {
    Object.assign(this, parts);
    this.number = head.head;
    this.error = head.error;
    this.rows = layer.q_len;
    this.columns = layer.k_len;
    this.first = layer.first;
    this.width = layer.head_dim;
    this.scale = layer.scale;
    this.overview = null;
    this.stored = null;
  }

  allowed(row, column) {
    if (this.mask === null) return true;
    if (this.mask.kind === "table") {
      const byte = this.mask.bits[row * Math.ceil(this.columns / 8) + (column >> 3)];
      return ((byte >> (column & 7)) & 1) === 1;
    }
    for (let run = row * this.mask.runs, end = run + this.mask.runs; run < end; run++) {
      if (column >= this.mask.start[run] && column < this.mask.stop[run]) return true;
    }
    return false;
  }

  // The intervals of keys, [start, stop), that a row may attend to.
  open(row) {
    if (this.mask === null) return [[0, this.columns]];
    const made = [];
    if (this.mask.kind === "runs") {
      for (let run = row * this.mask.runs, end = run + this.mask.runs; run < end; run++) {
        if (this.mask.stop[run] > this.mask.start[run]) made.push([this.mask.start[run], this.mask.stop[run]]);
      }
      return made;
    }
    for (let column = 0; column < this.columns; column++) {
      if (!this.allowed(row, column)) continue;
      if (made.length > 0 && made.at(-1)[1] === column) made.at(-1)[1]++;
      else made.push([column, column + 1]);
    }
    return made;
  }

  raw(row, column) {
    let sum = 0;
    for (let i = row * this.width, j = column * this.width, end = i + this.width; i < end; i++, j++) {
      sum += this.query[i] * this.key[j];
    }
    return sum;
  }

  // The score after rules, before the mask.
  score(row, column) {
    if (this.table) return this.table[row * this.columns + column];
    let score = this.raw(row, column) * this.scale;
    for (const rule of this.rules) {
      if (rule.kind === "softcap") score = rule.cap * Math.tanh(score / rule.cap);
      else score += rule.bias[row - column + this.columns - 1];
    }
    return score;
  }

  weight(row, column) {
    if (this.lse[row] === -Infinity || !this.allowed(row, column)) return 0;
    const weight = Math.exp(this.score(row, column) - this.lse[row]);
    if (this.near !== null) return Math.max(0, weight + this.named(row, column));
    return this.fix === null ? weight : Math.max(0, weight + this.fix[row * this.columns + column]);
  }

  // The correction of a large weight of a long row.
  named(row, column) {
    const {starts, places, fix} = this.near;
    for (let at = starts[row], end = starts[row + 1]; at < end; at++) if (places[at] === column) return fix[at];
    return 0;
  }

  // Weights of a rectangle, row by row; NaN where the mask forbids, so that its shape can be drawn.
  tile(top, bottom, left, right) {
    const made = new Float32Array((bottom - top) * (right - left));
    let at = 0;
    for (let row = top; row < bottom; row++) {
      for (let column = left; column < right; column++) {
        made[at++] = this.allowed(row, column) ? this.weight(row, column) : NaN;
      }
    }
    return made;
  }

  row(row) {
    return Float32Array.from({length: this.columns}, (_, column) => this.weight(row, column));
  }

  // A row's output: the sum of weighted values, plus the correction for quantisation.
  output(row, carried) {
    const {values, rest, width} = carried, sum = Float64Array.from(rest.subarray(row * width, (row + 1) * width));
    for (let column = 0; column < this.columns; column++) {
      const weight = this.weight(row, column);
      if (weight === 0) continue;
      for (let channel = 0, at = column * width; channel < width; channel++, at++) sum[channel] += weight * values[at];
    }
    return sum;
  }

  // The columns of a row's largest weights, ties to the lower column.
  top(row, count) {
    const best = [];
    for (let column = 0; column < this.columns; column++) {
      const weight = this.weight(row, column);
      if (!(weight > 0) || (best.length === count && weight <= best[count - 1].weight)) continue;
      let place = best.length;
      while (place > 0 && best[place - 1].weight < weight) place--;
      best.splice(place, 0, {row, column, weight});
      if (best.length > count) best.pop();
    }
    return best;
  }

  // The profile of each row and column, as stored in the page or computed from the weights.
  get profile() {
    if (this.stored === null) this.stored = this.summed();
    return this.stored;
  }

  summed() {
    const made = {
      entropy: new Float32Array(this.rows), distance: new Float32Array(this.rows), first: new Float32Array(this.rows),
      received: new Float32Array(this.columns),
    };
    for (let row = 0; row < this.rows; row++) {
      for (let column = 0; column < this.columns; column++) {
        const weight = this.weight(row, column);
        if (!(weight > 0)) continue;
        made.entropy[row] -= weight * Math.log(weight);
        made.distance[row] += weight * Math.abs(this.first + row - column);
        made.received[column] += weight;
        if (column === 0) made.first[row] = weight;
      }
      // A weight that rounds to just above 1 has a logarithm above 0.
      made.entropy[row] = Math.max(0, made.entropy[row]);
    }
    return made;
  }
}
