// The layout of the worked example: its controls and cards.
import {element} from "./dom.js";
import {pythonCard} from "./worked_dom.js";
import {CHANGES, maskKind} from "./worked_state.js";
import {numberCell, stepTable} from "./worked_tables.js";

export const REST = "Point at a number, or move to it with the arrow keys, to see how it is computed.";
const PYTHON = "A script that prints these numbers, a line of the formula at a time, and checks clearhead's module "
  + "against them.";
const HEADS_OFFERED = [1, 2, 3, 4, 6, 8];

function choices(label, options, choose) {
  return element("div", {class: "group", role: "group", "aria-label": label}, ...options.map(([value, text]) =>
    element("button", {
      type: "button", "data-value": value, "aria-pressed": "false", text, onclick: () => choose(value),
    })));
}

export function press(group, value) {
  for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.value === value));
}

function button(id, text, onclick) {
  return element("button", {type: "button", id, text, onclick});
}

// The parts of the page that change later. ``example`` receives the reader's input.
export function partsOf(example) {
  const text = (tag, name, more = {}) => element(tag, {class: name, ...more});
  return {
    start: element("select", {id: "worked-start", onchange: (event) => example.load(example.presets[event.target.selectedIndex])},
      ...example.presets.map(({name, title}) => element("option", {value: name, text: title}))),
    source: text("p", "hint"),
    heads: element("select", {id: "worked-heads", onchange: (event) => example.setHeads(Number(event.target.value))}),
    scale: element("span"), scaleHint: text("span", "hint"),
    mask: choices("Mask", [["none", "All keys"], ["causal", "Causal"]], (kind) => example.setMask(kind)),
    since: choices("Mark what differs from", [["edit", "Before this edit"], ["start", "The lesson"]],
      (since) => example.mark(since)),
    inputs: text("div", "figures"), sizes: text("div", "row sizes"), steps: text("div", "stage"),
    alert: element("p", {role: "alert"}), reached: text("p", "hint reached", {role: "status"}),
    made: text("div", "made card", {role: "status", text: REST}), python: pythonCard("As Python", PYTHON),
  };
}

export function lay(example) {
  const {parts} = example, row = (...children) => element("div", {class: "row"}, ...children);
  const field = (label, control, ...more) => element("div", {class: "field"},
    control.id ? element("label", {for: control.id, text: label}) : element("span", {class: "label", text: label}),
    row(control, ...more));
  parts.python.card.hidden = true;
  example.root.classList.add("worked");
  example.root.replaceChildren(
    element("section", {class: "card", "aria-label": "What is computed"},
      element("div", {class: "row fields"},
        field("Start from", parts.start, button("worked-reset", "Reset", () => example.load(example.preset)),
          button("worked-export", "Python script", () => example.exportScript())),
        field("Mask", parts.mask), field("Heads", parts.heads), field("Scale", parts.scale, parts.scaleHint)),
      parts.source),
    element("section", {class: "card", "aria-label": "Tokens and weights"},
      element("div", {class: "row top"}, element("h2", {text: "Tokens and weights"}), parts.sizes),
      parts.inputs, parts.alert,
      element("div", {class: "row marks"}, element("span", {class: "label", text: "Mark what differs from"}), parts.since,
        parts.reached)),
    parts.steps, parts.python.card, parts.made);
}

// Draw the controls for a worksheet.
export function drawControls(example) {
  const {sheet, limits, parts} = example, columns = sheet.W_q[0].length;
  const fits = (heads) => heads <= columns && columns % heads === 0;
  parts.heads.replaceChildren(...HEADS_OFFERED.filter((heads) => heads <= 2 || fits(heads)).map((heads) => element("option", {
    value: heads, disabled: !fits(heads), selected: heads === sheet.heads,
    text: fits(heads) ? String(heads) : `${heads}: needs ${heads * Math.ceil(columns / heads)} columns`,
  })));
  press(parts.mask, maskKind(sheet.allowed));
  parts.scale.replaceChildren(numberCell({
    id: "scale", row: 0, column: 0, number: sheet.scale ?? 1 / Math.sqrt(columns / sheet.heads), name: "scale",
    most: limits.number, edit: (row, column, number) => example.setScale(number),
    refuse: (input, message) => example.refuse(input, message),
  }));
  drawScaleHint(example);
  const change = (text, label, name) => element("button", {
    type: "button", text, "aria-label": label, disabled: CHANGES[name](sheet, limits) === null,
    onclick: () => example.edit(name, CHANGES[name](sheet, limits), true),
  });
  const pair = (name, less, more) => element("span", {class: "size"}, element("span", {class: "label", text: name}),
    element("span", {class: "group"}, change("−", `one ${name} less`, less), change("+", `one ${name} more`, more)));
  parts.sizes.replaceChildren(pair("token", "dropToken", "addToken"), pair("input channel", "dropWidth", "addWidth"),
    pair("head channel", "dropChannel", "addChannel"));
}

// The default scale, as a label or as a button that restores it.
export function drawScaleHint(example) {
  const {sheet, parts} = example, text = `1/√${sheet.W_q[0].length / sheet.heads}`;
  parts.scaleHint.replaceChildren(sheet.scale === null ? `= ${text}` : element("button", {
    type: "button", text, "aria-label": `use the default scale, ${text}`,
    onclick: () => example.edit("scale", {scale: null}, true),
  }));
}

const ROWS = "How well each query (row) matches each key (column); the weights, whose rows sum to 1; "
  + "weighted sums of the values.";

// The cards of all steps, in the order of computation.
export function stepCards(sheet, {steps, empty, difference}) {
  const card = (title, hint, shown) => element("section", {class: "card", "aria-label": title},
    element("h2", {text: title}), element("p", {class: "hint", text: hint}),
    element("div", {class: "figures"}, ...shown.map(stepTable)));
  const many = sheet.heads > 1, joined = steps.filter(({name}) => name === "concat");
  const cards = [card("Queries, keys, values", "Three views of each token: what it asks for, what it offers, and what it "
    + "hands over.", steps.filter(({head, name}) => head === null && name !== "concat"))];
  for (let head = 0; head < sheet.heads; head++) {
    const title = `${many ? `Head ${head + 1}: scores` : "Scores"}, weights, output`;
    cards.push(card(title, ROWS, steps.filter((step) => step.head === head)));
  }
  if (many) cards.push(card("Heads joined", "The heads' outputs side by side.", joined));
  const none = empty.length === 0 ? ""
    : `Query ${empty.map((query) => query + 1).join(", ")} may attend to no key: weights and output are 0 there. `;
  cards.at(-1).append(element("p", {class: "hint check", text: `${none}clearhead's module computed this output; it differs `
    + `from A · V by ${difference.toExponential(0).replace("-", "−")} at most.`}));
  return cards;
}
