// The state of all views. Views read it and are notified of changes; the URL fragment stores it.

export const state = {
  view: "map", layer: 0, head: 0, query: 0, key: 0, other: "", sort: "layer", least: -1e9, scale: "root", edges: 3,
  zoom: "", cover: 75, find: "",
};
const DEFAULTS = {...state};
const NUMBERS = ["layer", "head", "query", "key", "least", "edges", "cover"];
const listeners = [];
let limit = (wanted) => wanted;

export function onChange(listener) {
  listeners.push(listener);
}

// Change some of the state and notify the listeners of what changed.
export function change(wanted) {
  const next = limit({...state, ...wanted});
  const changed = new Set(Object.keys(next).filter((name) => next[name] !== state[name]));
  if (changed.size === 0) return;
  Object.assign(state, next);
  writeFragment();
  for (const listener of listeners) listener(changed);
}

let waiting = 0;

function writeFragment() {
  // Browsers limit how often a URL may change.
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    const parts = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
    const text = parts.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
    try {
      history.replaceState(null, "", `#${text}`);
    } catch {
      // A frame without its own URL.
    }
  }, 120);
}

function readFragment() {
  const read = {...DEFAULTS};
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    if (!NUMBERS.includes(name)) read[name] = value;
    else if (Number.isFinite(Number(value))) read[name] = Number(value);
  }
  return read;
}

// Start from the fragment, with defaults from ``initial``; ``limits`` clips values that the page does not have.
export function startState(initial, limits) {
  limit = limits;
  Object.assign(DEFAULTS, initial);
  Object.assign(state, limit(readFragment()));
  addEventListener("hashchange", () => change(readFragment()));
}
