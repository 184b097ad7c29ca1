// The tables of the worksheet: editable ones, and those of a step. A cell's place is "table/row/column".
import {element} from "./dom.js";
import {readNumber, shown} from "./worked_dom.js";

const place = (id, row, column) => `${id}/${row}/${column}`;

function frame(id, heading, columns, rows, label) {
  const head = element("tr", {}, element("td", {class: "corner"}),
    ...columns.map((text) => element("th", {scope: "col", text})));
  const table = element("table", {class: "numbers", role: "grid", "aria-label": label, "data-table": id},
    element("thead", {}, head), element("tbody", {}, ...rows));
  return element("figure", {class: "numbers-frame"}, heading, table);
}

function heading(symbol, title, shape, formula) {
  return element("figcaption", {},
    element("span", {class: "symbol", text: symbol}), element("span", {class: "title", text: title}),
    element("span", {class: "shape", text: shape}), ...(formula ? [element("code", {class: "formula", text: formula})] : []));
}

const counted = (count) => Array.from({length: count}, (_, at) => String(at + 1));

// An editable table. ``edit(row, column, number)`` is called with valid numbers; an invalid one is marked and reported.
export function numberTable({id, title, values, most, edit, refuse}) {
  const rows = values.map((numbers, row) => element("tr", {},
    element("th", {scope: "row", text: values.length > 1 || id === "X" ? String(row + 1) : ""}),
    ...numbers.map((number, column) => element("td", {},
      numberCell({id, row, column, number, name: `${id} row ${row + 1} column ${column + 1}`, most, edit, refuse})))));
  const shape = `${values.length}×${values[0].length}`;
  return frame(id, heading(id, title, shape), counted(values[0].length), rows, `${id}, ${title}, ${shape}`);
}

export function numberCell({id, row, column, number, name, most, edit, refuse}) {
  let current = number;
  const input = element("input", {
    type: "text", inputmode: "decimal", autocomplete: "off", spellcheck: "false", class: "cell", "aria-label": name,
    "data-cell": place(id, row, column),
  });
  const rest = () => {
    input.value = shown(current);
    input.removeAttribute("aria-invalid");
    refuse(input, null);
  };
  input.value = shown(number);
  input.addEventListener("focus", () => {
    if (!input.hasAttribute("aria-invalid")) input.value = String(current);
    input.select();
  });
  input.addEventListener("input", () => {
    const read = readNumber(input.value, most);
    input.toggleAttribute("aria-invalid", read === null);
    if (read === null) {
      input.setAttribute("aria-invalid", "true");
      const bad = `“${input.value.slice(0, 40)}” is no number between −${most} and ${most}`;
      refuse(input, `${name}: ${bad}. ${shown(current)} still counts.`);
      return;
    }
    refuse(input, null);
    current = read;
    edit(row, column, read);
  });
  input.addEventListener("blur", () => { if (!input.hasAttribute("aria-invalid")) input.value = shown(current); });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    rest();
    input.value = String(current);
    input.select();
  });
  return input;
}

export function maskTable({allowed, toggle}) {
  const rows = allowed.map((row, query) => element("tr", {},
    element("th", {scope: "row", text: String(query + 1)}),
    ...row.map((may, key) => element("td", {}, element("button", {
      type: "button", class: may ? "mark allowed" : "mark", "aria-pressed": String(may),
      "aria-label": `mask query ${query + 1} key ${key + 1}, may attend`, "data-cell": place("mask", query, key),
      text: may ? "■" : "·", onclick: () => toggle(query, key),
    })))));
  const shape = `${allowed.length}×${allowed.length}`;
  return frame("mask", heading("mask", "allowed keys", shape), counted(allowed.length), rows,
    `mask, a row per query, ${shape}`);
}

// The table of a step. One cell is in the tab order; arrow keys move to the others.
export function stepTable(step) {
  const rows = step.values.map((numbers, row) => element("tr", {},
    element("th", {scope: "row", text: String(row + 1)}),
    ...numbers.map((number, column) => {
      const cell = element("td", {
        class: step.name === "weights" ? "result heat" : number === null ? "result nothing" : "result",
        tabindex: row === 0 && column === 0 ? 0 : -1, "data-cell": place(step.id, row, column),
        "aria-label": `${step.symbol} row ${row + 1} column ${column + 1}: ${shown(number)}`, text: shown(number),
      });
      if (step.name === "weights") cell.style.setProperty("--weight", String(Math.sqrt(number)));
      return cell;
    })));
  return frame(step.id, heading(step.symbol, step.title, step.shapes, step.formula), counted(step.values[0].length), rows,
    `${step.title}, ${step.formula}, ${step.shapes}`);
}

const STEPS = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Enter: [1, 0]};

// Arrow keys and Enter move between cells as in a spreadsheet, and sideways between tables.
export function walkCells(root) {
  root.addEventListener("keydown", (event) => {
    const cell = event.target.closest("[data-cell]"), step = STEPS[event.key];
    if (!cell || !step || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.key === "Enter" && cell.matches("button")) return;
    if (step[1] !== 0 && cell.matches("input") && withinText(cell, step[1])) return;
    event.preventDefault();
    neighbour(root, cell, step)?.focus();
  });
  root.addEventListener("focusin", (event) => {
    const cell = event.target.closest("td[data-cell]");
    if (!cell) return;
    for (const other of cell.closest("table").querySelectorAll("td[data-cell][tabindex='0']")) other.tabIndex = -1;
    cell.tabIndex = 0;
  });
}

// Whether the caret can move within the cell's text in this direction.
function withinText(input, sign) {
  const {selectionStart: start, selectionEnd: end, value} = input;
  if (start === 0 && end === value.length) return false;
  return start !== end || (sign < 0 ? start > 0 : end < value.length);
}

function neighbour(root, cell, [down, right]) {
  const [id, row, column] = cell.dataset.cell.split("/");
  const find = (table, at, place) => root.querySelector(`[data-cell="${table}/${at}/${place}"]`);
  const near = find(id, Number(row) + down, Number(column) + right);
  if (near || right === 0) return near;
  const tables = [...root.querySelectorAll("[data-table]")];
  const next = tables[tables.findIndex((each) => each.dataset.table === id) + right];
  if (!next) return null;
  const lines = [...next.querySelectorAll("tbody tr")], line = lines[Math.min(Number(row), lines.length - 1)];
  const cells = line.querySelectorAll("[data-cell]");
  return right > 0 ? cells[0] : cells[cells.length - 1];
}
