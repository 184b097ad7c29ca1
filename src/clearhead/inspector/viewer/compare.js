// Two heads as the difference of their weights.
import {byId, element, readable, shown} from "./dom.js";
import {legend} from "./map.js";
import {Difference} from "./model.js";
import {Matrix} from "./painter.js";
import {change, state} from "./state.js";

export class CompareView {
  constructor(model) {
    this.model = model;
    this.matrix = new Matrix(byId("difference"), {
      signed: true, onSelect: (query, key) => change({query, key}), onHover: (place) => this.hover(place),
    });
    byId("other").addEventListener("change", (event) => change({other: event.target.value}));
    byId("other").append(...model.layers.flatMap((layer, at) => layer.heads.map((head, place) => element("option", {
      value: `${at}.${place}`, text: `${layer.name || `layer ${at}`}, head ${head.head}`,
    }))));
  }

  // The head to compare with: the one asked for, else the next one of the same sizes.
  get other() {
    const all = this.model.layers.flatMap((layer, at) => layer.heads.map((_, place) => `${at}.${place}`));
    if (all.includes(state.other)) return state.other;
    const here = all.indexOf(`${state.layer}.${state.head}`);
    return all[(here + 1) % all.length];
  }

  async render({numbers, texts}, changed) {
    const [layer, head] = this.other.split(".").map(Number);
    byId("other").value = this.other;
    const other = await this.model.head(layer, head);
    const fits = other.rows === numbers.rows && other.columns === numbers.columns;
    byId("difference").hidden = !fits;
    if (!fits) {
      byId("compare-note").textContent = "These two heads have other numbers of tokens: choose another.";
      return;
    }
    this.texts = texts;
    if (this.source?.one !== numbers || this.source.other !== other || changed.has("scale") || changed.has("theme")) {
      this.source = new Difference(numbers, other);
      this.matrix.show(this.source, texts, state.scale);
      legend(byId("difference-legend"), byId("difference-ticks"), state.scale, true);
    }
    this.matrix.choose(state.query, state.key);
    byId("compare-note").textContent = `This head’s weight less the other’s. ${this.says(state.query, state.key)}`;
  }

  says(row, column) {
    const {one, other} = this.source;
    const [first, second] = [one.weight(row, column), other.weight(row, column)];
    return `Query ${row} “${readable(this.texts.queries[row])}” → key ${column} “${readable(this.texts.keys[column])}”: ${shown(first, 5)} − ${shown(second, 5)} = ${shown(first - second, 5)}`;
  }

  hover(place) {
    if (place) byId("compare-note").textContent = `This head’s weight less the other’s. ${this.says(place.row, place.column)}`;
  }

  svg() { return this.matrix.svg(); }
  png() { return this.matrix.png(); }

  csv() {
    const rows = [["query", "query token", "key", "key token", "this head", "other head", "difference"]];
    const {one, other} = this.source;
    for (const {row, column} of this.matrix.cells()) {
      const [first, second] = [one.weight(row, column), other.weight(row, column)];
      rows.push([row, this.texts.queries[row], column, this.texts.keys[column], first, second, first - second]);
    }
    return rows;
  }
}
