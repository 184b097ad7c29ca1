// The editable lists of masks and score rules: one row per part, with its fields.
import {element} from "./dom.js";
import {readNumber} from "./worked_dom.js";

const LISTS = new Set(["wholes", "numbers"]);

// The value of a field: a number, a list of numbers, or its text, which the server checks.
function meant(kind, text) {
  if (kind === "text") return text;
  const read = (part) => readNumber(part, Infinity) ?? part.trim();
  return LISTS.has(kind) ? text.split(/[,;\s]+/u).filter((part) => part !== "").map(read) : read(text);
}

const written = (value) => (Array.isArray(value) ? value.join(", ") : String(value));

export class Editor {
  // ``what`` is "mask" or "rule", as in the server's place of an invalid part.
  constructor({what, label, kinds, most, joined = false, changed}) {
    Object.assign(this, {what, kinds, most, joined, changed, parts: []});
    this.list = element("ol", {class: "parts", "aria-label": label});
    this.add = element("button", {type: "button", text: `Add a ${what}`, onclick: () => this.append()});
    this.root = element("div", {class: "editor"}, this.list, this.add);
  }

  load(parts) {
    this.parts = parts.map(({kind, values, join = "&", not = false}) => ({kind, values: {...values}, join, not}));
    this.draw();
  }

  kind(name) {
    return this.kinds.find((kind) => kind.name === name);
  }

  fresh(name) {
    return Object.fromEntries(this.kind(name).fields.map((field) => [field.name, field.start]));
  }

  append() {
    const {name} = this.kinds[0];
    this.parts.push({kind: name, values: this.fresh(name), join: "&", not: false});
    this.redraw(`${this.what}/${this.parts.length - 1}`);
  }

  redraw(focus) {
    this.draw();
    this.list.querySelector(`[data-part="${focus}"] .kind`)?.focus();
    this.changed();
  }

  draw() {
    this.list.replaceChildren(...this.parts.map((part, at) => this.row(part, at)));
    this.add.disabled = this.parts.length >= this.most;
  }

  row(part, at) {
    const place = `${this.what}/${at}`, kind = this.kind(part.kind);
    const controls = [];
    if (this.joined && at > 0) {
      const ways = [["&", "and"], ["|", "or"]];
      controls.push(this.select(part.join, ways, `how ${this.what} ${at + 1} is joined`, (join) => {
        part.join = join;
        this.changed();
      }));
    }
    if (this.joined) {
      controls.push(element("button", {
        type: "button", class: "not", "aria-pressed": String(part.not), text: "not",
        "aria-label": `negate ${this.what} ${at + 1}`,
        onclick: () => { part.not = !part.not; this.redraw(place); },
      }));
    }
    const names = this.kinds.map(({name}) => [name, name]);
    const choose = this.select(part.kind, names, `kind of ${this.what} ${at + 1}`, (name) => {
      Object.assign(part, {kind: name, values: this.fresh(name)});
      this.redraw(place);
    });
    choose.classList.add("kind");
    controls.push(choose, element("button", {
      type: "button", class: "away", text: "×", "aria-label": `remove ${this.what} ${at + 1}`,
      onclick: () => { this.parts.splice(at, 1); this.redraw(`${this.what}/${Math.max(0, at - 1)}`); },
    }));
    const said = element("p", {class: "alert refused", id: `refused-${this.what}-${at}`, role: "alert", hidden: true});
    return element("li", {"data-part": place}, element("div", {class: "row"}, ...controls),
      element("p", {class: "hint", text: kind.says}),
      ...kind.fields.map((field) => this.field(part, at, field)), said);
  }

  select(value, options, label, choose) {
    return element("select", {"aria-label": label, onchange: (event) => choose(event.target.value)},
      ...options.map(([name, text]) => element("option", {value: name, selected: name === value, text})));
  }

  field(part, at, field) {
    const id = `${this.what}-${at}-${field.name}`, long = field.kind === "text", list = LISTS.has(field.kind);
    const look = long ? "code formula" : list ? "code list" : "code short";
    const own = long ? {rows: 2} : {type: "text", inputmode: list ? "text" : "decimal"};
    const input = element(long ? "textarea" : "input", {
      id, class: look, autocomplete: "off", spellcheck: "false", "aria-describedby": `refused-${this.what}-${at}`, ...own,
    });
    input.value = written(part.values[field.name]);
    input.addEventListener("input", () => {
      part.values[field.name] = meant(field.kind, input.value);
      this.changed();
    });
    return element("div", {class: long ? "field" : "field beside"}, element("label", {for: id, text: field.name}), input,
      element("span", {class: "hint", text: field.says}));
  }

  // Show the error of an invalid part beside it; null clears all errors.
  refuse(refused) {
    this.parts.forEach((_, at) => {
      const place = `${this.what}/${at}`, wrong = refused?.place === place;
      const row = this.list.querySelector(`[data-part="${place}"]`);
      const said = row.querySelector(".refused");
      said.hidden = !wrong;
      said.textContent = wrong ? refused.message : "";
      for (const input of row.querySelectorAll("input, textarea")) {
        if (wrong) input.setAttribute("aria-invalid", "true");
        else input.removeAttribute("aria-invalid");
      }
    });
  }
}
