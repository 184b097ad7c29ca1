// The step-by-step table of one view, and the table of the keys it looks at most.
const TOP_KEYS = 8;

function stepRows(data, view, steps) {
  const {head_dim: width, embed_dim: embed, scale} = data.attention;
  const tokens = steps.weights.length;
  const at = where(data, view.token);
  return [
    ["Query", `q = x W_q, for pixel ${at}`, [width], steps.query, null],
    ["Scores", "q \u00b7 k for every key", [tokens], steps.scores, "scores"],
    ["Scaled", `score \u00d7 ${scale} (1 / \u221a${width})`, [tokens], steps.scaled, "scaled"],
    ["Mask", "none: every key may be attended to", [tokens], null, null],
    ["Weights", `softmax; log-sum-exp ${shown(steps.lse)}`, [tokens], steps.weights, "weights"],
    ["Head output", "\u03a3 weight \u00d7 value", [width], steps.output, "output"],
    ["Head\u2019s part", `W_o of head ${view.head} \u00d7 output`, [embed], steps.part, "part"],
  ];
}

function drawSteps(data, attention, view) {
  const steps = attention.steps(view);
  const rows = stepRows(data, view, steps).map(([name, formula, shape, values, checked]) => {
    const drawn = values ? [strip(Array.from(values)), element("span", {class: "few", text: few(values)})] : ["\u2014"];
    const difference = checked ? attention.difference(view, checked) : null;
    return element("tr", {"data-step": name.toLowerCase()},
      element("th", {scope: "row", text: name}),
      element("td", {text: formula}),
      element("td", {class: "number", text: `[${shape.join(", ")}]`}),
      element("td", {class: "values"}, ...drawn),
      element("td", {class: "number", text: difference === null ? "" : shown(difference)}));
  });
  document.querySelector("#steps tbody").replaceChildren(...rows);
  const gap = attention.gap(view, steps);
  byId("gap").textContent = `Checked in this browser just now: the library\u2019s output of this head differs from the ` +
    `recomputed one by at most ${shown(gap.output)}, its log-sum-exp by ${shown(gap.lse)}.`;
  drawKeys(data, view, steps);
}

function drawKeys(data, view, steps) {
  const order = Array.from(steps.weights.keys()).sort((a, b) => steps.weights[b] - steps.weights[a]);
  const values = data.examples[view.example].values;
  let total = 0;
  const rows = order.slice(0, TOP_KEYS).map((place) => {
    total += steps.weights[place];
    const cells = [values[place], shown(steps.scores[place]), shown(steps.scaled[place]), steps.weights[place].toFixed(4)];
    const row = element("tr", {}, element("th", {scope: "row", text: where(data, place)}));
    row.append(...cells.map((text) => element("td", {class: "number", text})), element("td", {class: "number", text: `${(100 * total).toFixed(1)}%`}));
    return row;
  });
  document.querySelector("#keys tbody").replaceChildren(...rows);
}

function where(data, token) {
  return `(${Math.floor(token / data.grid.columns)}, ${token % data.grid.columns})`;
}
