// Every layer and head as a small map, with its scores.
import {painterOf, themed} from "./colours.js";
import {byId, drawn, element, showWithin, walk} from "./dom.js";
import {change, state} from "./state.js";

const SORTS = {
  layer: {name: "layer and head"}, entropy: {name: "entropy", unit: "nats"}, distance: {name: "distance", unit: "tokens"},
  first: {name: "weight on the first token"}, previous: {name: "weight on the previous token"},
  following: {name: "weight on the next token"}, same: {name: "weight on the token itself"},
  induction: {name: "weight on what followed before (induction)"},
};
const MANY = 7, BOX = 96, ROW = 128, PER_ROW = 12;
const BADGES = [["entropy", "entropy, nats"], ["distance", "distance, tokens"], ["first", "weight on the first token"]];

export class Grid {
  constructor(model) {
    this.model = model;
    this.thumbs = new Map();
    this.scores = Object.keys(model.layers[0].heads[0].scores);
    byId("sort").append(...["layer", ...this.scores].map((name) => element("option", {value: name, text: SORTS[name]?.name ?? name})));
    byId("find").addEventListener("input", (event) => change({find: event.target.value}));
    byId("find-label").hidden = model.layers.reduce((count, layer) => count + layer.heads.length, 0) < MANY;
    byId("sort").addEventListener("change", (event) => change({sort: event.target.value, least: -1e9}));
    byId("least").addEventListener("input", (event) => change({least: Number(event.target.value)}));
    walk(byId("heads"), () => this.buttons, (place) => this.buttons[place].click());
    this.build();
  }

  get buttons() {
    return [...byId("heads").querySelectorAll("[data-place]")];
  }

  // The heads of the selected run that match the name and the minimum score, in order.
  listed() {
    const run = this.model.layers[state.layer].run, words = state.find.toLowerCase().split(/\s+/u);
    const all = this.model.layersOf(run).flatMap((layer) => this.model.layers[layer].heads.map((record, head) => ({layer, head, record})));
    const named = all.filter((each) => words.every((word) => `${this.model.nameOf(each.layer)} head ${each.record.head}`.toLowerCase().includes(word)));
    if (state.sort === "layer") return named;
    const score = (each) => each.record.scores[state.sort] ?? 0;
    return named.filter((each) => score(each) >= state.least).sort((one, other) => score(other) - score(one));
  }

  build() {
    const listed = this.listed(), group = byId("heads"), parts = [];
    this.run = this.model.layers[state.layer].run;
    byId("sort").value = state.sort;
    if (byId("find").value !== state.find) byId("find").value = state.find;
    const scores = this.model.layers.flatMap((layer) => layer.heads.map((head) => head.scores[state.sort] ?? 0));
    const most = Math.max(...scores, 1e-9), fewest = Math.min(...scores, 0), least = Math.max(state.least, fewest);
    byId("filter").hidden = state.sort === "layer";
    Object.assign(byId("least"), {min: String(fewest), max: String(most), step: String((most - fewest) / 100), value: String(least)});
    byId("least-value").textContent = `at least ${least.toFixed(2)}: ${listed.length} heads`;
    let row = null, last = -1;
    for (const each of listed) {
      if (row === null || (state.sort === "layer" && each.layer !== last)) {
        row = element("div", {class: "thumbs", role: "presentation"});
        if (state.sort === "layer") parts.push(element("p", {class: "layer-name", text: this.model.nameOf(each.layer)}));
        parts.push(row);
        last = each.layer;
      }
      row.append(this.button(each));
    }
    if (parts.length === 0) parts.push(element("p", {class: "hint", text: "No head matches. Clear the search or lower the minimum."}));
    group.replaceChildren(...parts);
    this.mark();
  }

