// The text and charts of the tab "Variants": properties of the mask, charts of a head, the rules alone, the backends.
import {element} from "./dom.js";
import {lineChart} from "./variants_chart.js";
import {shown} from "./worked_dom.js";

const MOST_NAMED = 12;

function definitions(pairs) {
  return pairs.flatMap(([name, text, look]) => [
    element("dt", look ? {class: look, text: name} : {text: name}), element("dd", {text})]);
}

function someOf(list) {
  if (list.length <= MOST_NAMED) return list.join(", ");
  return `${list.slice(0, MOST_NAMED).join(", ")} and ${list.length - MOST_NAMED} more`;
}

// Properties of the mask.
export function maskFacts({python, fraction, counts, empty, runs, tiles}) {
  const places = counts.length ** 2, all = tiles.empty + tiles.partial + tiles.full;
  const mean = counts.reduce((sum, count) => sum + count, 0) / counts.length;
  const pairs = definitions([
    ["Mask", python],
    ["Allowed", `${Math.round(fraction * places)} of ${places} places, ${(100 * fraction).toFixed(1)} %`],
    ["A query sees", `${Math.min(...counts)} to ${Math.max(...counts)} keys, ${mean.toFixed(1)} on average`],
    ["Empty rows", empty.length === 0 ? "none" : `${empty.length > 1 ? "queries" : "query"} ${someOf(empty)}: `
      + "nothing to attend to, so weights and output are 0"],
    [`Tiles of ${tiles.side}×${tiles.side}`, `${tiles.empty} of ${all} are empty and skipped, ${tiles.full} are full and `
      + `need no mask, ${tiles.partial} are read place by place`],
    ["Stored as", runs ? "intervals of keys per row, from which tiles follow without reading single pairs"
      : "its places: they are read to find the tiles"],
  ]);
  pairs[1].className = "code";
  return pairs;
}

// Charts of a head before and after, over its queries.
export function headCharts({before, after, words}) {
  const places = words.map((_, at) => at);
  const chart = (title, name) => lineChart({title, across: "query", places, lines: [
    {name: "before", values: before[name], look: "dashed"}, {name: "after", values: after[name], look: "whole"}]});
  const charts = [chart("Entropy of the weights, in nats", "entropy"),
    chart("Mean distance to the attended keys", "distance")];
  if (after.mass.some((mass) => mass > 0 && mass < 1 - 1e-9)) {
    charts.push(chart("Sum of the weights: the rest is the sink's", "mass"));
  }
  return charts;
}

// The rules' effect on a single score.
export function ruleCharts({relative, distances, values, scores, answers, shifts}) {
  // A constant curve is left out if the other chart shows the rules.
  const flat = relative && !shifts && values.every((value) => value === values[0]);
  const charts = flat ? [] : [relative
    ? lineChart({title: "A score of 0, by distance", across: "q_pos − k_pos", places: distances,
      lines: [{name: "score", values, look: "whole"}]})
    : element("p", {class: "hint", text: "These rules depend on more than the distance q_pos − k_pos, so there is no curve over it."})];
  if (!shifts) {
    charts.push(lineChart({title: "A score at distance 0, before and after", across: "score before", places: scores, lines: [
      {name: "unchanged", values: scores, look: "dashed"}, {name: "after the rules", values: answers, look: "whole"}]}));
  }
  return charts;
}

export function backends({choice, reasons}) {
  const said = (name, against) => (name === choice ? "chosen" : against.length ? against.join("; ") : "supported");
  return [
    element("p", {}, "On this machine, for these tensors in float32, ", element("code", {text: "ch.attention"}),
      " would take ", element("strong", {text: choice ?? "none"}), "."),
    element("dl", {class: "facts"}, ...definitions(reasons.map(({name, against}) =>
      [name, said(name, against), name === choice ? "code taken" : "code"]))),
  ];
}

// One cell of both maps, to six decimal places.
export function placeText({words, mask, before, after}, [query, key]) {
  const change = (name) => [before, after].map((seen) => shown(seen[name][query][key], 6)).join(" → ");
  const may = mask.allowed[query][key] === "1";
  return `query ${query} “${words[query]}” → key ${key} “${words[key]}”: weight ${change("weights")}, `
    + (may ? `score ${change("scores")}` : "forbidden by the mask");
}
