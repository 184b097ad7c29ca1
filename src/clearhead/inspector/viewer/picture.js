// An image whose patches or pixels are tokens: the weights of one query, the weights on one key, the sums over queries.
import {css, painterOf, themed} from "./colours.js";
import {byId, drawn, element, readable, shown} from "./dom.js";
import {change, state} from "./state.js";

const SIDE = 280, SMALL = 96, GAP = 16, HEAD = 42;
const PANELS = [
  {name: "plain", title: () => "image: select a patch"},
  {name: "looks", title: (at) => `weights of query ${at.query} on each key`, chooses: "key"},
  {name: "looked", title: (at) => `weights of each query on key ${at.key}`, chooses: "query"},
  {name: "received", title: () => "attention received by each key", chooses: "key"},
];

export class PictureView {
  constructor(model) {
    this.model = model;
    byId("cover").addEventListener("input", (event) => change({cover: Number(event.target.value)}));
    this.panels = new Map(PANELS.map((panel) => [panel.name, this.panel(panel)]));
    byId("picture").append(...[...this.panels.values()].map((panel) => panel.figure));
  }

  panel({name, chooses}) {
    const canvas = element("canvas", {class: "patches", tabindex: 0, role: "application", "aria-roledescription": "picture of tokens", "aria-label": name});
    const caption = element("figcaption"), most = element("p", {class: "hint"}), extra = element("div", {class: "extra"});
    const choose = (token) => change(chooses ? {[chooses]: token} : {...(this.square ? {query: token} : {}), key: token});
    canvas.addEventListener("click", (event) => { const token = this.at(event, canvas); if (token !== null) choose(token); });
    canvas.addEventListener("pointermove", (event) => this.hover(name, this.at(event, canvas)));
    canvas.addEventListener("pointerleave", () => this.say());
    canvas.addEventListener("keydown", (event) => this.key(event, chooses, choose));
    return {name, canvas, caption, most, extra, choose, figure: element("figure", {"data-panel": name}, caption, canvas, extra, most)};
  }

  async render({numbers, texts, layer}) {
    const picture = await this.model.picture(layer.image);
    Object.assign(this, {numbers, texts, layer, picture});
    this.square = layer.queries === layer.tokens;
    byId("cover").value = String(state.cover);
    byId("cover-value").textContent = `${state.cover}%`;
    this.panels.get("looked").figure.hidden = !this.square;
    for (const panel of this.panels.values()) this.paint(panel);
    this.say();
    await this.heads();
  }

  // A value for each token, by panel; null for the image panel.
  values(name) {
    const {numbers} = this;
    if (name === "looks") return numbers.row(state.query);
    if (name === "looked") return Float32Array.from({length: numbers.rows}, (_, row) => numbers.weight(row, state.key));
    return name === "received" ? numbers.profile.received : null;
  }

  marked(name) {
    return {plain: this.square ? state.query : state.key, looks: this.square ? state.query : null, looked: state.key}[name] ?? null;
  }

  paint(panel) {
    const values = this.values(panel.name), {canvas} = panel, {rows, columns, first} = this.picture;
    panel.caption.textContent = PANELS.find((each) => each.name === panel.name).title(state);
    canvas.setAttribute("aria-label", `${panel.caption.textContent}; arrow keys select a patch`);
    const most = values === null ? 0 : highest(values.subarray(first, first + rows * columns));
    draw(canvas, this.picture, values, {most, marked: this.marked(panel.name), cover: state.cover / 100, side: SIDE});
    panel.most.textContent = values === null ? `${rows} × ${columns} patches` : `brightest ${shown(most)}`;
    panel.extra.replaceChildren(...this.outside(panel, values, most));
  }

  // Tokens that are not patches, such as a class token.
  outside(panel, values, most) {
    const {rows, columns, first} = this.picture, list = this.texts.keys, paint = painterOf(state.scale), made = [];
    for (let token = 0; token < list.length && made.length < 24; token++) {
      if (token >= first && token < first + rows * columns) continue;
      const chip = element("button", {type: "button", class: "chip", dir: "auto", text: `${readable(list[token])}${values === null ? "" : ` ${shown(values[token], 3)}`}`, onclick: () => panel.choose(token)});
      if (values !== null) chip.style.borderColor = css(paint(values[token] / (most || 1)));
      if (token === this.marked(panel.name)) chip.setAttribute("aria-current", "true");
      made.push(chip);
    }
    return made;
  }

  // The weights of the selected query in every head of the run.
  async heads() {
    const {layer: place, query} = state, run = this.model.layers[place].run, made = [];
    const paint = [];
    for (const at of this.model.layersOf(run)) {
      const layer = this.model.layers[at];
      if (layer.image !== this.layer.image || layer.q_len !== this.layer.q_len) continue;
      for (const [head, record] of layer.heads.entries()) {
        const canvas = element("canvas", {"aria-hidden": "true"}), label = `${this.model.nameOf(at)}, head ${record.head}`;
        made.push(element("button", {type: "button", class: "thumb", title: label, "aria-label": label, "aria-pressed": String(at === state.layer && head === state.head), onclick: () => change({layer: at, head})},
          canvas, element("span", {class: "number", text: `${this.model.layersOf(run).indexOf(at)} · ${record.head}`})));
        paint.push([canvas, await this.model.head(at, head)]);
      }
    }
    if (query !== state.query || place !== state.layer) return;
    const {rows, columns, first} = this.picture;
    for (const [canvas, numbers] of paint) {
      const values = numbers.row(query), most = highest(values.subarray(first, first + rows * columns));
      draw(canvas, this.picture, values, {most, marked: this.square ? query : null, cover: state.cover / 100, side: SMALL});
    }
    byId("picture-heads").replaceChildren(...made);
  }

