// The page: reads the data, links the views with each other, handles keys and buttons.
import {Damaged, checkPage} from "./check.js";
import {css, inkOn, painterOf} from "./colours.js";
import {CompareView} from "./compare.js";
import {byId, direction, element, joiner, readable} from "./dom.js";
import {csvOf, pngOf, saveBlob, saveText, svgText} from "./export.js";
import {Grid} from "./grid.js";
import {LinesView} from "./lines.js";
import {MapView, describe} from "./map.js";
import {Model} from "./model.js";
import {PictureView} from "./picture.js";
import {ProfileView} from "./profile.js";
import {RunsView} from "./runs.js";
import {change, onChange, startState, state} from "./state.js";
import {TokenView} from "./token.js";

const VIEWS = ["map", "lines", "token", "profile", "compare", "picture"];
const AROUND = 150;

class App {
  constructor(page) {
    this.page = page;
    this.model = new Model(page);
    startState(beginning(page), (wanted) => this.possible(wanted));
    byId("title").textContent = page.title;
    document.title = page.title;
    byId("made").textContent = `Made by ${page.made_by}`;
    this.grid = new Grid(this.model);
    this.runs = new RunsView(this.model);
    this.views = {
      map: new MapView(), lines: new LinesView(), token: new TokenView(), profile: new ProfileView(),
      compare: new CompareView(this.model), picture: new PictureView(this.model),
    };
    byId("scale").addEventListener("change", (event) => change({scale: event.target.value}));
    this.tabs();
    this.buttons();
    onChange((changed) => this.update(changed));
    byId("main").hidden = false;
  }

  // The requested state, limited to what the page has.
  possible(wanted) {
    const within = (value, count) => Math.min(Math.max(0, Math.round(value) || 0), count - 1);
    const layer = within(wanted.layer, this.model.layers.length), record = this.model.layers[layer];
    const view = VIEWS.includes(wanted.view) && (wanted.view !== "picture" || record.image !== null) ? wanted.view : "map";
    return {
      ...wanted, layer, head: within(wanted.head, record.heads.length), query: within(wanted.query, record.q_len),
      key: within(wanted.key, record.k_len), view,
      scale: ["root", "linear", "log"].includes(wanted.scale) ? wanted.scale : "root",
      sort: wanted.sort === "layer" || wanted.sort in record.heads[0].scores ? wanted.sort : "layer",
      edges: within(wanted.edges - 1, 10) + 1, least: Number.isFinite(wanted.least) ? wanted.least : -1e9,
      cover: within(wanted.cover, 101), find: String(wanted.find).slice(0, 80),
    };
  }

  tabs() {
    const tabs = VIEWS.map((name) => byId(`tab-${name}`));
    tabs.forEach((tab, at) => {
      tab.addEventListener("click", () => change({view: VIEWS[at]}));
      tab.addEventListener("keydown", (event) => {
        const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
        if (!step) return;
        let next = at;
        do next = (next + step + VIEWS.length) % VIEWS.length; while (tabs[next].hidden);
        change({view: VIEWS[next]});
        tabs[next].focus();
      });
    });
  }

  buttons() {
    const start = this.page.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "attention";
    saveButtons("save", () => `${start}-${state.view}`, () => this.views[state.view]);
    saveButtons("grid", () => `${start}-heads`, () => this.grid);
    byId("theme").addEventListener("click", () => {
      const root = document.documentElement, next = {undefined: "light", light: "dark", dark: undefined}[root.dataset.theme];
      if (next) root.dataset.theme = next;
      else delete root.dataset.theme;
      byId("theme").textContent = `Theme: ${next ?? "system"}`;
      this.update(new Set(["theme"]));
    });
    for (const [moment, print] of [["beforeprint", true], ["afterprint", false]]) {
      addEventListener(moment, () => {
        document.documentElement.toggleAttribute("data-print", print);
        this.update(new Set(["theme"]));
      });
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.update(new Set(["theme"])));
  }

  async update(changed) {
    try {
      await this.shown(changed);
    } catch (failure) {
      if (!(failure instanceof Damaged)) throw failure;
      say(failure);
    }
  }

