// The shell: three tabs, one visible at a time. The URL fragment names it, and its module is loaded on first use.
import {ask} from "./client.js";

const TABS = ["worked", "model", "variants"];
const byId = (id) => document.getElementById(id);
const opened = new Map();

function named() {
  const [name] = location.hash.slice(1).split("&");
  return TABS.includes(name) ? name : null;
}

async function show(name) {
  for (const each of TABS) {
    byId(`tab-${each}`).setAttribute("aria-selected", String(each === name));
    byId(`tab-${each}`).tabIndex = each === name ? 0 : -1;
    byId(`panel-${each}`).hidden = each !== name;
  }
  if (opened.has(name)) return;
  const root = byId(`panel-${name}`);
  opened.set(name, root);
  try {
    const module = await import(`./${name}.js`);
    await module.open(root, ask);
    root.dataset.ready = "";
  } catch (failure) {
    opened.delete(name);
    const said = document.createElement("p");
    said.setAttribute("role", "alert");
    said.textContent = `This tab could not be opened: ${failure.message}`;
    root.replaceChildren(said);
  }
}

function go(name) {
  history.replaceState(null, "", `#${name}`);
  show(name);
}

TABS.forEach((name, at) => {
  const tab = byId(`tab-${name}`);
  tab.addEventListener("click", () => go(name));
  tab.addEventListener("keydown", (event) => {
    const next = {
      ArrowRight: at + 1, ArrowLeft: at - 1 + TABS.length, Home: 0, End: TABS.length - 1,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const other = TABS[next % TABS.length];
    go(other);
    byId(`tab-${other}`).focus();
  });
});

byId("theme").addEventListener("click", () => {
  const root = document.documentElement, next = {undefined: "light", light: "dark", dark: undefined}[root.dataset.theme];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  byId("theme").textContent = `Theme: ${next ?? "system"}`;
  // Tabs that draw colours on a canvas listen to this.
  dispatchEvent(new Event("theme"));
});

addEventListener("hashchange", () => { if (named()) show(named()); });
show(named() ?? "worked");
