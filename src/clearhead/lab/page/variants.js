// The tab "Variants": a mask and score rules, selected or typed, and their effect on a head.
import {painterOf, themed} from "./colours.js";
import {element} from "./dom.js";
import {Editor} from "./variants_editor.js";
import {SquareMap} from "./variants_map.js";
import {backends, headCharts, maskFacts, placeText, ruleCharts} from "./variants_panels.js";
import {pythonCard, readNumber, settled} from "./worked_dom.js";

const WAIT = 140;
const OWN = "Your own";
const LENGTHS = [12, 16, 24, 32, 48, 64];
const FIRST_PLACE = [9, 6];
const LEVELS = 160;

export async function open(root, ask) {
  const menu = await ask("variants-menu", {});
  const variants = new Variants(root, ask, menu);
  await variants.load(menu.starts[1]);
}

class Variants {
  constructor(root, ask, menu) {
    Object.assign(this, {root, ask, menu, chosen: null, answer: null});
    this.later = settled(WAIT, () => this.compute());
    const changed = () => this.changed(), choose = (place) => this.choose(place);
    this.mask = new Editor({what: "mask", label: "masks", kinds: menu.masks, most: menu.parts, joined: true, changed});
    this.rules = new Editor({what: "rule", label: "score rules", kinds: menu.rules, most: menu.parts, changed});
    this.maps = {
      mask: new SquareMap({label: "the mask", choose}),
      before: new SquareMap({label: "weights before", labels: true, choose}),
      after: new SquareMap({label: "weights after", labels: true, choose}),
    };
    this.parts = this.made(changed);
    this.lay();
    const repaint = () => this.answer && this.paint();
    addEventListener("theme", repaint);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  }

  made(changed) {
    const {menu} = this, hint = (tag) => element(tag, {class: "hint"});
    const select = (name, options, choose) => element("select", {id: `variants-${name}`, onchange: choose},
      ...options.map((option) => element("option", {value: option, text: String(option)})));
    const made = {
      start: select("start", [...menu.starts.map(({name}) => name), OWN], (event) => this.begin(event.target.value)),
      head: select("head", menu.heads.map(({name}) => name), changed), tokens: select("tokens", LENGTHS, changed),
      temperature: element("input", {
        id: "variants-temperature", type: "text", class: "code short", inputmode: "decimal", autocomplete: "off",
        oninput: changed,
      }),
      source: hint("p"), headSays: hint("p"), alert: element("p", {role: "alert"}),
      facts: element("dl", {class: "facts"}), readout: element("p", {class: "readout", role: "status"}),
      charts: element("div", {class: "charts"}), curves: element("div", {class: "charts"}),
      backend: element("div"), stage: element("div", {class: "stage"}),
      scale: element("canvas", {width: LEVELS, height: 1, "aria-hidden": "true"}),
      python: pythonCard("As Python", "The same variant with the public API."),
    };
    made.tokens.value = String(menu.tokens.start);
    return made;
  }

  lay() {
    const {parts, maps} = this;
    const card = (title, ...children) => element("section", {class: "card", "aria-label": title},
      element("h2", {text: title}), ...children);
    const field = (label, control, ...more) => element("div", {class: "field"},
      element("label", {for: control.id, text: label}), element("div", {class: "row"}, control, ...more));
    const figure = (title, map) => element("figure", {class: "map"}, element("figcaption", {text: title}), map.canvas);
    const divided = element("span", {class: "hint", text: "divisor of the scores"});
    const side = element("div", {class: "stage side"},
      card("Variant", field("Start from", parts.start), parts.source),
      card("Mask: which keys a query may see", this.mask.root),
      card("Rules: what happens to scores", field("temperature", parts.temperature, divided), this.rules.root),
      card("Tried on", field("Head", parts.head), parts.headSays, field("Tokens", parts.tokens)));
    this.curvesCard = card("The rules by themselves", parts.curves);
    parts.stage.append(
      card("The mask's shape",
        element("div", {class: "shape-of"}, figure("rows are queries, columns are keys", maps.mask), parts.facts)),
      card("Effect on the head",
        element("div", {class: "maps"}, figure("weights before: every key, no rules", maps.before),
          figure("weights after: this mask and these rules", maps.after)),
        element("p", {class: "hint scale"}, "weight 0 ", parts.scale, " 1, by its square root; ",
          element("span", {class: "swatch"}), " forbidden"),
        parts.readout, parts.charts),
      this.curvesCard, card("Which backend runs it", parts.backend), parts.python.card);
    this.root.classList.add("variants");
    this.root.replaceChildren(parts.alert, element("div", {class: "columns"}, side, parts.stage));
  }