  button({layer, head, record}) {
    const name = this.model.nameOf(layer), shown = this.badges();
    const badges = shown.map(([score, title]) => element("span", {class: `badge ${score}`, title, text: record.scores[score]?.toFixed(score === "distance" ? 1 : 2) ?? ""}));
    const made = element("button", {
      type: "button", role: "radio", class: "thumb", "data-place": `${layer}.${head}`,
      "aria-label": `${name}, head ${record.head}: ${shown.map(([score, title]) => `${title} ${record.scores[score]?.toFixed(2)}`).join("; ")}`,
      onclick: () => change({layer, head}),
    }, this.canvas(layer, head), element("span", {class: "number", text: state.sort === "layer" ? `head ${record.head}` : `${this.model.layersOf(this.run).indexOf(layer)} · ${record.head}`}),
    element("span", {class: "badges", "aria-hidden": "true"}, ...badges));
    return made;
  }

  // The three default scores, and the score that heads are sorted by.
  badges() {
    const sorted = state.sort === "layer" || BADGES.some(([score]) => score === state.sort) ? [] : [[state.sort, SORTS[state.sort]?.name ?? state.sort]];
    return [...sorted, ...BADGES];
  }

  canvas(layer, head) {
    const place = `${layer}.${head}`;
    let canvas = this.thumbs.get(place);
    if (!canvas) {
      canvas = element("canvas", {width: 1, height: 1, "aria-hidden": "true"});
      this.thumbs.set(place, canvas);
      this.paint(canvas, layer, head);
    }
    return canvas;
  }

  async paint(canvas, layer, head) {
    const {down: height, across: width, values} = await this.model.thumb(layer, head), paint = painterOf(state.scale);
    Object.assign(canvas, {width, height});
    const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    values.forEach((weight, at) => { pixels[at] = paint(weight); });
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  mark() {
    const chosen = `${state.layer}.${state.head}`, buttons = this.buttons;
    const here = buttons.find((each) => each.dataset.place === chosen);
    for (const each of buttons) {
      each.setAttribute("aria-checked", String(each === here));
      each.tabIndex = each === (here ?? buttons[0]) ? 0 : -1;
    }
    if (here) showWithin(byId("heads"), here);
  }

  update(changed) {
    if (changed.has("theme") || changed.has("scale")) {
      for (const [place, canvas] of this.thumbs) this.paint(canvas, ...place.split(".").map(Number));
    }
    if (changed.has("sort") || changed.has("least") || changed.has("find") || this.run !== this.model.layers[state.layer].run) this.build();
    else if (changed.has("layer") || changed.has("head")) this.mark();
  }

  svg() {
    const listed = this.listed(), across = Math.min(PER_ROW, Math.max(1, listed.length)), width = across * (BOX + 8) + 8;
    const height = Math.ceil(listed.length / across) * ROW + 30, style = {"font-size": 11, "font-family": "sans-serif", fill: themed("--text")};
    const svg = drawn("svg", {xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`}, drawn("rect", {width, height, fill: themed("--card")}));
    svg.append(drawn("text", {...style, x: 8, y: 18, "font-weight": 700, text: `Heads by ${SORTS[state.sort]?.name ?? state.sort}`}));
    listed.forEach(({layer, head, record}, at) => {
      const x = 8 + (at % across) * (BOX + 8), y = 30 + Math.floor(at / across) * ROW, score = state.sort === "layer" ? "entropy" : state.sort;
      svg.append(
        drawn("image", {x, y, width: BOX, height: BOX, href: this.canvas(layer, head).toDataURL("image/png"), style: "image-rendering: pixelated", preserveAspectRatio: "none"}),
        drawn("text", {...style, x, y: y + BOX + 13, text: `${this.model.layersOf(this.run).indexOf(layer)} · ${record.head}   ${score} ${record.scores[score]?.toFixed(2) ?? ""}`}),
        drawn("title", {text: `${this.model.nameOf(layer)}, head ${record.head}`}),
      );
    });
    return svg;
  }

  csv() {
    const rows = [["layer", "head", ...this.scores]];
    for (const {layer, record} of this.listed()) rows.push([this.model.nameOf(layer), record.head, ...this.scores.map((name) => record.scores[name] ?? "")]);
    return rows;
  }
}
