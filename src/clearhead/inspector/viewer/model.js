// The numbers behind every view: weights computed again from queries and keys, exp(score - lse) under the mask.
import {readArray} from "./check.js";

const KEPT_BYTES = 2 ** 28;

export class Model {
  constructor(page) {
    this.page = page;
    this.layers = page.layers;
    this.cache = new Map();
    this.sizes = new Map();
    this.masks = new Map();
  }

  texts(layer) {
    const record = this.layers[layer];
    return {queries: this.page.texts[record.queries], keys: this.page.texts[record.tokens]};
  }

  // A head's numbers, read when they are first asked for; the oldest are let go of when there are many.
  head(layer, head) {
    const name = `${layer}.${head}`;
    let found = this.cache.get(name);
    if (found) this.cache.delete(name);
    else found = this.read(layer, head);
    this.cache.set(name, found);
    return found;
  }

  async read(layer, at) {
    const record = this.layers[layer], head = record.heads[at], path = `layers[${layer}].heads[${at}]`;
    this.sizes.set(`${layer}.${at}`, 4 * record.head_dim * (record.q_len + record.k_len));
    this.forget();
    const [query, key, lse, mask, table, rules] = await Promise.all([
      readArray(head.query, `${path}.query`), readArray(record.keys[head.key], `layers[${layer}].keys[${head.key}]`),
      readArray(head.lse, `${path}.lse`), this.mask(head.mask),
      head.table ? readArray(head.table, `${path}.table`) : null,
      Promise.all(head.rules.map(async (rule, place) => rule.kind === "relative"
        ? {kind: rule.kind, bias: await readArray(rule.bias, `${path}.rules[${place}]`)} : rule)),
    ]);
    const made = new HeadNumbers(record, head, {query, key, lse, mask, table, rules});
    if (head.overview) {
      made.overview = blocksOf(made, head.overview.side, await readArray(head.overview.cells, `${path}.overview`));
      const [entropy, distance, first, received] = await Promise.all(
        ["entropy", "distance", "first", "received"].map((name) => readArray(head[name], `${path}.${name}`)));
      made.known = {entropy, distance, first, received};
    }
    return made;
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

// The largest weight of each block of side x side, NaN where the mask forbids all of it.
function blocksOf({rows, columns, mask}, side, cells) {
  const down = Math.ceil(rows / side), across = Math.ceil(columns / side);
  const open = mask === null ? null : openBlocks(mask, rows, columns, side);
  return {side, down, across, values: Float32Array.from(cells, (cell, at) => (open === null || open[at] ? (cell / 255) ** 2 : NaN))};
}

// Which blocks hold a place that the mask allows; masks remember it, because many heads share one.
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
    this.known = null;
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
    return Math.exp(this.score(row, column) - this.lse[row]);
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

  // Of each row and column, as the page has it or as the weights say.
  get profile() {
    if (this.known === null) this.known = this.summed();
    return this.known;
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

// Two heads' numbers as one: the first's weight less the second's.
export class Difference {
  constructor(one, other) {
    Object.assign(this, {one, other, rows: one.rows, columns: one.columns, overview: null});
    if (one.overview && other.overview) {
      this.overview = {...one.overview, values: less(one.overview.values, other.overview.values)};
    }
  }

  allowed(row, column) {
    return this.one.allowed(row, column) || this.other.allowed(row, column);
  }

  weight(row, column) {
    return this.one.weight(row, column) - this.other.weight(row, column);
  }

  tile(top, bottom, left, right) {
    return less(this.one.tile(top, bottom, left, right), this.other.tile(top, bottom, left, right));
  }
}

function less(one, other) {
  return one.map((weight, at) => (Number.isNaN(weight) && Number.isNaN(other[at]) ? NaN : (weight || 0) - (other[at] || 0)));
}
