// Attention from queries, keys and values, in the browser's own float64. A view is (example, layer, head, token).
class Attention {
  constructor(data) {
    this.data = data;
    this.tokens = data.grid.rows * data.grid.columns;
    this.heads = data.attention.num_heads;
    this.layers = data.attention.num_layers;
    this.width = data.attention.head_dim;
    this.decoded = new Map();
    this.outputs = data.output_weights.map((packed, layer) =>
      floats(packed, data.attention.embed_dim * this.heads * this.width, `output_weights[${layer}]`));
  }

  layer(example, layer) {
    const name = `${example}/${layer}`;
    if (!this.decoded.has(name)) {
      const packed = this.data.examples[example].layers[layer];
      this.decoded.set(name, readLayer(packed, this.data, name));
    }
    return this.decoded.get(name);
  }

  vector(numbers, head, token) {
    const start = (head * this.tokens + token) * this.width;
    return numbers.subarray(start, start + this.width);
  }

  // Every step of one query's view, recomputed from its query, the keys and the values.
  steps({example, layer, head, token}) {
    const {query, key, value} = this.layer(example, layer);
    const q = this.vector(query, head, token);
    const scores = new Float64Array(this.tokens);
    for (let place = 0; place < this.tokens; place++) scores[place] = dot(q, this.vector(key, head, place));
    const scaled = scores.map((score) => score * this.data.attention.scale);
    const largest = scaled.reduce((a, b) => Math.max(a, b));
    const lse = largest + Math.log(sum(scaled.map((score) => Math.exp(score - largest))));
    const weights = scaled.map((score) => Math.exp(score - lse));
    const output = new Float64Array(this.width);
    weights.forEach((weight, place) => {
      const v = this.vector(value, head, place);
      for (let channel = 0; channel < this.width; channel++) output[channel] += weight * v[channel];
    });
    return {query: q, scores, scaled, lse, weights, output, part: this.part(layer, head, output)};
  }

  // What one head adds to the module's output, before the bias: its columns of the output projection.
  part(layer, head, output) {
    const {embed_dim: width} = this.data.attention;
    const matrix = this.outputs[layer];
    const part = new Float64Array(width);
    for (let row = 0; row < width; row++) {
      const start = row * this.heads * this.width + head * this.width;
      part[row] = dot(matrix.subarray(start, start + this.width), output);
    }
    return part;
  }

  weights(view) {
    return this.steps(view).weights;
  }

  // What each key receives from all queries, as a mean: with mean pooling every query counts the same.
  received({example, layer, head}) {
    const mean = new Float64Array(this.tokens);
    for (let token = 0; token < this.tokens; token++) {
      this.weights({example, layer, head, token}).forEach((weight, place) => (mean[place] += weight / this.tokens));
    }
    return mean;
  }

  // How far the library's own output and log-sum-exp, which the page carries, stand from this browser's.
  gap(view, steps) {
    const {output, lse} = this.layer(view.example, view.layer);
    const theirs = this.vector(output, view.head, view.token);
    return {
      output: steps.output.reduce((worst, own, place) => Math.max(worst, Math.abs(own - theirs[place])), 0),
      lse: Math.abs(steps.lse - lse[view.head * this.tokens + view.token]),
    };
  }

  // How far the library stood from float64 in one step of one view, measured when the page was made.
  difference({example, layer, head, token}, step) {
    const {differences} = this.layer(example, layer);
    return differences[(STEPS.indexOf(step) * this.heads + head) * this.tokens + token];
  }
}

function dot(a, b) {
  let total = 0;
  for (let place = 0; place < a.length; place++) total += a[place] * b[place];
  return total;
}

function sum(numbers) {
  return numbers.reduce((a, b) => a + b, 0);
}