  // If several changes arrive while a head is decoded, the last one is shown.
  async shown(changed) {
    const {layer, head} = state;
    const numbers = await this.model.head(layer, head);
    if (layer !== state.layer || head !== state.head) return;
    const texts = this.model.texts(layer);
    this.numbers = numbers;
    byId("text-card").hidden = byId("readout").hidden = state.view === "picture";
    byId("tab-picture").hidden = this.model.layers[layer].image === null;
    for (const view of VIEWS) {
      const active = view === state.view;
      byId(`panel-${view}`).hidden = !active;
      byId(`tab-${view}`).setAttribute("aria-selected", String(active));
      byId(`tab-${view}`).tabIndex = active ? 0 : -1;
    }
    byId("scale").value = state.scale;
    this.runs.update();
    this.grid.update(changed);
    const record = this.model.layers[layer];
    byId("head-title").textContent = `${record.name || `layer ${layer}`} · head ${numbers.number}`;
    byId("head-facts").textContent = [`${numbers.rows} × ${numbers.columns}`, ...record.says].join(" · ");
    await this.views[state.view].render({numbers, texts, layer: record}, changed);
    byId("readout").textContent = `${describe(numbers, texts, state.query, state.key)}.`;
    if (["layer", "head", "query", "key", "theme", "scale"].some((name) => changed.has(name))) this.reading(numbers, texts);
    if (!byId("main").dataset.ready) performance.mark("ready");
    byId("main").dataset.ready = "yes";
  }

  // The running text; each token's background shows the selected query's weight on it.
  reading(numbers, texts) {
    const paint = painterOf(state.scale), list = texts.keys, made = [];
    const from = Math.max(0, Math.min(state.key, list.length) - AROUND), to = Math.min(list.length, from + 2 * AROUND);
    if (from > 0) made.push("… ");
    if (this.joined?.list !== list) this.joined = {list, at: joiner(list)};
    byId("reading").dir = direction(list);
    for (let column = from; column < to; column++) {
      const {joined, shown: text} = this.joined.at(list[column]);
      if (!joined && column > from) made.push(" ");
      const allowed = numbers.allowed(state.query, column), weight = numbers.weight(state.query, column);
      const word = element("span", {class: `word${allowed ? "" : " forbidden"}${column === state.key ? " key" : ""}`, dir: "auto", "data-key": column, text});
      if (allowed) {
        word.style.background = css(paint(weight));
        word.style.color = inkOn(paint(weight));
      }
      word.title = `${column}: ${readable(list[column])}`;
      made.push(word);
    }
    if (to < list.length) made.push(" …");
    byId("reading").replaceChildren(...made);
    const same = texts.queries === texts.keys;
    byId("reading-hint").textContent = `Weight of query ${state.query} “${readable(texts.queries[state.query])}” on each key.${same ? " Select a token to make it the query." : ""}`;
    byId("reading").onclick = (event) => {
      const key = event.target.closest("[data-key]");
      if (key) change(same ? {query: Number(key.dataset.key)} : {key: Number(key.dataset.key)});
    };
  }
}

// The start of the first run; else the last token as query and key, which most masks allow.
function beginning(page) {
  const {start} = page.runs[0], layer = start?.layer ?? page.layers.findIndex((each) => each.run === 0), record = page.layers[layer];
  const query = start?.query ?? record.q_len - 1;
  return {
    layer, head: start?.head ?? 0, query, key: Math.min(record.first + query, record.k_len - 1),
    view: start && record.image !== null ? "picture" : "map", scale: record.heads[0].overview ? "log" : "root",
  };
}

function saveButtons(group, name, view) {
  byId(`${group}-csv`).addEventListener("click", () => saveText(`${name()}.csv`, "text/csv", csvOf(view().csv())));
  byId(`${group}-svg`).addEventListener("click", () => saveText(`${name()}.svg`, "image/svg+xml", svgText(view().svg())));
  byId(`${group}-png`).addEventListener("click", async () => {
    const picture = await (view().png ? view().png() : pngOf(view().svg()));
    saveBlob(`${name()}.png`, picture);
  });
}

function say(failure) {
  const alert = byId("alert");
  alert.textContent = `This page cannot be shown: ${failure.message}. Make it again with the command that wrote it.`;
  alert.hidden = false;
  byId("main").hidden = true;
}

try {
  const app = new App(checkPage(byId("data").textContent));
  globalThis.clearhead = {app, state, change, model: app.model};
  app.update(new Set(["layer", "head", "query", "key"]));
} catch (failure) {
  if (!(failure instanceof Damaged)) throw failure;
  say(failure);
}
