// Checks the page's data and decodes its arrays. The format is described in schema.py.

export class Damaged extends Error {}

const BYTES = {f32: 4, i32: 4, i16: 2, u16: 2, u8: 1};
const ARRAYS = {f32: Float32Array, i32: Int32Array, i16: Int16Array, u16: Uint16Array, u8: Uint8Array};
const LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%,()*+-;[=]?@^_`{|}~";
const READERS = {1: checkVersion1, 2: checkVersion2};

function must(good, what) {
  if (!good) throw new Damaged(what);
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isWhole = (value) => Number.isInteger(value) && value >= 0;

// The checked data of a page; throws Damaged with a sentence for the reader.
export function checkPage(text) {
  let page;
  try {
    page = JSON.parse(text);
  } catch {
    throw new Damaged("its data is not complete JSON");
  }
  must(isObject(page) && page.format === "clearhead-view", "its data is not of the format clearhead-view");
  const reader = Object.hasOwn(READERS, page.version) ? READERS[page.version] : null;
  must(reader, `its data has version ${JSON.stringify(page.version)?.slice(0, 20)}, and this page reads versions 1 and 2`);
  reader(page);
  return page;
}

// Converts version 1 to version 2: one run, no images, facts or values.
function checkVersion1(page) {
  must(Array.isArray(page.layers), "layers is not a list");
  Object.assign(page, {images: [], facts: [], runs: [{name: "", says: ""}]});
  for (const layer of page.layers) {
    must(isObject(layer), "layers contains something else than a layer");
    Object.assign(layer, {run: 0, image: null, value_dim: 0, norms: [], values: []});
  }
  checkVersion2(page);
}

function checkVersion2(page) {
  for (const name of ["title", "made_by"]) must(typeof page[name] === "string", `${name} is not text`);
  for (const name of ["texts", "masks", "layers", "images", "facts", "runs"]) {
    must(Array.isArray(page[name]), `${name} is not a list`);
  }
  page.texts.forEach((texts, at) => {
    must(Array.isArray(texts) && texts.every((text) => typeof text === "string"), `texts[${at}] is not a list of texts`);
  });
  must(page.layers.length > 0, "it has no layer");
  must(page.runs.length > 0, "it has no run");
  page.images.forEach((image, at) => checkImage(image, `images[${at}]`));
  page.facts.forEach((fact, at) => checkTexts(fact, ["label", "value", "note"], `facts[${at}]`));
  page.layers.forEach((layer, at) => checkLayer(layer, `layers[${at}]`, page));
  page.runs.forEach((run, at) => checkRun(run, `runs[${at}]`, page));
}

function checkTexts(one, names, path) {
  must(isObject(one) && names.every((name) => typeof one[name] === "string"), `${path} lacks a text`);
}

function checkRun(run, path, page) {
  checkTexts(run, ["name", "says"], path);
  must(page.layers.some((layer) => layer.run === page.runs.indexOf(run)), `${path} has no layer`);
  const {bars = [], start} = run;
  must(Array.isArray(bars), `${path}.bars is not a list`);
  bars.forEach((bar, at) => {
    checkTexts(bar, ["label"], `${path}.bars[${at}]`);
    must(bar.value >= 0 && bar.value <= 1, `${path}.bars[${at}].value is not a number from 0 to 1`);
  });
  if (start === undefined) return;
  must(isObject(start) && isWhole(start.query) && isObject(page.layers[start.layer]?.heads[start.head]), `${path}.start names no view`);
}

function checkImage(image, path) {
  must(isObject(image) && ["rows", "columns", "first"].every((name) => isWhole(image[name])), `${path} is not a picture`);
  checkArray(image.pixels, null, `${path}.pixels`);
  const {shape} = image.pixels;
  must(shape.length === 3 && [1, 3].includes(shape[2]), `${path}.pixels is not height x width x 1 or 3`);
}

function checkLayer(layer, path, page) {
  must(isObject(layer) && typeof layer.name === "string", `${path} is not a layer`);
  for (const name of ["first", "q_len", "k_len", "head_dim", "value_dim", "num_heads", "run"]) {
    must(isWhole(layer[name]), `${path}.${name} is not a whole number`);
  }
  must(Number.isFinite(layer.scale), `${path}.scale is not a number`);
  must(layer.run < page.runs.length, `${path}.run names no run`);
  must(page.texts[layer.queries]?.length === layer.q_len, `${path}.queries does not name ${layer.q_len} texts`);
  must(page.texts[layer.tokens]?.length === layer.k_len, `${path}.tokens does not name ${layer.k_len} texts`);
  if (layer.image !== null) {
    const image = page.images[layer.image];
    must(isObject(image), `${path}.image names no picture`);
    must(image.first + image.rows * image.columns <= layer.k_len, `${path}.image has patches that are no keys`);
  }
  must(Array.isArray(layer.keys), `${path}.keys is not a list`);
  layer.keys.forEach((key, at) => checkArray(key, [layer.k_len, layer.head_dim], `${path}.keys[${at}]`));
  for (const [name, shape] of [["norms", [layer.k_len]], ["values", [layer.k_len, layer.value_dim]]]) {
    must(Array.isArray(layer[name]) && [0, layer.keys.length].includes(layer[name].length), `${path}.${name} does not fit its keys`);
    layer[name].forEach((array, at) => checkArray(array, shape, `${path}.${name}[${at}]`));
  }
  must(Array.isArray(layer.heads) && layer.heads.length > 0, `${path} has no heads`);
  layer.heads.forEach((head, at) => checkHead(head, `${path}.heads[${at}]`, layer, page));
}

function checkHead(head, path, layer, page) {
  must(isObject(head) && isWhole(head.head), `${path} is not a head`);
  must(isWhole(head.key) && head.key < layer.keys.length, `${path}.key names no keys`);
  checkArray(head.query, [layer.q_len, layer.head_dim], `${path}.query`);
  checkArray(head.lse, [layer.q_len], `${path}.lse`);
  checkBlocks(head.thumb, `${path}.thumb`, layer);
  for (const name of ["table", "fix"]) if (head[name]) checkArray(head[name], [layer.q_len, layer.k_len], `${path}.${name}`);
  if (head.near) {
    must(isObject(head.near), `${path}.near names no weights`);
    checkArray(head.near.counts, [layer.q_len], `${path}.near.counts`);
    checkArray(head.near.places, null, `${path}.near.places`);
    checkArray(head.near.fix, head.near.places.shape, `${path}.near.fix`);
  }
  if (layer.values.length > 0) checkArray(head.rest, [layer.q_len, layer.value_dim], `${path}.rest`);
  if (head.overview) {
    checkBlocks(head.overview, `${path}.overview`, layer);
    for (const name of ["entropy", "distance", "first"]) checkArray(head[name], [layer.q_len], `${path}.${name}`);
    checkArray(head.received, [layer.k_len], `${path}.received`);
  }
  must(Array.isArray(head.rules), `${path}.rules is not a list`);
  head.rules.forEach((rule, at) => {
    must(isObject(rule) && ["softcap", "relative"].includes(rule.kind), `${path}.rules[${at}] is not a rule`);
    if (rule.kind === "relative") checkArray(rule.bias, [layer.q_len + layer.k_len - 1], `${path}.rules[${at}].bias`);
    else must(Number.isFinite(rule.cap), `${path}.rules[${at}].cap is not a number`);
  });
  must(isObject(head.scores) && isObject(head.error), `${path} has no scores`);
  if (head.mask === null) return;
  const mask = page.masks[head.mask];
  must(isObject(mask) && ["runs", "table"].includes(mask.kind), `${path}.mask names no mask`);
  if (mask.kind === "table") checkArray(mask.bits, [layer.q_len, Math.ceil(layer.k_len / 8)], `masks[${head.mask}]`);
  else for (const name of ["start", "stop"]) {
    checkArray(mask[name], null, `masks[${head.mask}].${name}`);
    must(mask[name].shape[0] === layer.q_len, `masks[${head.mask}] does not have ${layer.q_len} rows`);
  }
}

function checkBlocks(blocks, path, layer) {
  must(isObject(blocks) && isWhole(blocks.side) && blocks.side > 0, `${path}.side is not a whole number`);
  checkArray(blocks.cells, [Math.ceil(layer.q_len / blocks.side), Math.ceil(layer.k_len / blocks.side)], path);
}

function checkArray(array, shape, path) {
  must(isObject(array) && Object.hasOwn(BYTES, array.type) && typeof array.data === "string", `${path} is not an array`);
  must(Array.isArray(array.shape) && array.shape.every(isWhole), `${path} has no shape`);
  must(!shape || shape.join() === array.shape.join(), `${path} does not have the shape ${shape?.join(" x ")}`);
  if (array.steps) checkArray(array.steps, [array.shape[0]], `${path}.steps`);
}

// The flat elements of an array, multiplied by its unit or the steps of its rows.
export async function readArray(array, path) {
  const count = array.shape.reduce((product, size) => product * size, 1);
  const bytes = await inflate(array.data, path);
  const width = BYTES[array.type];
  must(bytes.length === count * width, `${path} does not have ${count} elements`);
  const joined = new Uint8Array(bytes.length);
  for (let part = 0; part < width; part++) {
    for (let at = 0, from = part * count; at < count; at++) joined[at * width + part] = bytes[from + at];
  }
  const numbers = new ARRAYS[array.type](joined.buffer);
  if (array.unit !== undefined) return Float32Array.from(numbers, (number) => number * array.unit);
  if (!array.steps) return numbers;
  const steps = await readArray(array.steps, `${path}.steps`);
  const columns = array.shape[1];
  const scaled = new Float32Array(count);
  for (let row = 0, at = 0; row < steps.length; row++) {
    for (const end = at + columns; at < end; at++) scaled[at] = numbers[at] * steps[row];
  }
  return scaled;
}

async function inflate(text, path) {
  const stream = new Blob([letters(text, path)]).stream().pipeThrough(new DecompressionStream("deflate"));
  try {
    return new Uint8Array(await new Response(stream).arrayBuffer());
  } catch {
    throw new Damaged(`${path} is not complete`);
  }
}

const PLACES = new Uint8Array(256).fill(255);
for (let at = 0; at < LETTERS.length; at++) PLACES[LETTERS.charCodeAt(at)] = at;

// Base 85: five characters are four bytes; a shorter last group of n characters is n - 1 bytes.
function letters(text, path) {
  const padding = (5 - (text.length % 5)) % 5;
  const read = new TextEncoder().encode(text + LETTERS[84].repeat(padding));
  must(read.length === text.length + padding, `${path} contains a character that is not base 85`);
  const bytes = new Uint8Array((read.length / 5) * 4);
  let worst = 0;
  for (let at = 0, to = 0; at < read.length; at += 5, to += 4) {
    const a = PLACES[read[at]], b = PLACES[read[at + 1]], c = PLACES[read[at + 2]], d = PLACES[read[at + 3]], e = PLACES[read[at + 4]];
    worst = Math.max(worst, a, b, c, d, e);
    const value = (((a * 85 + b) * 85 + c) * 85 + d) * 85 + e;
    bytes[to] = value / 16777216;
    bytes[to + 1] = value >>> 16;
    bytes[to + 2] = value >>> 8;
    bytes[to + 3] = value;
  }
  must(worst < 85, `${path} contains a character that is not base 85`);
  return bytes.subarray(0, bytes.length - padding);
}
