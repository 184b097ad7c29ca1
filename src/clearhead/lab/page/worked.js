// The tab "Worked example": a worksheet of tokens and weights, and every step of attention on it.
import {element, showWithin} from "./dom.js";
import {settled} from "./worked_dom.js";
import {drawControls, drawScaleHint, lay, partsOf, press, REST, stepCards} from "./worked_layout.js";
import {madeFrom} from "./worked_made.js";
import {changedPlaces, inputTables, maskOf, sheetOf, WEIGHTS} from "./worked_state.js";
import {maskTable, numberTable, walkCells} from "./worked_tables.js";

const TITLES = {
  X: "tokens", W_q: "query weights", W_k: "key weights", W_v: "value weights", b_q: "query bias", b_k: "key bias",
  b_v: "value bias",
};
const WAIT = 90;

export async function open(root, ask) {
  const {presets, limits} = await ask("worked-start", {});
  const example = new Worked(root, ask, presets, limits);
  await example.load(presets[0]);
}

class Worked {
  constructor(root, ask, presets, limits) {
    Object.assign(this, {root, ask, presets, limits, since: "edit", refused: new Map()});
    this.later = settled(WAIT, () => this.compute());
    this.parts = partsOf(this);
    lay(this);
    walkCells(root);
    // Only pointer moves count, not content that scrolls under a resting pointer.
    for (const event of ["pointermove", "focusin"]) root.addEventListener(event, ({target}) => this.explain(target));
    root.addEventListener("pointerleave", () => this.explain(document.activeElement));
  }

  // Load a lesson's numbers.
  async load(preset) {
    Object.assign(this, {preset, sheet: sheetOf(preset), shown: null, before: null, first: null, place: null});
    this.parts.source.textContent = `${preset.source}.`;
    this.parts.python.card.hidden = true;
    this.drawInputs();
    await this.compute();
  }

  // Apply an edit. Consecutive edits of one cell count as one edit.
  edit(place, change, redraw = false) {
    if (place !== this.place || redraw) this.before = this.shown;
    this.place = place;
    this.sheet = {...this.sheet, ...change};
    if (redraw) this.drawInputs();
    this.later();
  }

  setMask(kind) {
    this.edit("mask", {allowed: maskOf(kind, this.sheet.X.length)}, true);
  }

  setHeads(heads) {
    this.edit("heads", {heads}, true);
  }

  setScale(scale) {
    this.edit("scale", {scale});
    drawScaleHint(this);
  }

  setCell(name, row, column, number) {
    const flat = name.startsWith("b_"), table = flat ? [this.sheet[name]] : this.sheet[name];
    const changed = table.map((cells, at) => (at === row ? cells.with(column, number) : cells));
    this.edit(`${name}/${row}/${column}`, {[name]: flat ? changed[0] : changed});
  }

  toggle(query, key) {
    const {allowed} = this.sheet;
    const changed = allowed.map((row, at) => (at === query ? row.with(key, !row[key]) : row));
    this.edit(`mask/${query}/${key}`, {allowed: changed}, true);
  }

  drawInputs() {
    const {sheet, limits, parts} = this, focused = document.activeElement?.dataset?.cell;
    this.refused.clear();
    this.sayRefused();
    const table = (id, values) => numberTable({
      id, title: TITLES[id], values, most: limits.number, refuse: (input, message) => this.refuse(input, message),
      edit: (row, column, number) => this.setCell(id, row, column, number),
    });
    const projections = WEIGHTS.map((name) => {
      const bias = name.replace("W", "b");
      if (!sheet[bias]) return table(name, sheet[name]);
      return element("div", {class: "stacked"}, table(name, sheet[name]), table(bias, [sheet[bias]]));
    });
    const mask = maskTable({allowed: sheet.allowed, toggle: (query, key) => this.toggle(query, key)});
    parts.inputs.replaceChildren(table("X", sheet.X), ...projections, mask);
    drawControls(this);
    press(parts.since, this.since);
    if (focused) this.cell(focused)?.focus();
  }

  cell(place) {
    return this.root.querySelector(`[data-cell="${place}"]`);
  }

