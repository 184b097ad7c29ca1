// The results of the page, its runs side by side, and the description of the selected run.
import {byId, element, shown, walk} from "./dom.js";
import {change, state} from "./state.js";

export class RunsView {
  constructor(model) {
    this.model = model;
    const {facts, runs} = model.page;
    byId("facts").hidden = facts.length === 0;
    byId("facts").append(...facts.map((fact) => element("div", {class: "card fact"},
      element("dt", {text: fact.label}), element("dd", {class: "value", text: fact.value}), element("dd", {class: "hint", text: fact.note}))));
    byId("runs-card").hidden = runs.length === 1 && !runs[0].says && !runs[0].bars;
    byId("runs").hidden = runs.length === 1;
    if (runs.length > 1) byId("runs").append(...runs.map((run, at) => this.button(run, at)));
    walk(byId("runs"), () => this.buttons, (place) => this.choose(place));
  }

  get buttons() {
    return [...byId("runs").querySelectorAll("[data-place]")];
  }

  get run() {
    return this.model.layers[state.layer].run;
  }

  button(run, at) {
    const made = element("button", {type: "button", role: "radio", class: "run", "data-place": at, title: run.says || null, onclick: () => this.choose(at)},
      element("span", {dir: "auto", text: run.name}));
    const layer = this.model.layers[this.model.layersOf(at)[0]];
    if (layer.image !== null) this.model.picture(layer.image).then(({canvas}) => made.prepend(copied(canvas)));
    return made;
  }

  // The same layer and head of another run, or that run's start.
  choose(run) {
    const {start} = this.model.page.runs[run];
    if (start) {
      change({layer: start.layer, head: start.head, query: start.query, key: start.query});
      return;
    }
    const own = this.model.layersOf(this.run), its = this.model.layersOf(run);
    change({layer: its[Math.min(own.indexOf(state.layer), its.length - 1)]});
  }

  update() {
    const {run} = this, record = this.model.page.runs[run];
    for (const [at, button] of this.buttons.entries()) {
      button.setAttribute("aria-checked", String(at === run));
      button.tabIndex = at === run ? 0 : -1;
    }
    byId("run-says").textContent = record.says;
    byId("run-says").hidden = !record.says;
    byId("about").hidden = !record.says && !record.bars?.length;
    const bars = record.bars ?? [], most = Math.max(...bars.map((bar) => bar.value), 1e-9);
    byId("run-bars").replaceChildren(...bars.map((bar) => {
      const line = element("i", {"aria-hidden": "true", class: bar.value === most ? "most" : null});
      line.style.height = `${Math.max(2, 100 * bar.value)}%`;
      return element("li", {}, element("span", {class: "hint", text: bar.value < 0.001 ? "<.001" : shown(bar.value, 3).replace(/^0/u, "")}), element("b", {}, line), element("span", {dir: "auto", text: bar.label}));
    }));
  }
}

function copied(canvas) {
  const made = element("canvas", {width: canvas.width, height: canvas.height, "aria-hidden": "true"});
  made.getContext("2d").drawImage(canvas, 0, 0);
  return made;
}