  at(event, canvas) {
    const {rows, columns, first} = this.picture, box = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns), row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    return row >= 0 && row < rows && column >= 0 && column < columns ? first + row * columns + column : null;
  }

  key(event, chooses, choose) {
    const {rows, columns, first} = this.picture, here = state[chooses ?? (this.square ? "query" : "key")] - first;
    const row = Math.floor(here / columns), column = here - row * columns;
    const [down, across] = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key] ?? [];
    if (down === undefined) return;
    event.preventDefault();
    const to = [Math.min(rows - 1, Math.max(0, row + down)), Math.min(columns - 1, Math.max(0, column + across))];
    choose(first + to[0] * columns + to[1]);
  }

  name(token) {
    const {columns, first, rows} = this.picture, place = token - first;
    const where = place >= 0 && place < rows * columns ? `, row ${Math.floor(place / columns)}, column ${place % columns}` : "";
    return `${token} “${readable(this.texts.keys[token])}”${where}`;
  }

  hover(panel, token) {
    if (token === null) return this.say();
    const {numbers} = this, selected = this.square ? state.query : null;
    const said = {
      plain: () => `Token ${this.name(token)}`,
      looks: () => `Query ${state.query} → key ${this.name(token)}: weight ${shown(numbers.weight(state.query, token), 5)}`,
      looked: () => `Query ${this.name(token)} → key ${state.key}: weight ${shown(numbers.weight(token, state.key), 5)}`,
      received: () => `Key ${this.name(token)} receives ${shown(numbers.profile.received[token], 4)} from all ${numbers.rows} queries`,
    }[panel]();
    byId("picture-note").textContent = `${said}.`;
    for (const each of this.panels.values()) if (!each.figure.hidden) this.outline(each, token === selected ? null : token);
  }

  // Outlines the same patch in every panel.
  outline(panel, token) {
    if (panel.hovered === token) return;
    panel.hovered = token;
    const values = this.values(panel.name), {first, rows, columns} = this.picture;
    const most = values === null ? 0 : highest(values.subarray(first, first + rows * columns));
    draw(panel.canvas, this.picture, values, {most, marked: this.marked(panel.name), also: token, cover: state.cover / 100, side: SIDE});
  }

  say() {
    for (const panel of this.panels.values()) this.outline(panel, null);
    byId("picture-note").textContent = `Query ${this.square ? this.name(state.query) : state.query}, key ${this.name(state.key)}: weight ${shown(this.numbers.weight(state.query, state.key), 5)}.`;
  }

  svg() {
    const panels = [...this.panels.values()].filter((panel) => !panel.figure.hidden), width = panels.length * (SIDE + GAP) + GAP;
    const tall = panels[0].canvas.height * SIDE / panels[0].canvas.width, height = HEAD + tall + 34;
    const svg = drawn("svg", {xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`}, drawn("rect", {width, height, fill: themed("--card")}));
    panels.forEach((panel, at) => {
      const x = GAP + at * (SIDE + GAP), style = {x, "font-size": 12, "font-family": "sans-serif", fill: themed("--text")};
      svg.append(drawn("text", {...style, y: 26, text: panel.caption.textContent}),
        drawn("image", {x, y: HEAD, width: SIDE, height: tall, href: panel.canvas.toDataURL("image/png")}),
        drawn("text", {...style, y: HEAD + tall + 18, text: panel.most.textContent}));
    });
    return svg;
  }

  csv() {
    const {rows, columns, first} = this.picture, [looks, looked, received] = ["looks", "looked", "received"].map((name) => this.values(name));
    const made = [["token", "row", "column", `weight from query ${state.query}`, `weight on key ${state.key}`, "received"]];
    for (let token = 0; token < this.numbers.columns; token++) {
      const place = token - first, patch = place >= 0 && place < rows * columns;
      made.push([token, patch ? Math.floor(place / columns) : "", patch ? place % columns : "", looks[token], this.square ? looked[token] : "", received[token]]);
    }
    return made;
  }
}

function highest(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return most;
}

// The image with a colour over each patch, and a frame around the selected patch.
function draw(canvas, picture, values, {most, marked, also = null, cover, side}) {
  const {rows, columns, first} = picture, ratio = devicePixelRatio || 1;
  const cell = Math.max(1, Math.round((side * ratio) / columns)), width = cell * columns;
  const tall = Math.max(1, Math.round((width * picture.canvas.height) / picture.canvas.width / rows)), height = tall * rows;
  Object.assign(canvas, {width, height});
  const context = canvas.getContext("2d"), paint = painterOf(state.scale);
  context.imageSmoothingEnabled = picture.canvas.width > 4 * columns;
  // The image is drawn in grey, as colours under colours are indistinguishable.
  context.drawImage(values === null ? picture.canvas : picture.grey, 0, 0, width, height);
  if (values !== null) {
    context.globalAlpha = cover;
    for (let patch = 0; patch < rows * columns; patch++) {
      const value = values[first + patch];
      context.fillStyle = css(paint(Number.isNaN(value) ? NaN : value / (most || 1)));
      context.fillRect((patch % columns) * cell, Math.floor(patch / columns) * tall, cell, tall);
    }
    context.globalAlpha = 1;
  }
  for (const [token, colour] of [[also, "--text"], [marked, "--mark"]]) {
    if (token === null || token < first || token >= first + rows * columns) continue;
    const x = ((token - first) % columns) * cell, y = Math.floor((token - first) / columns) * tall, thick = Math.max(2, Math.round(1.5 * ratio));
    context.lineWidth = 2 * thick;
    context.strokeStyle = themed("--card");
    context.strokeRect(x, y, cell, tall);
    context.lineWidth = thick;
    context.strokeStyle = themed(colour);
    context.strokeRect(x, y, cell, tall);
  }
}
