// Queries on the left, keys on the right, and lines for the largest weights between them.
import {css, painterOf, themed} from "./colours.js";
import {byId, drawn, readable, shown} from "./dom.js";
import {change, state} from "./state.js";

const MOST_TOKENS = 48;
const STEP = 22, TOP = 34, MARGIN = 170, WIDTH = 760;

export class LinesView {
  constructor() {
    byId("edges").addEventListener("input", (event) => change({edges: Number(event.target.value)}));
    byId("lines").addEventListener("keydown", (event) => this.key(event));
  }

  render({numbers, texts}) {
    byId("edges").value = String(state.edges);
    byId("edges-value").textContent = String(state.edges);
    Object.assign(this, {numbers, texts});
    this.edges = this.found();
    byId("lines").replaceChildren(this.svg());
    this.focus(state.query);
  }

  // A window of queries around the selected one, and the keys with their largest weights.
  found() {
    const {rows} = this.numbers;
    const first = Math.max(0, Math.min(rows - MOST_TOKENS, state.query - MOST_TOKENS / 2));
    this.queries = Array.from({length: Math.min(rows, MOST_TOKENS)}, (_, at) => first + at);
    return this.queries.flatMap((row) => this.numbers.top(row, state.edges));
  }

  get keys() {
    const {columns} = this.numbers;
    if (columns <= MOST_TOKENS) return Array.from({length: columns}, (_, at) => at);
    const given = new Map();
    for (const edge of this.edges) {
      // The selected query's keys come first.
      given.set(edge.column, (given.get(edge.column) ?? 0) + edge.weight + (edge.row === state.query ? 1e6 : 0));
    }
    const most = [...given].sort((one, other) => other[1] - one[1]).slice(0, MOST_TOKENS);
    return most.map(([column]) => column).sort((one, other) => one - other);
  }

  svg() {
    const keys = this.keys, place = new Map(keys.map((column, at) => [column, at]));
    const height = TOP + STEP * Math.max(this.queries.length, keys.length) + 10;
    const svg = drawn("svg", {xmlns: "http://www.w3.org/2000/svg", width: WIDTH, height, viewBox: `0 0 ${WIDTH} ${height}`, role: "img",
      "aria-label": `Lines from queries on the left to their ${state.edges} heaviest keys on the right`});
    svg.append(drawn("rect", {width: WIDTH, height, fill: themed("--card")}));
    const head = {"font-size": 12, "font-family": "system-ui, sans-serif", fill: themed("--soft")};
    svg.append(drawn("text", {...head, x: MARGIN - 8, y: 18, "text-anchor": "end", text: "queries"}), drawn("text", {...head, x: WIDTH - MARGIN + 8, y: 18, text: "keys"}));
    const paint = painterOf(state.scale);
    const edges = this.edges.filter((edge) => place.has(edge.column)).sort((one, other) => one.weight - other.weight);
    for (const edge of edges) {
      const from = TOP + STEP * (edge.row - this.queries[0] + 0.5), to = TOP + STEP * (place.get(edge.column) + 0.5);
      const middle = WIDTH / 2;
      svg.append(drawn("path", {
        d: `M ${MARGIN} ${from} C ${middle} ${from}, ${middle} ${to}, ${WIDTH - MARGIN} ${to}`, fill: "none",
        stroke: css(paint(edge.weight)), "stroke-width": (0.8 + 5 * edge.weight).toFixed(2), "data-query": edge.row, "data-key": edge.column,
        class: "edge",
      }, drawn("title", {text: `${readable(this.texts.queries[edge.row])} → ${readable(this.texts.keys[edge.column])}: ${shown(edge.weight, 5)}`})));
    }
    this.queries.forEach((row, at) => svg.append(this.token(row, at, "query")));
    keys.forEach((column, at) => svg.append(this.token(column, at, "key")));
    return svg;
  }

  token(number, at, side) {
    const text = readable(this.texts[side === "query" ? "queries" : "keys"][number]);
    const chosen = state[side] === number, y = TOP + STEP * (at + 0.5);
    const left = side === "query";
    return drawn("text", {
      class: `token ${side}`, x: left ? MARGIN - 8 : WIDTH - MARGIN + 8, y: y + 4, "text-anchor": left ? "end" : "start",
      "font-size": 13, "font-family": "system-ui, sans-serif", "font-weight": chosen ? 700 : 400,
      fill: chosen ? themed("--mark") : themed("--text"), "data-number": number, tabindex: left && chosen ? 0 : null,
      onclick: () => change({[side]: number}), onpointerenter: () => this.focus(number, side), onpointerleave: () => this.focus(state.query),
    }, drawn("tspan", {text: shorten(text)}), drawn("title", {text: `${number}: ${text}`}));
  }

  // Highlights the lines of one token.
  focus(number, side = "query") {
    for (const edge of byId("lines").querySelectorAll(".edge")) {
      edge.setAttribute("opacity", Number(edge.dataset[side]) === number ? "1" : "0.16");
    }
  }

  key(event) {
    const step = {ArrowUp: -1, ArrowDown: 1, PageUp: -MOST_TOKENS, PageDown: MOST_TOKENS, Home: -Infinity, End: Infinity}[event.key];
    if (step === undefined) return;
    event.preventDefault();
    change({query: Math.max(0, Math.min(this.numbers.rows - 1, state.query + step))});
    byId("lines").querySelector("[tabindex='0']")?.focus();
  }

  csv() {
    const rows = [["query", "query token", "key", "key token", "weight"]];
    for (const {row, column, weight} of this.edges) rows.push([row, this.texts.queries[row], column, this.texts.keys[column], weight]);
    return rows;
  }
}

function shorten(text) {
  const letters = [...new Intl.Segmenter().segment(text)].map((each) => each.segment);
  return letters.length > 20 ? `${letters.slice(0, 19).join("")}…` : text;
}
