// The room "Your model": a text through a model of this machine, changes inside it, and what they do to its prediction.
import {element, readable} from "./dom.js";
import {Changes} from "./model_changes.js";
import {Said} from "./model_said.js";

// How long to wait for further changes before the model is run again, in milliseconds.
const PAUSE = 200;

export async function open(root, ask) {
  const known = await ask("models");
  new Room(root, ask, known);
}

class Room {
  constructor(root, ask, known) {
    this.ask = ask;
    this.known = known;
    this.looked = null;
    this.work = null;
    this.said = new Said((place) => this.moveTo(place));
    this.changes = new Changes(() => this.soon());
    this.build(root);
  }

  build(root) {
    const {models, text, limits} = this.known;
    this.model = element("select", {id: "mdl-model", "aria-describedby": "mdl-about"},
      ...models.map((each, place) => element("option", {value: place, text: each.name})));
    this.about = element("p", {class: "hint", id: "mdl-about", text: models[0].about});
    this.model.addEventListener("change", () => {
      this.about.textContent = models[this.model.value].about;
      this.changes.clear();
    });
    this.text = element("textarea", {
      id: "mdl-text", class: "mdl-text", dir: "auto", rows: 4, maxlength: limits.characters, spellcheck: "false",
      "aria-describedby": "mdl-text-hint",
    });
    this.text.value = text;
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.look();
    });
    this.layers = element("input", {
      id: "mdl-layers", type: "text", placeholder: "all", "aria-describedby": "mdl-layers-hint", autocomplete: "off",
    });
    this.go = element("button", {type: "button", class: "main", text: "Look", onclick: () => this.look()});
    this.stop = element("button", {type: "button", text: "Cancel", hidden: true, onclick: () => this.cancel()});
    this.bar = element("progress", {max: 1, value: 0, hidden: true, "aria-label": "Progress"});
    this.status = element("p", {class: "hint", role: "status", "aria-live": "polite"});
    this.alert = element("p", {role: "alert"});
    this.compare = element("button", {
      type: "button", class: "main", text: "Compare every head", onclick: () => this.look(true), disabled: true,
    });
    this.reset = element("button", {
      type: "button", text: "Undo all changes", onclick: () => this.changes.undo(), disabled: true,
    });
    this.inside = element("section", {class: "card", "aria-labelledby": "mdl-change-title", hidden: true},
      element("h2", {id: "mdl-change-title", text: "Change it inside"}),
      element("p", {class: "hint", text: "Heads switched off give 0. Scores are divided by the temperature: below 1 sharper, above 1 flatter. A window leaves keys at most so many tokens away. The prediction follows at once."}),
      this.changes.root, element("div", {class: "row"}, this.compare, this.reset));
    this.frame = element("iframe", {class: "mdl-frame", sandbox: "allow-scripts allow-downloads"});
    this.frameTitle = element("h2", {id: "mdl-frame-title"});
    this.shown = element("section", {"aria-labelledby": "mdl-frame-title", hidden: true}, this.frameTitle, this.frame);
    this.empty = element("p", {class: "card hint", text: "Look at a text: what the model says of it stands here, every head of it below, and all of it can be changed inside."});
    root.append(
      element("div", {class: "columns"},
        element("section", {class: "card", "aria-labelledby": "mdl-title"},
          element("h2", {id: "mdl-title", text: "A model and a text"}),
          element("div", {class: "field"}, element("label", {for: "mdl-model", text: "Model"}), this.model, this.about),
          element("div", {class: "field"}, element("label", {for: "mdl-text", text: "Text"}), this.text,
            element("p", {class: "hint", id: "mdl-text-hint", text: `At most ${limits.tokens.toLocaleString("en")} tokens. Ctrl+Enter looks.`})),
          element("div", {class: "field"}, element("label", {for: "mdl-layers", text: "Layers to show"}), this.layers,
            element("p", {class: "hint", id: "mdl-layers-hint", text: "All, or some: 0, 3, 5-8"})),
          element("div", {class: "row"}, this.go, this.stop), this.bar, this.status, this.alert),
        element("div", {class: "stage"}, this.empty, this.said.root, this.inside)),
      this.shown);
  }

  // Look at the text as it stands; with ``both``, at the last text looked at, as it is beside as it is changed.
  async look(both = false) {
    let layers;
    try {
      layers = numbersOf(this.layers.value);
    } catch (failure) {
      return this.failed(failure);
    }
    const asked = both ? this.looked : {model: Number(this.model.value), text: this.text.value, place: null};
    const edits = both ? this.changes.edits() : [];
    const found = await this.run(both ? "compare" : "look", {...asked, layers, edits});
    if (!found) return;
    if (!both) {
      this.looked = asked;
      this.changes.show(asked.model, found.layers);
      this.inside.hidden = false;
      this.empty.hidden = true;
    }
    this.show(found, asked);
    this.shown.hidden = false;
    this.frame.title = this.frameTitle.textContent = both ? "Every head before and after" : "Every head on this text";
    this.frame.src = `views/${found.view}${both ? "#view=compare" : ""}`;
    if (both) this.shown.scrollIntoView({block: "start"});
    // Changes that hold, or were made meanwhile, are not in it yet.
    if (JSON.stringify(this.changes.edits()) !== JSON.stringify(edits)) this.edit();
  }

  soon() {
    const changed = this.changes.edits().length > 0;
    this.compare.disabled = this.reset.disabled = !changed;
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.edit(), PAUSE);
  }

  async edit() {
    if (!this.looked || this.looking) return;
    const asked = this.looked;
    const found = await this.run("edit", {...asked, edits: this.changes.edits()});
    if (found) this.show(found, asked);
  }

  moveTo(place) {
    this.looked = {...this.looked, place};
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.edit(), PAUSE);
  }

  show(found, asked) {
    this.said.show(found, this.changes.edits().length > 0);
    this.status.textContent = `${this.known.models[asked.model].name}: ${found.tokens.length.toLocaleString("en")} tokens${found.note ? `; ${found.note}` : ""}`;
  }

  // One work at a time: a newer one takes the place of an older. Gives its result, or nothing where there is none.
  async run(name, params) {
    this.work?.abort();
    clearTimeout(this.waiting);
    const work = this.work = new AbortController();
    this.looking = name !== "edit";
    this.busy(true);
    this.alert.textContent = "";
    try {
      return await this.ask(name, params, {signal: work.signal, progress: (done, text) => {
        if (this.work !== work) return;
        this.bar.value = done;
        this.status.textContent = text;
      }});
    } catch (failure) {
      if (this.work === work && !work.signal.aborted) this.failed(failure);
      return null;
    } finally {
      if (this.work === work) {
        this.work = null;
        this.looking = false;
        this.busy(false);
      }
    }
  }

  cancel() {
    this.work?.abort();
    this.status.textContent = "Cancelled.";
  }

  busy(working) {
    this.stop.hidden = this.bar.hidden = !working;
    this.bar.value = 0;
    this.inside.setAttribute("aria-busy", String(working));
  }

  failed(failure) {
    this.status.textContent = "";
    this.alert.textContent = failure.message;
  }
}

// "0, 3, 5-8" as numbers; none for all.
function numbersOf(written) {
  const numbers = [];
  for (const part of written.split(/[\s,]+/u).filter((each) => each !== "" && each !== "all")) {
    const found = /^(\d{1,4})(?:[-–](\d{1,4}))?$/u.exec(part);
    if (!found) throw new Error(`Layers to show must be numbers, such as 0, 3, 5-8; got ${readable(part)}.`);
    for (let each = Number(found[1]); each <= Number(found[2] ?? found[1]); each++) numbers.push(each);
  }
  return numbers;
}
