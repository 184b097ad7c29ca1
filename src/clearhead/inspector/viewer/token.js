// One query step by step: q, each key's score, scale, rule, mask, weight and weighted value, and their sum.
import {css, painterOf, themed} from "./colours.js";
import {byId, drawn, element, readable, shown} from "./dom.js";
import {change, state} from "./state.js";

const MOST_ROWS = 200, MOST_BARS = 40, FEW = 8, ALL = 16;

export class TokenView {
  constructor() {
    byId("order").addEventListener("change", () => this.fill());
  }

  async render({numbers, texts, layer}) {
    const carried = await numbers.values();
    Object.assign(this, {numbers, texts, layer, carried});
    this.fill();
  }

  get byWeight() {
    return byId("order").value === "weight";
  }

  rows() {
    const {numbers} = this, row = state.query, weights = numbers.row(row);
    const order = Array.from(weights.keys());
    if (this.byWeight) order.sort((one, other) => weights[other] - weights[one] || one - other);
    return order.map((column) => ({column, weight: weights[column]}));
  }

  fill() {
    const {numbers, texts, layer} = this, row = state.query, listed = this.rows();
    const ruled = numbers.rules.length > 0 || numbers.table !== null;
    byId("steps").replaceChildren(...this.steps(listed, ruled));
    byId("token-title").textContent = `Query ${row} “${readable(texts.queries[row])}”, step by step`;
    byId("rule-column").hidden = !ruled;
    byId("norm-column").hidden = numbers.norms === null;
    byId("value-column").hidden = this.carried === null;
    const paint = painterOf(state.scale), most = Math.max(...listed.map((each) => each.weight), 1e-12);
    const longest = this.carried === null ? 0 : Math.max(...this.numbers.output(row, this.carried).map(Math.abs), 1e-12);
    byId("token-rows").replaceChildren(...listed.slice(0, MOST_ROWS).map((each) => this.line(each, ruled, paint, most, longest)));
    byId("token-sum").replaceChildren(...this.sum(ruled, longest));
    byId("token-more").textContent = [
      listed.length > MOST_ROWS ? `${MOST_ROWS} of ${listed.length} keys are shown; the CSV has them all.` : "",
      this.carried === null && layer.value_dim > 0 ? "This page stores the norm of each value, not its channels: ch.view(…, values=True) stores them." : "",
    ].join(" ");
  }

  steps(listed, ruled) {
    const {numbers, layer, carried} = this, row = state.query;
    const sum = listed.reduce((total, each) => total + each.weight, 0);
    const open = listed.filter((each) => numbers.allowed(row, each.column)).length;
    const from = row * numbers.width, step = (name, formula, value) => element("li", {}, element("b", {text: name}), element("code", {text: formula}), element("span", {text: value}));
    const made = [
      step("query", `q = Q[${row}]`, vector(numbers.query.subarray(from, from + numbers.width))),
      step("scores", "s[j] = q · K[j]", `${numbers.columns} keys`),
      step("scaling", "s[j] × scale", `scale ${shown(numbers.scale, 6)}`),
      ...(ruled ? [step("rules", "in order, before the mask", layer.says.join("; "))] : []),
      step("mask", "−∞ where not allowed", numbers.mask === null ? "no mask: all keys are allowed" : `${open} of ${numbers.columns} keys are allowed${layer.says[0] ? `: ${layer.says[0]}` : ""}`),
      step("softmax", "w[j] = exp(s[j] − lse)", `lse ${shown(numbers.lse[row], 5)}; weights sum to ${shown(sum, 5)}`),
    ];
    if (carried !== null) {
      made.push(step("values", `w[${state.key}] × V[${state.key}]`, `${vector(this.weighted(state.key))}, of key ${state.key} “${readable(this.texts.keys[state.key])}”`));
      made.push(step("output", "o = Σ w[j] × V[j]", vector(numbers.output(row, carried))));
    } else if (numbers.norms !== null) made.push(step("values", "w[j] × |V[j]|", "each value’s length times its weight"));
    return made;
  }

  weighted(column) {
    const {values, width} = this.carried, weight = this.numbers.weight(state.query, column);
    return Array.from(values.subarray(column * width, (column + 1) * width), (value) => weight * value);
  }

  // The last row of the table: the sum of the weighted values.
  sum(ruled, most) {
    if (this.carried === null) return [];
    const output = this.numbers.output(state.query, this.carried);
    return [element("tr", {},
      element("th", {scope: "row", colspan: 2, text: "sum = output"}), element("td", {colspan: ruled ? 6 : 5}),
      element("td", {text: shown(length(output), 5)}), element("td", {}, strip(output, most)))];
  }

