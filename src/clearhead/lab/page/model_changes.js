// The edits of the model: a line for each layer with its heads, its temperature and its mask.
import {element, walk} from "./dom.js";

const MASKS = [["own", "unmodified"], ["causal", "causal"], ["window", "window"], ["none", "none: all keys"]];

export class Changes {
  constructor(changed) {
    this.changed = changed;
    this.model = null;
    this.lines = [];
    this.root = element("div", {class: "mdl-layers", role: "group", "aria-label": "Layers"});
    walk(this.root, () => [...this.root.querySelectorAll("[role=switch]")], (next) => this.stopAt(next));
  }

  // Shows the layers of a model; edits remain if the model is the same.
  show(model, layers) {
    if (model === this.model && layers.length === this.lines.length) return;
    this.model = model;
    const head = (text) => element("span", {class: "label", text});
    this.lines = layers.map((layer, place) => new Line(place, layer, this.changed));
    this.all = new Line(null, {name: "all layers", heads: 0}, () => {
      for (const line of this.lines) line.copy(this.all);
      this.changed();
    });
    const shown = this.lines.length > 1 ? [this.all, ...this.lines] : this.lines;
    this.root.replaceChildren(head("layer"), head("heads"), head("temperature"), head("mask"), ...shown.map((line) => line.root));
    this.stopAt(0);
  }

  // One head is in the tab order; arrow keys move to the others.
  stopAt(next) {
    [...this.root.querySelectorAll("[role=switch]")].forEach((each, at) => { each.tabIndex = at === next ? 0 : -1; });
  }

  clear() {
    this.model = null;
    this.lines = [];
    this.root.replaceChildren();
  }

  undo() {
    for (const line of [this.all, ...this.lines]) line.undo();
    this.changed();
  }

  edits() {
    return this.lines.map((line) => line.edit()).filter((edit) => edit !== null);
  }
}

// The arrows of a temperature step by tenths; typed values may lie between.
function wrong(input) {
  const {badInput, rangeUnderflow, rangeOverflow} = input.validity;
  return badInput || rangeUnderflow || rangeOverflow || input.value === "" || (input.step === "1" && !Number.isInteger(Number(input.value)));
}

class Line {
  constructor(place, {name, heads}, changed) {
    this.place = place;
    this.changed = changed;
    const called = place === null ? "all layers" : `layer ${place}`;
    this.heads = Array.from({length: heads}, (_, head) => element("button", {
      type: "button", class: "mdl-head", role: "switch", "aria-checked": "true", "data-place": head, text: head,
      "aria-label": `${called} head ${head}`, title: `${name}, head ${head}`,
      onclick: (event) => this.turn(event.currentTarget),
    }));
    this.temperature = element("input", {
      type: "number", min: 0.05, max: 20, step: 0.1, value: 1, "aria-label": `temperature of ${called}`,
      class: "mdl-temperature", oninput: () => this.said(),
    });
    this.mask = element("select", {"aria-label": `mask of ${called}`, onchange: () => this.said()},
      ...MASKS.map(([value, text]) => element("option", {value, text})));
    this.reach = element("input", {
      type: "number", min: 0, max: 1000000, step: 1, value: 2, hidden: true, oninput: () => this.said(),
      "aria-label": `how many tokens away the window of ${called} reaches`, title: "tokens away, at most",
    });
    this.root = element("div", {class: "mdl-line", role: "group", "aria-label": called},
      element("span", {class: "code", text: place === null ? "all" : String(place), title: name}),
      element("span", {class: "mdl-heads"}, ...this.heads), this.temperature,
      element("span", {class: "mdl-mask"}, this.mask, this.reach));
  }

  turn(head) {
    head.setAttribute("aria-checked", String(head.getAttribute("aria-checked") !== "true"));
    this.said();
  }

  said() {
    this.mark();
    if (this.valid()) this.changed();
  }

  // Marks values that differ from the unedited model, and invalid ones.
  mark() {
    this.reach.hidden = this.mask.value !== "window";
    this.temperature.classList.toggle("mdl-set", Number(this.temperature.value) !== 1);
    this.mask.classList.toggle("mdl-set", this.mask.value !== "own");
    for (const input of [this.temperature, this.reach]) input.setAttribute("aria-invalid", String(!input.hidden && wrong(input)));
  }

  valid() {
    return [this.temperature, this.reach].every((input) => input.getAttribute("aria-invalid") !== "true");
  }

  copy(other) {
    for (const name of ["temperature", "mask", "reach"]) this[name].value = other[name].value;
    this.mark();
  }

  undo() {
    this.temperature.value = 1;
    this.mask.value = "own";
    for (const head of this.heads) head.setAttribute("aria-checked", "true");
    this.mark();
  }

  edit() {
    const off = this.heads.flatMap((head, at) => (head.getAttribute("aria-checked") === "true" ? [] : [at]));
    const temperature = Number(this.temperature.value), mask = this.mask.value;
    if (off.length === 0 && temperature === 1 && mask === "own") return null;
    return {layer: this.place, off, temperature, mask, reach: mask === "window" ? Number(this.reach.value) : 0};
  }
}
