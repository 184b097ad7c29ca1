// The model's prediction: the text's tokens, one of them selected, and the prediction at it, before and after edits.
import {decoded, element, joiner, readable, shown, walk} from "./dom.js";

const TITLES = {
  next: "Next token", mask: "Masked token", class: "Class",
  states: "Change of the last hidden states",
};

export class Said {
  constructor(chosen) {
    this.title = element("h2", {id: "mdl-said-title"});
    this.tokens = element("div", {class: "mdl-tokens", role: "radiogroup", dir: "auto"});
    this.about = element("p", {class: "hint"});
    this.moved = element("p", {class: "readout", role: "status", "aria-live": "polite", dir: "auto"});
    this.table = element("div", {class: "scroll"});
    this.root = element("section", {class: "card", "aria-labelledby": "mdl-said-title", hidden: true}, this.title,
      this.about, this.tokens, this.moved, this.table);
    this.choose = (place) => {
      this.check(place);
      chosen(place);
    };
    walk(this.tokens, () => [...this.tokens.children], this.choose);
  }

  show({said: raw, tokens: pieces, place, mask}, changed) {
    // The text and the predictions are pieces of one vocabulary and are decoded together.
    const texts = decoded([...pieces, ...raw.rows.map((row) => row.text)]);
    const tokens = texts.slice(0, pieces.length), join = raw.kind === "class" ? null : joiner(texts);
    const said = {...raw, rows: raw.rows.map((row, at) => ({...row, text: named(texts[pieces.length + at], join)}))};
    this.root.hidden = false;
    this.title.textContent = TITLES[said.kind];
    const placed = said.kind === "next" || said.kind === "mask";
    this.about.textContent = {
      next: "The prediction is for the token after the selected one.",
      mask: `The prediction is for the selected token. Write ${mask || "the mask token"} into the text where the model should predict.`,
      class: "The prediction is for the whole text.",
      states: "This model has no prediction head. Edit it to see which tokens' last hidden states change, relative to their norm.",
    }[said.kind];
    this.tokens.hidden = !placed;
    this.tokens.setAttribute("aria-label", said.kind === "next" ? "Token before the prediction" : "Predicted token");
    if (placed) this.place(tokens, place, join);
    this.moved.textContent = sentence(said, changed);
    this.moved.hidden = this.moved.textContent === "";
    this.table.replaceChildren(said.kind === "states" ? statesTable(said.rows) : saidTable(said.rows, changed));
  }

  place(tokens, place, join) {
    if (this.texts !== JSON.stringify(tokens)) {
      this.texts = JSON.stringify(tokens);
      this.tokens.replaceChildren(...tokens.flatMap((text, at) => {
        const {joined, shown: word} = join(text);
        const made = element("button", {
          type: "button", role: "radio", class: joined ? "mdl-token mdl-joined" : "mdl-token", "data-place": at, text: word,
          "aria-label": `token ${at}: ${word}`, onclick: () => this.choose(at),
        });
        // A zero-width space allows line breaks between words.
        return joined || at === 0 ? [made] : ["\u200b", made];
      }));
    }
    this.check(place);
  }

  check(place) {
    [...this.tokens.children].forEach((each, at) => {
      each.setAttribute("aria-checked", String(at === place));
      each.tabIndex = at === place ? 0 : -1;
    });
  }
}

// A piece that continues a word gets an ellipsis.
function named(text, join) {
  if (!join) return readable(text);
  const {joined, shown: word} = join(text);
  return joined ? `…${word}` : word;
}

function percent(part) {
  return `${shown(100 * part, part < 0.0995 ? 2 : 1)} %`;
}

function sentence(said, changed) {
  if (!changed || said.moved === null) return "";
  if (said.kind === "states") return `The last hidden states have changed by ${percent(said.moved)} of their norm.`;
  const best = (when) => said.rows.reduce((most, row) => (row[when] > most[when] ? row : most));
  const before = best("before"), after = best("after");
  const now = before === after
    ? `“${after.text}” remains first, ${percent(before.before)} before and ${percent(after.after)} after.`
    : `First was “${before.text}” (${percent(before.before)}), now it is “${after.text}” (${percent(after.after)}).`;
  return `${percent(said.moved)} of the probability has moved. ${now}`;
}

function bar(part) {
  const made = element("span", {class: "mdl-bar", "aria-hidden": "true"});
  made.style.width = `${Math.max(0, Math.min(1, part)) * 100}%`;
  return made;
}

function saidTable(rows, changed) {
  // Bars are relative to the largest.
  const most = Math.max(...rows.flatMap((row) => [row.before, changed ? row.after ?? 0 : 0]), 1e-12);
  const cells = (part, kind) => [
    element("td", {class: "mdl-number", text: percent(part)}), element("td", {class: kind}, bar(part / most)),
  ];
  const columns = ["mdl-name", "mdl-number", "", ...(changed ? ["mdl-number", ""] : [])];
  const head = (text) => element("th", {scope: "col", colspan: 2, text});
  return element("table", {class: "mdl-said"},
    element("colgroup", {}, ...columns.map((name) => element("col", {class: name}))),
    element("thead", {}, element("tr", {}, element("td"), head(changed ? "before" : "probability"), ...(changed ? [head("after")] : []))),
    element("tbody", {}, ...rows.map((row) => element("tr", {},
      element("th", {scope: "row", class: "word", dir: "auto", text: row.text, title: row.text}), ...cells(row.before, "mdl-before"),
      ...(changed && row.after !== null ? cells(row.after, "mdl-after") : [])))));
}

function statesTable(rows) {
  if (rows.length === 0) return element("span");
  const most = Math.max(...rows.map((row) => row.moved), 1e-12);
  return element("table", {class: "mdl-said"},
    element("colgroup", {}, element("col", {class: "mdl-name"}), element("col", {class: "mdl-number"}), element("col")),
    element("thead", {}, element("tr", {}, element("th", {scope: "col", text: "token"}), element("th", {scope: "col", colspan: 2, text: "change, relative to its norm"}))),
    element("tbody", {}, ...rows.map((row) => element("tr", {},
      element("th", {scope: "row", class: "word", dir: "auto", text: row.text}),
      element("td", {class: "mdl-number", text: percent(row.moved)}), element("td", {class: "mdl-after"}, bar(row.moved / most))))));
}
