// The shell: three rooms, one open at a time; the address's fragment names it, and a room's module is loaded when it is
// first opened.
import {ask} from "./client.js";

const ROOMS = ["worked", "model", "variants"];
const byId = (id) => document.getElementById(id);
const opened = new Map();

function named() {
  const [room] = location.hash.slice(1).split("&");
  return ROOMS.includes(room) ? room : null;
}

async function show(room) {
  for (const each of ROOMS) {
    byId(`tab-${each}`).setAttribute("aria-selected", String(each === room));
    byId(`tab-${each}`).tabIndex = each === room ? 0 : -1;
    byId(`room-${each}`).hidden = each !== room;
  }
  if (opened.has(room)) return;
  const root = byId(`room-${room}`);
  opened.set(room, root);
  try {
    const module = await import(`./${room}.js`);
    await module.open(root, ask);
    root.dataset.ready = "";
  } catch (failure) {
    opened.delete(room);
    const said = document.createElement("p");
    said.setAttribute("role", "alert");
    said.textContent = `This room could not be opened: ${failure.message}`;
    root.replaceChildren(said);
  }
}

function go(room) {
  history.replaceState(null, "", `#${room}`);
  show(room);
}

ROOMS.forEach((room, at) => {
  const tab = byId(`tab-${room}`);
  tab.addEventListener("click", () => go(room));
  tab.addEventListener("keydown", (event) => {
    const next = {
      ArrowRight: at + 1, ArrowLeft: at - 1 + ROOMS.length, Home: 0, End: ROOMS.length - 1,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const other = ROOMS[next % ROOMS.length];
    go(other);
    byId(`tab-${other}`).focus();
  });
});

byId("theme").addEventListener("click", () => {
  const root = document.documentElement, next = {undefined: "light", light: "dark", dark: undefined}[root.dataset.theme];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  byId("theme").textContent = `Theme: ${next ?? "system"}`;
  // Rooms that draw their colours listen to this.
  dispatchEvent(new Event("theme"));
});

addEventListener("hashchange", () => { if (named()) show(named()); });
show(named() ?? "worked");
