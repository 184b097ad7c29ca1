// How a cell of a step is computed, by the step's recipe: the cells to highlight, and the sum with its terms.
import {shown} from "./worked_dom.js";

// The largest number of terms in a sum that is shown in full.
const TERMS = 8;

const bracketed = (number) => (number !== null && number < 0 ? `(${shown(number)})` : shown(number));
const times = (pairs) => {
  const terms = pairs.map(([left, right]) => `${bracketed(left)} × ${bracketed(right)}`);
  return terms.length > TERMS ? `${terms.slice(0, TERMS).join(" + ")} + …` : terms.join(" + ");
};
const rowOf = (table, row) => table.values[row].map((_, column) => [table.id, row, column]);
const columnOf = (table, column) => table.values.map((_, row) => [table.id, row, column]);

// From a recipe to {sum, cells}; ``tables`` returns a table by its id, including inputs.
const RECIPES = {
  product({left, right, bias}, row, column, tables) {
    const [one, other] = [tables(left), tables(right)];
    const pairs = one.values[row].map((number, at) => [number, other.values[at][column]]);
    const added = bias ? tables(bias) : null;
    return {
      sum: times(pairs) + (added ? ` + ${bracketed(added.values[0][column])}` : ""),
      cells: [...rowOf(one, row), ...columnOf(other, column), ...(added ? [[bias, 0, column]] : [])],
    };
  },
  dots({left, right}, row, column, tables) {
    const [one, other] = [tables(left), tables(right)];
    const pairs = one.values[row].map((number, at) => [number, other.values[column][at]]);
    return {sum: times(pairs), cells: [...rowOf(one, row), ...rowOf(other, column)]};
  },
  columns({of, first}, row, column, tables) {
    return {sum: `${tables(of).symbol} row ${row + 1} column ${first + column + 1}`, cells: [[of, row, first + column]]};
  },
  scaled({of}, row, column, tables, scale) {
    return {sum: `${bracketed(tables(of).values[row][column])} × ${bracketed(scale)}`, cells: [[of, row, column]]};
  },
  masked({of}, row, column, tables) {
    const may = tables("mask").values[row][column];
    return {
      sum: may ? `allowed, so ${shown(tables(of).values[row][column])} stays`
        : `query ${row + 1} may not attend to key ${column + 1}`,
      cells: [[of, row, column], ["mask", row, column]],
    };
  },
  softmax({of}, row, column, tables) {
    const scores = tables(of).values[row], power = (number) => (number === null ? "0" : `e^${bracketed(number)}`);
    const cells = rowOf(tables(of), row);
    if (scores.every((number) => number === null)) return {sum: "no key is allowed, so every weight is 0", cells};
    const below = scores.slice(0, TERMS).map(power).join(" + ") + (scores.length > TERMS ? " + …" : "");
    return {sum: `${power(scores[column])} / (${below})`, cells};
  },
  concat({of}, row, column, tables) {
    const width = tables(of[0]).values[0].length, head = Math.floor(column / width);
    const own = tables(of[head]);
    return {sum: `${own.symbol} row ${row + 1} column ${column % width + 1}`, cells: [[own.id, row, column % width]]};
  },
};

export function madeFrom(step, row, column, tables, scale) {
  const {sum, cells} = RECIPES[step.recipe.kind](step.recipe, row, column, tables, scale);
  return {text: `${step.symbol} row ${row + 1} column ${column + 1} = ${sum} = ${shown(step.values[row][column])}`, cells};
}