  // The error of a cell that is not a number; null clears it.
  refuse(input, message) {
    if (message === null) this.refused.delete(input.dataset.cell);
    else this.refused.set(input.dataset.cell, message);
    this.sayRefused();
  }

  sayRefused() {
    this.parts.alert.textContent = [...this.refused.values()].join(" ");
  }

  async guarded(work) {
    try {
      await work();
      this.sayRefused();
    } catch (failure) {
      if (failure.name !== "AbortError") this.parts.alert.textContent = failure.message;
    }
  }

  async compute() {
    this.asking?.abort();
    const asking = this.asking = new AbortController(), {sheet} = this;
    this.root.setAttribute("aria-busy", "true");
    await this.guarded(async () => {
      const answer = await this.ask("worked", sheet, {signal: asking.signal});
      if (asking === this.asking) this.show(sheet, answer);
    });
    if (asking === this.asking) this.root.removeAttribute("aria-busy");
  }

  async exportScript() {
    await this.guarded(async () => {
      const {name, script} = await this.ask("worked-script", this.sheet), {python} = this.parts;
      python.show(script, name);
      python.card.hidden = false;
      showWithin(document.scrollingElement, python.card);
      python.card.querySelector("pre").focus({preventScroll: true});
    });
  }

  show(sheet, answer) {
    this.shown = {tables: [...inputTables(sheet), ...answer.steps], answer};
    this.first ??= this.shown;
    this.before ??= this.shown;
    const focused = document.activeElement?.dataset?.cell;
    this.parts.steps.replaceChildren(...stepCards(sheet, answer));
    if (focused) this.root.querySelector(`td[data-cell="${focused}"]`)?.focus({preventScroll: true});
    this.mark(this.since);
    if (this.written) this.explain(this.cell(this.written));
    this.root.dataset.shown = String(Number(this.root.dataset.shown ?? 0) + 1);
  }

  // Mark every cell that differs, and show their number.
  mark(since) {
    this.since = since;
    press(this.parts.since, since);
    if (!this.shown) return;
    const places = changedPlaces(this.shown.tables, (since === "edit" ? this.before : this.first).tables);
    for (const cell of this.root.querySelectorAll("[data-cell]")) {
      cell.classList.toggle("changed", places.has(cell.dataset.cell));
    }
    this.parts.reached.textContent = this.reached(places);
  }

  reached(places) {
    if (places.size === 0) return "Edit a number to mark every number that depends on it.";
    const counts = this.shown.answer.steps.map(({id, symbol, values}) => ({
      symbol, all: values.length * values[0].length,
      changed: [...places].filter((place) => place.startsWith(`${id}/`)).length,
    }));
    const sum = (name) => counts.reduce((total, each) => total + each[name], 0);
    if (sum("changed") === 0) return "This changes no number of the steps.";
    const parts = counts.filter(({changed}) => changed).map(({symbol, all, changed}) => `${changed} of ${all} in ${symbol}`);
    const what = this.since === "edit" ? "This edit changes" : "Different from the lesson:";
    return `${what} ${sum("changed")} of ${sum("all")} numbers: ${parts.join(", ")}.`;
  }

  // Show how the cell under the pointer, or with the focus, is computed.
  explain(target) {
    const cell = target?.closest?.("[data-cell]") ?? null, {made} = this.parts;
    if (cell !== null && cell.classList.contains("asked")) return;
    for (const old of this.root.querySelectorAll(".source, .asked")) old.classList.remove("source", "asked");
    const [id, row, column] = cell ? cell.dataset.cell.split("/") : [];
    const step = this.shown?.answer.steps.find((each) => each.id === id);
    this.written = step ? cell.dataset.cell : null;
    if (!step) {
      made.textContent = REST;
      return;
    }
    const tables = (name) => this.shown.tables.find((table) => table.id === name);
    const {text, cells} = madeFrom(step, Number(row), Number(column), tables, this.shown.answer.scale);
    made.textContent = text;
    cell.classList.add("asked");
    for (const place of cells) this.cell(place.join("/"))?.classList.add("source");
  }
}