  line({column, weight}, ruled, paint, most, longest) {
    const {numbers, texts} = this, row = state.query, raw = numbers.raw(row, column);
    const allowed = numbers.allowed(row, column);
    const bar = element("span", {class: "bar", "aria-hidden": "true"});
    bar.style.width = `${(100 * weight) / most}%`;
    bar.style.background = css(paint(weight));
    const cell = (text) => element("td", {text});
    const made = element("tr", {class: column === state.key ? "chosen" : null, onclick: () => change({key: column})},
      element("th", {scope: "row", text: String(column)}), element("td", {class: "word", dir: "auto", text: readable(texts.keys[column])}),
      cell(shown(raw)), cell(shown(raw * numbers.scale)), ...(ruled ? [cell(shown(numbers.score(row, column)))] : []),
      cell(allowed ? "yes" : "no"), cell(shown(weight, 5)), element("td", {class: "bars"}, bar),
      ...(numbers.norms === null ? [] : [cell(shown(weight * numbers.norms[column], 5))]),
      ...(this.carried === null ? [] : [element("td", {}, strip(this.weighted(column), longest))]));
    return made;
  }

  svg() {
    const {numbers} = this, listed = this.rows().slice(0, MOST_BARS), said = [...byId("steps").children], width = 760;
    const top = 44 + 17 * said.length, height = top + 24 + 20 * listed.length;
    const svg = drawn("svg", {xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`});
    const style = {"font-size": 12, "font-family": "sans-serif", fill: themed("--text")};
    svg.append(drawn("rect", {width, height, fill: themed("--card")}), drawn("text", {...style, x: 10, y: 20, "font-weight": 700, text: byId("token-title").textContent}));
    said.forEach((line, at) => {
      const [name, formula, value] = [...line.children].map((part) => part.textContent), y = 42 + 17 * at;
      svg.append(drawn("text", {...style, x: 10, y, "font-weight": 700, text: name}), drawn("text", {...style, x: 80, y, text: formula}),
        drawn("text", {...style, x: 240, y, text: value.length > 84 ? `${value.slice(0, 83)}…` : value}));
    });
    const paint = painterOf(state.scale), most = Math.max(...listed.map((each) => each.weight), 1e-12);
    if (numbers.norms !== null) svg.append(drawn("text", {...style, x: width - 10, y: top + 8, "text-anchor": "end", text: "|w × v|"}));
    listed.forEach(({column, weight}, at) => {
      const y = top + 14 + 20 * at;
      svg.append(drawn("text", {...style, x: 190, y: y + 10, "text-anchor": "end", text: `${column} ${readable(this.texts.keys[column])}`}),
        drawn("rect", {x: 200, y, width: (340 * weight) / most, height: 13, fill: css(paint(weight))}),
        drawn("text", {...style, x: 205 + (340 * weight) / most, y: y + 10, text: shown(weight, 5)}));
      if (numbers.norms !== null) svg.append(drawn("text", {...style, x: width - 10, y: y + 10, "text-anchor": "end", text: shown(weight * numbers.norms[column], 5)}));
    });
    return svg;
  }

  csv() {
    const {numbers, texts, carried} = this, row = state.query, named = carried === null ? [] : Array.from({length: carried.width}, (_, at) => `w·v[${at}]`);
    const made = [["key", "token", "q·k", "scaled", "after rules", "allowed", "weight", "|w·v|", ...named]];
    for (const {column, weight} of this.rows()) {
      const raw = numbers.raw(row, column), norm = numbers.norms === null ? "" : weight * numbers.norms[column];
      made.push([column, texts.keys[column], raw, raw * numbers.scale, numbers.score(row, column), numbers.allowed(row, column), weight, norm, ...(carried === null ? [] : this.weighted(column))]);
    }
    if (carried !== null) {
      const output = numbers.output(row, carried);
      made.push(["sum", "", "", "", "", "", "", length(output), ...output]);
    }
    return made;
  }
}

function length(numbers) {
  return Math.hypot(...numbers);
}

function vector(numbers) {
  const some = Array.from(numbers.slice(0, numbers.length <= ALL ? ALL : FEW), (value) => shown(value));
  return `[${some.join(", ")}${numbers.length > some.length ? ", …" : ""}]${numbers.length > ALL ? `, ${numbers.length} channels` : ""}`;
}

// Channels as a strip, blue below 0 and orange above.
function strip(numbers, most) {
  const canvas = element("canvas", {class: "strip", width: numbers.length, height: 1, "aria-hidden": "true"}), paint = painterOf("root", true);
  const image = new ImageData(numbers.length, 1), pixels = new Uint32Array(image.data.buffer);
  numbers.forEach((number, at) => { pixels[at] = paint(Math.max(-1, Math.min(1, number / most))); });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
