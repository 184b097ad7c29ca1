// Along the text: attention received by each key, entropy and distance of each query.
import {themed} from "./colours.js";
import {byId, drawn, readable, shown} from "./dom.js";
import {change, state} from "./state.js";

const CHARTS = [
  {name: "received", title: "attention received by each key", axis: "key"},
  {name: "entropy", title: "entropy of each query, nats", axis: "query"},
  {name: "distance", title: "mean distance of each query, tokens", axis: "query"},
  {name: "first", title: "weight of each query on the first key", axis: "query"},
];
const WIDTH = 900, HEIGHT = 130, LEFT = 62, RIGHT = 12, HEAD = 26, GAP = 18;

export class ProfileView {
  constructor() {
    const box = byId("profile");
    box.addEventListener("click", (event) => this.choose(event));
    box.addEventListener("pointermove", (event) => this.hover(event));
    box.addEventListener("keydown", (event) => {
      const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50, Home: -Infinity, End: Infinity}[event.key];
      if (step === undefined) return;
      event.preventDefault();
      change({query: Math.max(0, Math.min(this.numbers.rows - 1, state.query + step))});
    });
  }

  render({numbers, texts}) {
    Object.assign(this, {numbers, texts});
    byId("profile").replaceChildren(this.svg());
    this.say(state.query);
  }

  svg() {
    const height = CHARTS.length * (HEIGHT + HEAD + GAP);
    const svg = drawn("svg", {xmlns: "http://www.w3.org/2000/svg", width: WIDTH, height, viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": "Profile of this head along the text"});
    svg.append(drawn("rect", {width: WIDTH, height, fill: themed("--card")}));
    CHARTS.forEach((chart, at) => svg.append(this.chart(chart, at * (HEIGHT + HEAD + GAP))));
    return svg;
  }

  chart({name, title, axis}, top) {
    const values = this.numbers.profile[name], most = highest(values) || 1, inner = WIDTH - LEFT - RIGHT;
    const x = (place) => LEFT + ((place + 0.5) / values.length) * inner;
    const y = (value) => top + HEAD + HEIGHT * (1 - value / most);
    const style = {"font-size": 12, "font-family": "system-ui, sans-serif", fill: themed("--soft")};
    const group = drawn("g", {"data-chart": name, "data-axis": axis});
    group.append(
      drawn("text", {...style, x: LEFT, y: top + 16, fill: themed("--text"), "font-weight": 600, text: title}),
      drawn("text", {...style, x: LEFT - 6, y: y(most) + 9, "text-anchor": "end", text: shown(most, 2)}),
      drawn("text", {...style, x: LEFT - 6, y: y(0), "text-anchor": "end", text: "0"}),
      drawn("rect", {x: LEFT, y: top + HEAD, width: inner, height: HEIGHT, fill: "none", stroke: themed("--line")}),
    );
    const parts = values.length <= inner ? bars(values, x, y, inner) : band(values, y, inner);
    group.append(drawn("path", {d: parts, fill: themed("--accent"), "fill-opacity": 0.85}));
    const chosen = Math.min(state[axis], values.length - 1);
    group.append(drawn("line", {x1: x(chosen), x2: x(chosen), y1: top + HEAD, y2: top + HEAD + HEIGHT, stroke: themed("--mark"), "stroke-width": 1.5}));
    return group;
  }

  place(event) {
    const svg = byId("profile").querySelector("svg"), box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH, y = ((event.clientY - box.top) / box.height) * Number(svg.getAttribute("height"));
    const chart = CHARTS[Math.floor(y / (HEIGHT + HEAD + GAP))];
    if (!chart) return null;
    const count = this.numbers.profile[chart.name].length, at = Math.floor(((x - LEFT) / (WIDTH - LEFT - RIGHT)) * count);
    return at >= 0 && at < count ? {chart, at} : null;
  }

  choose(event) {
    const place = this.place(event);
    if (place) change({[place.chart.axis]: place.at});
  }

  hover(event) {
    const place = this.place(event);
    if (place) this.say(place.at);
  }

  say(at) {
    const {profile} = this.numbers, said = [];
    if (at < profile.received.length) said.push(`Key ${at} “${readable(this.texts.keys[at])}” receives ${shown(profile.received[at], 3)}`);
    if (at < profile.entropy.length) said.push(`query ${at} “${readable(this.texts.queries[at])}”: entropy ${shown(profile.entropy[at], 3)} nats, distance ${shown(profile.distance[at], 1)} tokens, ${shown(profile.first[at], 3)} on the first key`);
    byId("profile-note").textContent = `${said.join("; ")}.`;
  }

  csv() {
    const {profile} = this.numbers, {queries, keys} = this.texts, rows = [["place", "key token", "received", "query token", "entropy", "distance", "first"]];
    for (let at = 0; at < Math.max(queries.length, keys.length); at++) {
      rows.push([at, keys[at] ?? "", profile.received[at] ?? "", queries[at] ?? "", profile.entropy[at] ?? "", profile.distance[at] ?? "", profile.first[at] ?? ""]);
    }
    return rows;
  }
}

function highest(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return most;
}

function bars(values, x, y, inner) {
  const half = Math.max(0.5, (0.8 * inner) / values.length / 2), floor = y(0).toFixed(1);
  return Array.from(values, (value, at) => {
    const left = (x(at) - half).toFixed(1), right = (x(at) + half).toFixed(1), high = y(value || 0).toFixed(1);
    return `M${left} ${floor}V${high}H${right}V${floor}Z`;
  }).join("");
}

// If there are more values than pixels, the largest and the smallest value of each pixel.
function band(values, y, inner) {
  const up = [], down = [];
  for (let pixel = 0; pixel < inner; pixel++) {
    const from = Math.floor((pixel * values.length) / inner), to = Math.floor(((pixel + 1) * values.length) / inner);
    let low = Infinity, high = -Infinity;
    for (let at = from; at < to; at++) {
      low = Math.min(low, values[at]);
      high = Math.max(high, values[at]);
    }
    up.push(`${LEFT + pixel} ${y(high).toFixed(1)}`);
    down.push(`${LEFT + pixel} ${(y(low) + 0.8).toFixed(1)}`);
  }
  return `M${up.join("L")}L${down.reverse().join("L")}Z`;
}
