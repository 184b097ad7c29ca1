// The tab "Your model": runs a local model on a text, edits it, and shows the effect on its prediction.
import {element, readable, showWithin} from "./dom.js";
import {Changes} from "./model_changes.js";
import {Said} from "./model_said.js";

// Milliseconds to wait for further changes before the model runs again.
const PAUSE = 200;

export async function open(root, ask) {
  const menu = await ask("models");
  new ModelTab(root, ask, menu);
}

class ModelTab {
  constructor(root, ask, menu) {
    this.ask = ask;
    this.menu = menu;
    this.looked = null;
    this.work = null;
    this.said = new Said((place) => this.moveTo(place));
    this.changes = new Changes(() => this.soon());
    this.build(root);
  }

  build(root) {
    const {models, text, limits} = this.menu;
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
      element("h2", {id: "mdl-change-title", text: "Edit the model"}),
      element("p", {class: "hint", text: "A head that is switched off has output 0. Scores are divided by the temperature: below 1 weights are sharper, above 1 flatter. A window allows keys up to this many tokens away. The prediction updates at once."}),
      this.changes.root, element("div", {class: "row"}, this.compare, this.reset));
    this.frame = element("iframe", {class: "mdl-frame", sandbox: "allow-scripts allow-downloads"});
    this.frameTitle = element("h2", {id: "mdl-frame-title"});
    this.shown = element("section", {"aria-labelledby": "mdl-frame-title", hidden: true}, this.frameTitle, this.frame);
    this.empty = element("p", {class: "card hint", text: "Press Look to run the model on the text. Its prediction appears here, with controls to edit the model, and every head below."});
    root.append(
      element("div", {class: "columns"},
        element("section", {class: "card", "aria-labelledby": "mdl-title"},
          element("h2", {id: "mdl-title", text: "A model and a text"}),
          element("div", {class: "field"}, element("label", {for: "mdl-model", text: "Model"}), this.model, this.about),
          element("div", {class: "field"}, element("label", {for: "mdl-text", text: "Text"}), this.text,
            element("p", {class: "hint", id: "mdl-text-hint", text: `At most ${limits.tokens.toLocaleString("en")} tokens. Ctrl+Enter is the same as Look.`})),
          element("div", {class: "field"}, element("label", {for: "mdl-layers", text: "Layers to show"}), this.layers,
            element("p", {class: "hint", id: "mdl-layers-hint", text: "All, or some, such as 0, 3, 5-8"})),
          element("div", {class: "row"}, this.go, this.stop), this.bar, this.status, this.alert),
        element("div", {class: "stage"}, this.empty, this.said.root, this.inside)),
      this.shown);
  }

  // Run the model on the current text; with ``both``, on the last text, without and with edits.
  async look(both = false) {
    let layers;
    try {
      layers = numbersOf(this.layers.value);
    } catch (failure) {
      return this.failed(failure);
    }
    const asked = both ? this.looked : {model: Number(this.model.value), text: this.text.value, place: null};
    const edits = both ? this.changes.edits() : [];
    const answer = await this.run(both ? "compare" : "look", {...asked, layers, edits});
    if (!answer) return;
    if (!both) {
      this.looked = asked;
      this.changes.show(asked.model, answer.layers);
      this.inside.hidden = false;
      this.empty.hidden = true;
    }
    this.show(answer, asked);
    this.shown.hidden = false;
    this.frame.title = this.frameTitle.textContent = both ? "Every head before and after" : "Every head on this text";
    this.frame.src = `views/${answer.view}${both ? "#view=compare" : ""}`;
    if (both) showWithin(document.scrollingElement, this.shown, {toTop: true});
    // Edits that were made meanwhile are not in the answer yet.
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
    const answer = await this.run("edit", {...asked, edits: this.changes.edits()});
    if (answer) this.show(answer, asked);
  }

  moveTo(place) {
    this.looked = {...this.looked, place};
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.edit(), PAUSE);
  }

  show(answer, asked) {
    this.said.show(answer, this.changes.edits().length > 0);
    this.status.textContent = `${this.menu.models[asked.model].name}: ${answer.tokens.length.toLocaleString("en")} tokens${answer.note ? `; ${answer.note}` : ""}`;
  }

  // Runs one job at a time; a newer one cancels the older. Resolves to its result, or null.
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
    const match = /^(\d{1,4})(?:[-–](\d{1,4}))?$/u.exec(part);
    if (!match) throw new Error(`Layers to show must be numbers, such as 0, 3, 5-8; got ${readable(part)}.`);
    for (let each = Number(match[1]); each <= Number(match[2] ?? match[1]); each++) numbers.push(each);
  }
  return numbers;
}
