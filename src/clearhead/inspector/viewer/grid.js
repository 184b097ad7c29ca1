// Every layer and head as a small map, with the numbers it is known by.
import {painterOf} from "./colours.js";
import {byId, element, walk} from "./dom.js";
import {change, state} from "./state.js";

const SORTS = {
  layer: {name: "layer and head"}, entropy: {name: "entropy", unit: "nats"}, distance: {name: "distance", unit: "tokens"},
  first: {name: "weight on the first token"}, previous: {name: "weight on the previous token"},
  following: {name: "weight on the next token"}, same: {name: "weight on the token itself"},
};
const BADGES = [["entropy", "entropy, nats"], ["distance", "distance, tokens"], ["first", "weight on the first token"]];

export class Grid {
  constructor(model) {
    this.model = model;
    this.thumbs = new Map();
    const known = Object.keys(SORTS).filter((name) => name === "layer" || name in model.layers[0].heads[0].scores);
    byId("sort").append(...known.map((name) => element("option", {value: name, text: SORTS[name].name})));
    byId("sort").addEventListener("change", (event) => change({sort: event.target.value, least: 0}));
    byId("least").addEventListener("input", (event) => change({least: Number(event.target.value)}));
    walk(byId("heads"), () => this.buttons, (place) => this.buttons[place].click());
    this.build();
  }

  get buttons() {
    return [...byId("heads").querySelectorAll("[data-place]")];
  }

  listed() {
    const all = this.model.layers.flatMap((layer, at) => layer.heads.map((head, place) => ({layer: at, head: place, record: head})));
    if (state.sort === "layer") return all;
    const score = (each) => each.record.scores[state.sort] ?? 0;
    return all.filter((each) => score(each) >= state.least).sort((one, other) => score(other) - score(one));
  }

  build() {
    const listed = this.listed(), group = byId("heads"), parts = [];
    byId("sort").value = state.sort;
    const most = Math.max(...this.model.layers.flatMap((layer) => layer.heads.map((head) => head.scores[state.sort] ?? 0)), 1e-9);
    byId("filter").hidden = state.sort === "layer";
    Object.assign(byId("least"), {max: String(most), step: String(most / 100), value: String(state.least)});
    byId("least-value").textContent = `at least ${state.least.toFixed(2)}: ${listed.length} heads`;
    let row = null, last = -1;
    for (const each of listed) {
      if (row === null || (state.sort === "layer" && each.layer !== last)) {
        row = element("div", {class: "thumbs", role: "presentation"});
        if (state.sort === "layer") parts.push(element("p", {class: "layer-name", text: this.model.layers[each.layer].name || `layer ${each.layer}`}));
        parts.push(row);
        last = each.layer;
      }
      row.append(this.button(each));
    }
    if (parts.length === 0) parts.push(element("p", {class: "hint", text: "No head has that much."}));
    group.replaceChildren(...parts);
    this.mark();
  }

  button({layer, head, record}) {
    const name = this.model.layers[layer].name || `layer ${layer}`;
    const badges = BADGES.map(([score, title]) => element("span", {class: `badge ${score}`, title, text: record.scores[score]?.toFixed(score === "distance" ? 1 : 2) ?? ""}));
    const made = element("button", {
      type: "button", role: "radio", class: "thumb", "data-place": `${layer}.${head}`,
      "aria-label": `${name}, head ${record.head}: ${BADGES.map(([score, title]) => `${title} ${record.scores[score]?.toFixed(2)}`).join("; ")}`,
      onclick: () => change({layer, head}),
    }, this.canvas(layer, head), element("span", {class: "number", text: state.sort === "layer" ? `head ${record.head}` : `${layer} · ${record.head}`}),
    element("span", {class: "badges", "aria-hidden": "true"}, ...badges));
    return made;
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
    here?.scrollIntoView({block: "nearest"});
  }

  update(changed) {
    if (changed.has("theme") || changed.has("scale")) {
      for (const [place, canvas] of this.thumbs) this.paint(canvas, ...place.split(".").map(Number));
    }
    if (changed.has("sort") || changed.has("least")) this.build();
    else if (changed.has("layer") || changed.has("head")) this.mark();
  }
}
