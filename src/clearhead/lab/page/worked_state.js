// The worksheet as numbers, and the operations that add and remove rows and columns.

export const WEIGHTS = ["W_q", "W_k", "W_v"];
export const BIASES = ["b_q", "b_k", "b_v"];

const copy = (value) => JSON.parse(JSON.stringify(value));

export function sheetOf(preset) {
  const {X, W_q, W_k, W_v, b_q, b_k, b_v, allowed, scale, heads} = preset;
  return copy({X, W_q, W_k, W_v, b_q, b_k, b_v, allowed, scale, heads});
}

export function maskKind(allowed) {
  if (allowed.every((row) => row.every((cell) => cell))) return "none";
  return allowed.every((row, query) => row.every((cell, key) => cell === (key <= query))) ? "causal" : "own";
}

export function maskOf(kind, tokens) {
  const row = (query) => Array.from({length: tokens}, (_, key) => kind === "none" || key <= query);
  return Array.from({length: tokens}, (_, query) => row(query));
}

// Each returns a new worksheet, or null at the size limit.
export const CHANGES = {
  addToken(sheet, limits) {
    if (sheet.X.length >= limits.tokens) return null;
    const kind = maskKind(sheet.allowed), tokens = sheet.X.length + 1;
    const own = [...sheet.allowed.map((row) => [...row, true]), Array(tokens).fill(true)];
    return {...sheet, X: [...sheet.X, sheet.X[0].map(() => 0)], allowed: kind === "own" ? own : maskOf(kind, tokens)};
  },
  dropToken(sheet) {
    if (sheet.X.length <= 1) return null;
    return {...sheet, X: sheet.X.slice(0, -1), allowed: sheet.allowed.slice(0, -1).map((row) => row.slice(0, -1))};
  },
  addWidth(sheet, limits) {
    if (sheet.X[0].length >= limits.width) return null;
    const grown = Object.fromEntries(WEIGHTS.map((name) => [name, [...sheet[name], sheet[name][0].map(() => 0)]]));
    return {...sheet, ...grown, X: sheet.X.map((row) => [...row, 0])};
  },
  dropWidth(sheet) {
    if (sheet.X[0].length <= 1) return null;
    const cut = Object.fromEntries(WEIGHTS.map((name) => [name, sheet[name].slice(0, -1)]));
    return {...sheet, ...cut, X: sheet.X.map((row) => row.slice(0, -1))};
  },
  // Add or remove a channel of every head.
  addChannel(sheet, limits) {
    if (sheet.W_q[0].length + sheet.heads > limits.columns) return null;
    return byHead(sheet, (part) => [...part, 0]);
  },
  dropChannel(sheet) {
    if (sheet.W_q[0].length <= sheet.heads) return null;
    return byHead(sheet, (part) => part.slice(0, -1));
  },
};

function byHead(sheet, change) {
  const width = sheet.W_q[0].length / sheet.heads;
  const part = (cells, head) => cells.slice(head * width, (head + 1) * width);
  const row = (cells) => Array.from({length: sheet.heads}, (_, head) => change(part(cells, head))).flat();
  const changed = Object.fromEntries(WEIGHTS.map((name) => [name, sheet[name].map(row)]));
  for (const name of BIASES) changed[name] = sheet[name] && row(sheet[name]);
  return {...sheet, ...changed};
}

// The tables of the worksheet, by the names in the steps' recipes.
export function inputTables(sheet) {
  const tables = [["X", sheet.X], ...WEIGHTS.map((name) => [name, sheet[name]])];
  for (const name of BIASES) if (sheet[name]) tables.push([name, [sheet[name]]]);
  tables.push(["mask", sheet.allowed]);
  return tables.map(([id, values]) => ({id, symbol: id, values}));
}

// Cells, as "table/row/column", whose number has changed; all cells if there was no number before.
export function changedPlaces(tables, before) {
  const places = new Set();
  if (!before) return places;
  const previous = new Map(before.map((table) => [table.id, table.values]));
  for (const {id, values} of tables) {
    values.forEach((row, at) => row.forEach((number, column) => {
      const old = previous.get(id)?.[at]?.[column];
      const same = number === old || (typeof number === "number" && typeof old === "number"
        && Math.abs(number - old) <= 1e-12 * Math.max(1, Math.abs(old)));
      if (!same) places.add(`${id}/${at}/${column}`);
    }));
  }
  return places;
}
