// One query step by step: q, each key's score, scale, rule, mask and weight.
import {css, painterOf, themed} from "./colours.js";
import {byId, drawn, element, readable, shown} from "./dom.js";
import {change, state} from "./state.js";

const MOST_ROWS = 200, MOST_BARS = 40, FEW = 8;

export class TokenView {
  constructor() {
    byId("order").addEventListener("change", () => this.fill());
  }

  render({numbers, texts, layer}) {
    Object.assign(this, {numbers, texts, layer});
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
    const sum = listed.reduce((total, each) => total + each.weight, 0);
    const open = listed.filter((each) => numbers.allowed(row, each.column)).length;
    const from = row * numbers.width, query = Array.from(numbers.query.subarray(from, from + Math.min(FEW, numbers.width)), (value) => shown(value, 3));
    const step = (name, formula, value) => element("li", {}, element("b", {text: name}), element("code", {text: formula}), element("span", {text: value}));
    const ruled = numbers.rules.length > 0 || numbers.table;
    const steps = [
      step("query", `q = Q[${row}]`, `[${query.join(", ")}${numbers.width > FEW ? ", …" : ""}], ${numbers.width} channels`),
      step("scores", "s[j] = q · K[j]", `${numbers.columns} keys`),
      step("scaling", "s[j] × scale", `scale ${shown(numbers.scale, 6)}`),
      ...(ruled ? [step("rules", "in order, before the mask", layer.says.join("; "))] : []),
      step("mask", "−∞ where not allowed", numbers.mask === null ? "no mask: all keys stay" : `${open} of ${numbers.columns} keys stay${layer.says[0] ? `: ${layer.says[0]}` : ""}`),
      step("softmax", "w[j] = exp(s[j] − lse)", `lse ${shown(numbers.lse[row], 5)}; weights sum to ${shown(sum, 5)}`),
    ];
    byId("steps").replaceChildren(...steps);
    byId("token-title").textContent = `Query ${row} “${readable(texts.queries[row])}”, step by step`;
    byId("rule-column").hidden = !ruled;
    const paint = painterOf(state.scale), most = Math.max(...listed.map((each) => each.weight), 1e-12);
    byId("token-rows").replaceChildren(...listed.slice(0, MOST_ROWS).map((each) => this.line(each, ruled, paint, most)));
    byId("token-more").textContent = listed.length > MOST_ROWS
      ? `${MOST_ROWS} of ${listed.length} keys are shown; the CSV has them all.` : "";
  }

  line({column, weight}, ruled, paint, most) {
    const {numbers, texts} = this, row = state.query, raw = numbers.raw(row, column);
    const allowed = numbers.allowed(row, column);
    const bar = element("span", {class: "bar", "aria-hidden": "true"});
    bar.style.width = `${(100 * weight) / most}%`;
    bar.style.background = css(paint(weight));
    const cell = (text) => element("td", {text});
    const made = element("tr", {class: column === state.key ? "chosen" : null, onclick: () => change({key: column})},
      element("th", {scope: "row", text: String(column)}), element("td", {class: "word", dir: "auto", text: readable(texts.keys[column])}),
      cell(shown(raw)), cell(shown(raw * numbers.scale)), ...(ruled ? [cell(shown(numbers.score(row, column)))] : []),
      cell(allowed ? "yes" : "no"), cell(shown(weight, 5)), element("td", {class: "bars"}, bar));
    return made;
  }

  svg() {
    const listed = this.rows().slice(0, MOST_BARS), height = 46 + 20 * listed.length, width = 640;
    const svg = drawn("svg", {xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`});
    const style = {"font-size": 12, "font-family": "sans-serif", fill: themed("--text")};
    svg.append(drawn("rect", {width, height, fill: themed("--card")}), drawn("text", {...style, x: 10, y: 20, "font-weight": 700, text: byId("token-title").textContent}));
    const paint = painterOf(state.scale), most = Math.max(...listed.map((each) => each.weight), 1e-12);
    listed.forEach(({column, weight}, at) => {
      const y = 40 + 20 * at;
      svg.append(drawn("text", {...style, x: 190, y: y + 10, "text-anchor": "end", text: `${column} ${readable(this.texts.keys[column])}`}),
        drawn("rect", {x: 200, y, width: (340 * weight) / most, height: 13, fill: css(paint(weight))}),
        drawn("text", {...style, x: 205 + (340 * weight) / most, y: y + 10, text: shown(weight, 5)}));
    });
    return svg;
  }

  csv() {
    const {numbers, texts} = this, row = state.query, made = [["key", "token", "q·k", "scaled", "after rules", "allowed", "weight"]];
    for (const {column, weight} of this.rows()) {
      const raw = numbers.raw(row, column);
      made.push([column, texts.keys[column], raw, raw * numbers.scale, numbers.score(row, column), numbers.allowed(row, column), weight]);
    }
    return made;
  }
}
