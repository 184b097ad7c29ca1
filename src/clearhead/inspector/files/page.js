// The page: one state, drawn again after every choice.
function start(data) {
  const attention = new Attention(data);
  const {rows, columns, max_value: maximum} = data.grid;
  const tokens = rows * columns;
  const view = {example: 0, mode: "token", shared: false, ...data.examples[0].telling};
  const made = build();

  function numbersOf(layer, head) {
    const here = {example: view.example, layer, head, token: view.token};
    return view.mode === "token" ? attention.weights(here) : attention.received(here);
  }

  function set(change) {
    Object.assign(view, change);
    draw();
  }

  function setExample(example) {
    set({example, ...data.examples[example].telling});
  }

  // ---- made once -----------------------------------------------------------------------------------------

  function build() {
    byId("facts").replaceChildren(...data.facts.map((fact) =>
      element("div", {}, element("dt", {text: fact.label}), element("dd", {class: "value", text: fact.value}), element("dd", {class: "note", text: fact.note}))));
    byId("made").textContent = data.made_by;
    const parts = {examples: buildExamples(), heads: buildHeads(), digit: buildGrid("digit", true), map: buildGrid("map", false)};
    for (const mode of ["token", "received"]) byId(`mode-${mode}`).addEventListener("click", () => set({mode}));
    const modes = ["token", "received"].map((mode) => byId(`mode-${mode}`));
    modes.forEach((button, place) => (button.dataset.place = place));
    walk(modes[0].parentElement, modes, 1, (place) => set({mode: modes[place].dataset.mode}));
    byId("matrix").addEventListener("click", (event) => set({token: matrixPlace(event)[0], mode: "token"}));
    byId("matrix").addEventListener("pointermove", (event) => {
      const [token, key] = matrixPlace(event);
      const weight = attention.weights({...view, token})[key];
      byId("matrix").title = `Query ${where(data, token)} \u2192 key ${where(data, key)}: ${weight.toFixed(4)}`;
    });
    byId("shared").addEventListener("change", (event) => set({shared: event.target.checked}));
    return parts;
  }

  function buildExamples() {
    const buttons = data.examples.map((example, place) => {
      const wrong = example.truth !== null && example.truth !== example.predicted;
      const verdict = `predicted ${data.classes[example.predicted]}${wrong ? `, really ${data.classes[example.truth]}` : ""}`;
      return element("button", {type: "button", role: "radio", class: wrong ? "example wrong" : "example",
        "data-place": place, "aria-label": `${example.name}: ${verdict}`, onclick: () => setExample(place)},
      element("canvas", {"aria-hidden": "true"}),
      element("span", {"aria-hidden": "true", text: data.classes[example.predicted] + (wrong ? " \u2717" : "")}));
    });
    byId("examples").replaceChildren(...buttons);
    walk(byId("examples"), buttons, 1, setExample);
    return buttons;
  }

  function buildHeads() {
    const buttons = [];
    const {num_layers: layers, num_heads: heads} = data.attention;
    const lines = Array.from({length: layers}, (_, layer) => {
      const line = element("div", {class: "layer", role: "presentation"}, element("span", {class: "name", text: `Layer ${layer}`}));
      for (let head = 0; head < heads; head++) {
        const button = element("button", {type: "button", role: "radio", class: "head", "data-place": buttons.length,
          onclick: () => set({layer, head})}, element("canvas", {"aria-hidden": "true"}),
        element("span", {class: "peak", "aria-hidden": "true"}), element("i", {class: "influence", "aria-hidden": "true"}));
        buttons.push(button);
        line.append(button);
      }
      return line;
    });
    byId("heads").replaceChildren(...lines);
    byId("heads").style.setProperty("--heads", heads);
    walk(byId("heads"), buttons, heads, (place) => set({layer: Math.floor(place / heads), head: place % heads}));
    return buttons;
  }

  function buildGrid(id, chooses) {
    const cells = Array.from({length: tokens}, (_, token) =>
      element("div", {role: "gridcell", class: "cell", "data-place": token, tabindex: "-1",
        onpointerenter: () => read(token, id), onfocus: () => read(token, id),
        onclick: () => (chooses ? set({token, mode: "token"}) : read(token, id))},
      element("i", {"aria-hidden": "true"})));
    const lines = Array.from({length: rows}, (_, row) =>
      element("div", {role: "row"}, ...cells.slice(row * columns, (row + 1) * columns)));
    byId(id).replaceChildren(...lines);
    byId(id).style.setProperty("--columns", columns);
    byId(id).addEventListener("pointerleave", () => read(null, id));
    if (!chooses) cells[0].tabIndex = 0;
    walk(byId(id), cells, columns, chooses ? (token) => set({token, mode: "token"}) : () => {});
    return cells;
  }

  // ---- drawn after every choice --------------------------------------------------------------------------

  function draw() {
    const example = data.examples[view.example];
    drawExamples();
    drawHeads(example);
    drawDigit(example);
    drawMap(example);
    drawPrediction(example);
    drawSteps(data, attention, view);
    drawMatrix();
    const note = view.mode === "token" ? "" : " The map above shows all pixels together; the steps are those of one pixel.";
    byId("steps-hint").textContent = `${headName(view.layer, view.head)}, for the pixel at row, column ${where(data, view.token)}. ` +
      `Recomputed in this browser in float64 from the query, keys and values of the model; the last column was measured where the page was made.${note}`;
    read(null);
  }

  function headName(layer, head) {
    return `Layer ${layer}, head ${head}`;
  }

  function choose(buttons, chosen) {
    buttons.forEach((button, place) => {
      button.setAttribute("aria-checked", String(place === chosen));
      button.tabIndex = place === chosen ? 0 : -1;
    });
  }

  function drawExamples() {
    choose(made.examples, view.example);
    data.examples.forEach((example, place) =>
      thumbnail(made.examples[place].querySelector("canvas"), example.values, columns, (value) => ink(value / maximum)));
  }

  function drawHeads(example) {
    const {num_heads: heads} = data.attention;
    const maps = made.heads.map((_, place) => numbersOf(Math.floor(place / heads), place % heads));
    const peaks = maps.map((map) => map.reduce((a, b) => Math.max(a, b)));
    // A head that looks everywhere alike should look pale: no map is stretched beyond four times uniform.
    const tops = peaks.map((peak) => Math.max(peak, 4 / tokens));
    const highest = Math.max(...tops);
    const most = Math.max(...example.influence.flat(), 1e-9);
    choose(made.heads, view.layer * heads + view.head);
    made.heads.forEach((button, place) => {
      const [layer, head] = [Math.floor(place / heads), place % heads];
      const top = view.shared ? highest : tops[place];
      const influence = example.influence[layer][head];
      thumbnail(button.querySelector("canvas"), maps[place], columns, (weight) => heat(weight / top));
      button.querySelector(".peak").textContent = peaks[place].toFixed(2);
      button.querySelector(".influence").style.setProperty("--part", Math.max(0, influence) / most);
      button.setAttribute("aria-label", `${headName(layer, head)}: largest weight ${peaks[place].toFixed(3)}; ` +
        `without it the prediction loses ${influence.toFixed(3)} of log-probability`);
    });
    view.top = view.shared ? highest : tops[view.layer * heads + view.head];
  }

  function drawDigit(example) {
    made.digit.forEach((cell, token) => {
      const chosen = view.mode === "token" && token === view.token;
      cell.style.backgroundColor = css(ink(example.values[token] / maximum));
      cell.tabIndex = token === view.token ? 0 : -1;
      cell.classList.toggle("chosen", chosen);
      cell.setAttribute("aria-selected", String(chosen));
      cell.setAttribute("aria-label", `row, column ${where(data, token)}: intensity ${example.values[token]} of ${maximum}`);
    });
  }

  function drawMap(example) {
    const numbers = numbersOf(view.layer, view.head);
    made.map.forEach((cell, token) => {
      const part = numbers[token] / view.top;
      const size = example.values[token] / maximum;
      cell.style.backgroundColor = css(heat(part));
      cell.dataset.weight = numbers[token];
      cell.classList.toggle("chosen", view.mode === "token" && token === view.token);
      cell.setAttribute("aria-label", `row, column ${where(data, token)}: weight ${numbers[token].toFixed(4)}`);
      const dot = cell.firstElementChild;
      dot.style.setProperty("--size", size ? 0.16 + 0.34 * size : 0);
      dot.classList.toggle("over", part > 0.5);
    });
    byId("map-title").textContent = headName(view.layer, view.head);
    byId("map-caption").textContent = view.mode === "token"
      ? `Where pixel ${where(data, view.token)} looks. Dots: the digit\u2019s ink.`
      : "What each pixel receives, mean over all. Dots: the digit\u2019s ink.";
    for (const mode of ["token", "received"]) {
      byId(`mode-${mode}`).setAttribute("aria-checked", String(view.mode === mode));
      byId(`mode-${mode}`).tabIndex = view.mode === mode ? 0 : -1;
    }
    thumbnail(byId("legend"), Float64Array.from({length: 256}, (_, place) => place / 255), 256, heat);
    byId("legend-high").textContent = `${view.top.toFixed(3)} (uniform would be ${(1 / tokens).toFixed(3)})`;
  }

  function drawMatrix() {
    const rowsOf = Array.from({length: tokens}, (_, token) => Array.from(attention.weights({...view, token})));
    const all = rowsOf.flat();
    const highest = all.reduce((a, b) => Math.max(a, b));
    thumbnail(byId("matrix"), all, tokens, (weight) => heat(Math.sqrt(weight / highest)));
    byId("matrix").setAttribute("aria-label", `${tokens} queries by ${tokens} keys; the largest weight is ${highest.toFixed(4)}`);
    const line = byId("matrix-row").style;
    line.setProperty("--row", view.token / tokens);
    line.setProperty("--rows", 1 / tokens);
    byId("matrix-note").textContent = `The marked row is query ${where(data, view.token)}. Brightness by the square root of the weight, ` +
      `up to ${highest.toFixed(3)}. Click a row to choose its query.`;
  }

  function matrixPlace(event) {
    const box = byId("matrix").getBoundingClientRect();
    const inside = (part) => Math.min(tokens - 1, Math.max(0, Math.floor(part * tokens)));
    return [inside((event.clientY - box.top) / box.height), inside((event.clientX - box.left) / box.width)];
  }

  function drawPrediction(example) {
    const percent = (part) => `${(100 * part).toFixed(1)}%`;
    const wrong = example.truth !== null && example.truth !== example.predicted;
    byId("verdict").replaceChildren(element("strong", {text: data.classes[example.predicted]}),
      element("span", {text: `${example.name}: ${percent(example.probabilities[example.predicted])} sure` +
        (example.truth === null ? "" : wrong ? `, but it is ${data.classes[example.truth]}` : ", and right")}));
    byId("probabilities").replaceChildren(...example.probabilities.map((part, place) => {
      const row = element("li", {class: place === example.truth ? "truth" : ""}, element("span", {text: data.classes[place]}),
        element("i", {"aria-hidden": "true"}), element("span", {class: "number", text: percent(part)}));
      row.style.setProperty("--part", part);
      return row;
    }));
  }

  function read(token, id) {
    const weights = numbersOf(view.layer, view.head);
    const scaled = token === null || view.mode !== "token" ? null : attention.steps(view).scaled[token];
    const readout = byId("readout");
    made.map.forEach((cell, place) => cell.classList.toggle("hover", place === token));
    made.digit.forEach((cell, place) => cell.classList.toggle("hover", place === token && id === "map"));
    if (token === null) {
      const best = weights.indexOf(weights.reduce((a, b) => Math.max(a, b)));
      readout.textContent = view.mode === "token"
        ? `Query ${where(data, view.token)} looks most at key ${where(data, best)}: weight ${weights[best].toFixed(4)}.`
        : `Key ${where(data, best)} receives most: ${weights[best].toFixed(4)} on average.`;
    } else if (view.mode === "token") {
      readout.textContent = `Query ${where(data, view.token)} \u2192 key ${where(data, token)}: weight ${weights[token].toFixed(4)}, scaled score ${shown(scaled)}.`;
    } else {
      readout.textContent = `Key ${where(data, token)} receives ${weights[token].toFixed(4)} from each pixel on average.`;
    }
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const next = {undefined: "light", light: "dark", dark: undefined}[root.dataset.theme];
    if (next) root.dataset.theme = next;
    else delete root.dataset.theme;
    byId("theme").textContent = `Theme: ${next ?? "system"}`;
    draw();
  });
  byId("main").hidden = false;
  draw();
  // For whoever wants the numbers behind the picture: clearhead.weights({example, layer, head, token}).
  window.clearhead = {data, view, weights: (at) => Array.from(attention.weights(at)), steps: (at) => attention.steps(at)};
}

function fail(error) {
  const known = error instanceof Damaged;
  if (!known) console.error(error);
  const what = known ? error.message : "something in it was not expected";
  const alert = byId("alert");
  alert.textContent = `This page cannot be shown: ${what}. Make it again with the command that wrote it.`;
  alert.hidden = false;
  byId("main").hidden = true;
}

try {
  start(readData(byId("data").textContent));
} catch (error) {
  fail(error);
}
