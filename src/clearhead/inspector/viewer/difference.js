// The difference of two heads: the first one's weights minus the second one's.
export class Difference {
  constructor(one, other) {
    Object.assign(this, {one, other, rows: one.rows, columns: one.columns, overview: null});
    this.masks = one.mask !== other.mask;
    if (one.overview && other.overview) {
      const [own, its] = [one.overview.values, other.overview.values];
      this.overview = {...one.overview, values: less(own, its)};
      if (this.masks) this.overview.only = Uint8Array.from(own, (value, at) => onlyOne(!Number.isNaN(value), !Number.isNaN(its[at])));
    }
    if (!this.masks) this.only = null;
  }

  // Which of the two masks alone allows a pair: 1 the first, 2 the second, 0 both or neither.
  only(row, column) {
    return onlyOne(this.one.allowed(row, column), this.other.allowed(row, column));
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

  // How many pairs only the first mask allows, and how many only the second.
  get counts() {
    if (!this.counted) {
      let [first, second] = [0, 0];
      for (let row = 0; this.masks && row < this.rows; row++) {
        const [own, its] = [this.one.open(row), this.other.open(row)], both = overlap(own, its);
        first += size(own) - both;
        second += size(its) - both;
      }
      this.counted = [first, second];
    }
    return this.counted;
  }
}

function onlyOne(first, second) {
  return first === second ? 0 : first ? 1 : 2;
}

function size(runs) {
  return runs.reduce((total, [start, stop]) => total + stop - start, 0);
}

function overlap(one, other) {
  let total = 0;
  for (const [start, stop] of one) for (const [from, to] of other) total += Math.max(0, Math.min(stop, to) - Math.max(start, from));
  return total;
}

function less(one, other) {
  return one.map((weight, at) => (Number.isNaN(weight) && Number.isNaN(other[at]) ? NaN : (weight || 0) - (other[at] || 0)));
}
