// Two heads, of one run or two: the difference of their weights and of their masks.
import {printing} from "./colours.js";
import {Difference} from "./difference.js";
import {byId, element, readable, shown} from "./dom.js";
import {legend} from "./map.js";
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
      value: `${at}.${place}`, text: `${this.runName(layer)}${model.nameOf(at)}, head ${head.head}`,
    }))));
  }

  // The name of a layer's run, if the layer's name does not contain it.
  runName(layer) {
    const {name} = this.model.page.runs[layer.run];
    return name && !layer.name.startsWith(name) ? `${name}: ` : "";
  }

  // The head to compare with: the selected one, else the same head of the next run, else the next head.
  get other() {
    const {layers, page} = this.model;
    const [layer, head] = state.other.split(".").map(Number);
    if (layers[layer]?.heads[head]) return state.other;
    const own = this.model.layersOf(layers[state.layer].run), its = this.model.layersOf((layers[state.layer].run + 1) % page.runs.length);
    const same = its[own.indexOf(state.layer)];
    if (page.runs.length > 1 && layers[same]?.heads[state.head]) return `${same}.${state.head}`;
    const all = layers.flatMap((each, at) => each.heads.map((_, place) => `${at}.${place}`));
    return all[(all.indexOf(`${state.layer}.${state.head}`) + 1) % all.length];
  }

  async render({numbers, texts}, changed) {
    const [layer, head] = this.other.split(".").map(Number);
    byId("other").value = this.other;
    const other = await this.model.head(layer, head);
    const fits = other.rows === numbers.rows && other.columns === numbers.columns;
    byId("difference").hidden = !fits;
    byId("compare-masks").textContent = "";
    if (!fits) {
      byId("compare-note").textContent = "These two heads have different numbers of tokens: choose another head.";
      return;
    }
    this.texts = texts;
    if (this.source?.one !== numbers || this.source.other !== other || changed.has("scale") || changed.has("theme")) {
      this.source = new Difference(numbers, other);
      this.matrix.show(this.source, texts, state.scale);
      legend(byId("difference-legend"), byId("difference-ticks"), state.scale, true);
    }
    this.matrix.choose(state.query, state.key);
    byId("compare-note").textContent = this.says(state.query, state.key);
    byId("compare-masks").textContent = this.masks();
  }

  masks() {
    if (!this.source.masks) return "";
    const [here, there] = this.source.counts;
    return `╱ only this head’s mask allows it (${here.toLocaleString("en")} places) · ╲ only the other’s (${there.toLocaleString("en")}) · ${printing() ? "checked" : "grey"}: neither`;
  }

  says(row, column) {
    const {one, other} = this.source;
    const [first, second] = [one.weight(row, column), other.weight(row, column)];
    const allowed = this.source.masks ? ["", ", only here allowed", ", only there allowed"][this.source.only(row, column)] : "";
    return `Query ${row} “${readable(this.texts.queries[row])}” → key ${column} “${readable(this.texts.keys[column])}”${allowed}: ${shown(first, 5)} − ${shown(second, 5)} = ${shown(first - second, 5)}`;
  }

  hover(place) {
    if (place) byId("compare-note").textContent = this.says(place.row, place.column);
  }

  svg() { return this.matrix.svg(); }
  png() { return this.matrix.png(); }

  csv() {
    const rows = [["query", "query token", "key", "key token", "this head", "other head", "difference", "allowed here", "allowed there"]];
    const {one, other} = this.source;
    for (const {row, column} of this.matrix.cells()) {
      const [first, second] = [one.weight(row, column), other.weight(row, column)];
      rows.push([row, this.texts.queries[row], column, this.texts.keys[column], first, second, first - second, one.allowed(row, column), other.allowed(row, column)]);
    }
    return rows;
  }
}
