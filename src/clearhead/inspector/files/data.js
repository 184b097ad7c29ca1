// Reading the page's data. Nothing here touches the document; what is wrong is said in one plain sentence.
const FORMAT = "clearhead-page";
const VERSION = 1;

class Damaged extends Error {}

function need(holds, what) {
  if (!holds) throw new Damaged(what);
}

function isWhole(value, low, high) {
  return Number.isInteger(value) && value >= low && value <= high;
}

function readData(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Damaged("its data is not whole JSON");
  }
  need(data !== null && typeof data === "object" && data.format === FORMAT, `its data is not of the format ${FORMAT}`);
  need(data.version === VERSION, `its data has version ${String(data.version)}, and this page reads version ${VERSION}`);
  const {grid, attention} = data;
  for (const [owner, part, names] of [
    ["grid", grid, ["rows", "columns", "max_value"]],
    ["attention", attention, ["num_layers", "num_heads", "head_dim", "embed_dim"]],
  ]) {
    for (const name of names) need(isWhole(part?.[name], 1, 1e6), `${owner}.${name} is not a whole number`);
  }
  need(Number.isFinite(attention.scale), "attention.scale is not a number");
  for (const name of ["facts", "classes", "examples", "output_weights"]) {
    need(Array.isArray(data[name]), `${name} is not a list`);
  }
  need(data.examples.length > 0, "it holds no sequence");
  need(data.output_weights.length === attention.num_layers, "output_weights does not match the layers");
  data.output_weights.forEach((packed, layer) =>
    floats(packed, attention.embed_dim * attention.num_heads * attention.head_dim, `output_weights[${layer}]`));
  data.examples.forEach((example, place) => checkExample(example, data, `examples[${place}]`));
  return data;
}

function checkExample(example, data, where) {
  const {grid, attention, classes} = data;
  const tokens = grid.rows * grid.columns;
  need(example !== null && typeof example === "object", `${where} is not an object`);
  need(example.values?.length === tokens, `${where}.values does not have ${tokens} numbers`);
  need(example.values.every((value) => isWhole(value, 0, grid.max_value)), `${where}.values is out of range`);
  need(example.probabilities?.length === classes.length, `${where}.probabilities does not match the classes`);
  need(isWhole(example.predicted, 0, classes.length - 1), `${where}.predicted is not a class`);
  need(example.truth === null || isWhole(example.truth, 0, classes.length - 1), `${where}.truth is not a class`);
  const {layer, head, token} = example.telling ?? {};
  const inside = isWhole(layer, 0, attention.num_layers - 1) && isWhole(head, 0, attention.num_heads - 1);
  need(inside && isWhole(token, 0, tokens - 1), `${where}.telling names no view`);
  need(
    example.influence?.length === attention.num_layers &&
      example.influence.every((row) => row?.length === attention.num_heads && row.every(Number.isFinite)),
    `${where}.influence does not match the heads`,
  );
  need(example.layers?.length === attention.num_layers, `${where}.layers does not match the layers`);
  example.layers.forEach((packed, place) => readLayer(packed, data, `${where}.layers[${place}]`));
}

// float32 numbers, little-endian whatever the machine, as an ordinary array of float64.
function floats(packed, count, where) {
  let bytes;
  try {
    bytes = atob(packed);
  } catch {
    throw new Damaged(`${where} is not base64`);
  }
  need(bytes.length === 4 * count, `${where} does not hold ${count} numbers`);
  const view = new DataView(new ArrayBuffer(bytes.length));
  for (let place = 0; place < bytes.length; place++) view.setUint8(place, bytes.charCodeAt(place));
  const numbers = new Float64Array(count);
  for (let place = 0; place < count; place++) numbers[place] = view.getFloat32(4 * place, true);
  need(numbers.every(Number.isFinite), `${where} holds a number that is not finite`);
  return numbers;
}

const STEPS = ["scores", "scaled", "weights", "output", "part"];

function readLayer(packed, data, where) {
  const {grid, attention} = data;
  const rows = attention.num_heads * grid.rows * grid.columns;
  const sizes = {
    query: rows * attention.head_dim,
    key: rows * attention.head_dim,
    value: rows * attention.head_dim,
    lse: rows,
    output: rows * attention.head_dim,
    differences: STEPS.length * rows,
  };
  const layer = {};
  for (const [name, count] of Object.entries(sizes)) layer[name] = floats(packed?.[name], count, `${where}.${name}`);
  return layer;
}