  begin(name) {
    const start = this.menu.starts.find((each) => each.name === name);
    if (start) this.load(start);
  }

  async load(start) {
    this.mask.load(start.mask);
    this.rules.load(start.rules);
    this.parts.head.value = start.head;
    this.parts.temperature.value = "1";
    this.parts.start.value = start.name;
    this.parts.source.textContent = `${start.source}.`;
    await this.compute();
  }

  changed() {
    this.parts.start.value = OWN;
    this.parts.source.textContent = "";
    this.later();
  }

  asked() {
    const {head, tokens, temperature} = this.parts;
    return {
      mask: this.mask.parts, rules: this.rules.parts, head: head.value, tokens: Number(tokens.value),
      temperature: readNumber(temperature.value, Infinity) ?? temperature.value,
    };
  }

  async compute() {
    this.asking?.abort();
    const asking = this.asking = new AbortController();
    this.root.setAttribute("aria-busy", "true");
    try {
      const answer = await this.ask("variants", this.asked(), {signal: asking.signal});
      if (asking === this.asking) this.take(answer, "");
    } catch (failure) {
      if (failure.name !== "AbortError" && asking === this.asking) this.take({}, failure.message);
    }
    if (asking !== this.asking) return;
    this.root.removeAttribute("aria-busy");
    this.root.dataset.shown = String(Number(this.root.dataset.shown ?? 0) + 1);
  }

  // Shows an answer, or an error; then the previous answer remains, dimmed.
  take(answer, message) {
    this.parts.alert.textContent = message;
    for (const editor of [this.mask, this.rules]) editor.refuse(answer.refused ?? null);
    const good = message === "" && !answer.refused;
    this.parts.stage.classList.toggle("stale", !good);
    if (good) this.show(answer);
  }

  show(answer) {
    this.answer = answer;
    const {parts} = this, head = this.menu.heads.find(({name}) => name === parts.head.value);
    parts.headSays.textContent = `It ${head.says}.`;
    parts.facts.replaceChildren(...maskFacts(answer.mask));
    parts.charts.replaceChildren(...headCharts(answer));
    this.curvesCard.hidden = answer.curve.relative === null;
    parts.curves.replaceChildren(...(this.curvesCard.hidden ? [] : ruleCharts(answer.curve)));
    parts.backend.replaceChildren(...backends(answer.dispatch));
    parts.python.show(answer.python);
    this.paint();
    const last = answer.words.length - 1;
    this.choose((this.chosen ?? FIRST_PLACE).map((place) => Math.min(place, last)));
  }

  paint() {
    const {maps, answer: {words, mask, before, after}} = this;
    const allowed = mask.allowed.map((row) => [...row].map((may) => (may === "1" ? 1 : null)));
    const weights = ({weights: rows, scores}) =>
      rows.map((row, query) => row.map((weight, key) => (scores[query][key] === null ? null : weight)));
    const percent = `${(100 * mask.fraction).toFixed(1)} %`;
    maps.mask.show(allowed, words, {
      tiles: mask.tiles.side, colour: themed("--accent"), label: `the mask: ${percent} of places allowed`,
    });
    maps.before.show(weights(before), words, {label: "weights of the head without mask and rules"});
    maps.after.show(weights(after), words, {label: "weights of the head with mask and rules"});
    const pen = this.parts.scale.getContext("2d"), picture = pen.createImageData(LEVELS, 1), paint = painterOf("root");
    new Uint32Array(picture.data.buffer).set(Array.from({length: LEVELS}, (_, at) => paint(at / (LEVELS - 1))));
    pen.putImageData(picture, 0, 0);
  }

  choose(place) {
    this.chosen = place;
    for (const map of Object.values(this.maps)) map.choosePlace(place);
    this.parts.readout.textContent = placeText(this.answer, place);
  }
}
