// The axes of a matrix of weights, and the matrix as an SVG drawing.
import {css, themed} from "./colours.js";
import {drawn, readable} from "./dom.js";

export const PLACE = {left: 132, top: 104, edge: 8};
const {left: LEFT, top: TOP} = PLACE;
const LABEL_FROM = 11;
const MOST_RECTS = 20000;

// Labels on both axes: tokens, or numbers if the tokens do not fit.
export function drawAxes(matrix) {
  const {context} = matrix, {left, top, size} = matrix.look, {rows, columns} = matrix.source;
  context.textBaseline = "middle";
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = themed("--soft");
  context.textAlign = "left";
  context.fillText("queries ↓", 6, TOP - 10);
  context.textAlign = "right";
  context.fillText("keys →", LEFT - 8, 12);
  const step = size >= LABEL_FROM ? 1 : niceStep(64 / size);
  for (let row = Math.ceil(top / step) * step; row < Math.min(rows, top + matrix.height / size); row += step) {
    label(matrix, row, "queries", LEFT - 6, TOP + (row - top + (step === 1 ? 0.5 : 0)) * size, 0, row === matrix.chosen.row, step);
  }
  for (let column = Math.ceil(left / step) * step; column < Math.min(columns, left + matrix.width / size); column += step) {
    label(matrix, column, "keys", LEFT + (column - left + (step === 1 ? 0.5 : 0)) * size, TOP - 6, -Math.PI / 2, column === matrix.chosen.column, step);
  }
  if (step > 1) {
    label(matrix, matrix.chosen.row, "queries", LEFT - 6, TOP + (matrix.chosen.row - top) * size, 0, true, 1);
    label(matrix, matrix.chosen.column, "keys", LEFT + (matrix.chosen.column - left) * size, TOP - 6, -Math.PI / 2, true, 1);
  }
}

// One label on an axis: the token, or its number if the tokens do not fit.
function label(matrix, place, axis, x, y, turn, chosen, step) {
  const along = turn ? x - LEFT : y - TOP;
  if (along < -1 || along > (turn ? matrix.width : matrix.height) + 1) return;
  const {context} = matrix, width = (turn ? TOP : LEFT) - 16;
  const text = step === 1 ? fitted(context, readable(matrix.texts[axis][place]), width) : String(place);
  context.save();
  context.translate(x, y);
  context.rotate(turn);
  context.textAlign = turn ? "left" : "right";
  context.font = `${chosen ? "600 " : ""}12px system-ui, sans-serif`;
  if (chosen) {
    const width = context.measureText(text).width + 8;
    context.fillStyle = themed("--mark");
    context.fillRect(turn ? -4 : 4 - width, -8, width, 16);
  }
  context.fillStyle = chosen ? themed("--card") : themed("--text");
  context.fillText(text, 0, 0.5);
  context.restore();
}

// The view as a drawing: a rectangle for each weight, or a bitmap if there are too many.
export function matrixSvg(matrix) {
  const {size} = matrix.look, width = matrix.canvas.clientWidth, height = matrix.canvas.clientHeight;
  const made = drawn("svg", {xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`});
  const cells = (matrix.width / size) * (matrix.height / size);
  if (!matrix.exact || cells > MOST_RECTS) {
    made.append(drawn("image", {href: matrix.canvas.toDataURL("image/png"), width, height}));
    return made;
  }
  made.append(drawn("rect", {width, height, fill: themed("--card")}));
  const rows = new Set(), columns = new Set();
  for (const {row, column, x, y} of matrix.cells()) {
    const weight = matrix.source.allowed(row, column) ? matrix.source.weight(row, column) : NaN;
    const box = drawn("rect", {x: x.toFixed(2), y: y.toFixed(2), width: size.toFixed(2), height: size.toFixed(2), fill: css(matrix.paint(weight))});
    if (!Number.isNaN(weight)) box.append(drawn("title", {text: `${row} → ${column}: ${weight}`}));
    made.append(box);
    rows.add(row);
    columns.add(column);
  }
  if (matrix.source.only) {
    const lines = Array.from(matrix.hatches(), ({x, y, to}) => `M${x.toFixed(1)} ${to.y.toFixed(1)}L${to.x.toFixed(1)} ${y.toFixed(1)}`);
    made.append(drawn("path", {d: lines.join(""), stroke: themed("--text"), "stroke-width": 1, fill: "none"}));
  }
  if (size < LABEL_FROM) return made;
  const style = {"font-size": 12, "font-family": "sans-serif", fill: themed("--text"), "dominant-baseline": "middle"};
  for (const row of rows) {
    const y = TOP + (row - matrix.look.top + 0.5) * size;
    made.append(drawn("text", {...style, x: LEFT - 6, y, "text-anchor": "end", text: readable(matrix.texts.queries[row])}));
  }
  for (const column of columns) {
    const x = LEFT + (column - matrix.look.left + 0.5) * size;
    made.append(drawn("text", {...style, transform: `translate(${x} ${TOP - 6}) rotate(-90)`, text: readable(matrix.texts.keys[column])}));
  }
  return made;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((part) => part * power).find((step) => step >= Math.max(least, 2)) ?? Math.ceil(least);
}

// A text truncated to a width, never between a letter and its combining marks.
function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const letters = [...new Intl.Segmenter().segment(text)].map((each) => each.segment);
  while (letters.length > 1 && context.measureText(`${letters.join("")}…`).width > width) letters.pop();
  return `${letters.join("")}…`;
}
