#include "linear_attention.h"

#include <string.h>

#include <cmath>

#include "attention.h"

namespace clearhead::torch {
namespace {

constexpr const char* name = "linear_attention";
// From this many heads per thread on, a thread processes whole heads; with fewer, threads process single chunks.
constexpr int64_t min_heads_per_thread = 2;

struct Inputs {
  Tensor query, key, value, log_decay, rate;
};

struct Options {
  int64_t feature_map = 0, chunk = 1;
  double scale = 1.0;
};

std::string words(const Sizes& sizes) {
  std::string text = "(";
  for (size_t axis = 0; axis < sizes.size(); ++axis) text += (axis ? ", " : "") + std::to_string(sizes[axis]);
  return text + ")";
}

Inputs read_inputs(Arguments& arguments) {
  Inputs inputs;
  inputs.query = arguments.tensor(), inputs.key = arguments.tensor(), inputs.value = arguments.tensor();
  inputs.log_decay = arguments.optional_tensor(), inputs.rate = arguments.optional_tensor();
  return inputs;
}

Options read_options(Arguments& arguments) {
  Options options;
  options.feature_map = arguments.integer(), options.scale = arguments.number(), options.chunk = arguments.integer();
  return options;
}

// Raises if a given tensor has other sizes or another dtype.
void check_sizes(const char* argument, const Tensor& tensor, const Sizes& sizes, const char* advice) {
  if (!tensor) return;
  bool fits = tensor.dtype() == Dtype::float32 && tensor.dim() == static_cast<int64_t>(sizes.size());
  for (size_t axis = 0; fits && axis < sizes.size(); ++axis) fits = tensor.size(static_cast<int64_t>(axis)) == sizes[axis];
  if (!fits) fail(name, argument, "be float32 of shape " + words(sizes), tensor.shape(), advice);
}

void check_given(const char* argument, const Tensor& tensor) {
  if (!tensor) fail(name, argument, "be a tensor where outputs were normalised", "None", "Pass what forward returned.");
}

Tensor contiguous_or_absent(Tensor tensor) { return tensor ? std::move(tensor).as_contiguous() : Tensor(); }

void check_inputs(const Inputs& inputs) {
  const Tensor& query = inputs.query;
  const struct {
    const char* argument;
    const Tensor& tensor;
  } given[] = {{"query", query}, {"key", inputs.key}, {"value", inputs.value}};
  for (const auto& [argument, tensor] : given) {
    if (tensor.dim() != 4 || tensor.dtype() != Dtype::float32)
      fail(name, argument, "be float32 [batch, heads, len, head_dim]", tensor.shape(), "Convert with .to(torch.float32).");
    if (tensor.size(3) < 1 || tensor.size(3) > CH_MAX_HEAD_DIM)
      fail(name, argument, "have 1 to " + std::to_string(CH_MAX_HEAD_DIM) + " channels", tensor.shape(),
           "Use torch's operations.");
  }
  const int64_t heads = query.size(1), kv_heads = inputs.key.size(1);
  if (kv_heads == 0 ? heads != 0 : heads == 0 || heads % kv_heads != 0)
    fail(name, "key", "have a number of heads that divides query's " + std::to_string(heads), inputs.key.shape(),
         "Query head h reads key head h // group.");
  check_sizes("key", inputs.key, {query.size(0), kv_heads, query.size(2), query.size(3)}, "Pass one key per query.");
  const Sizes tokens = {query.size(0), kv_heads, query.size(2)};
  check_sizes("value", inputs.value, {tokens[0], tokens[1], tokens[2], inputs.value.size(3)}, "Pass one value per key.");
  check_sizes("rate", inputs.rate, {tokens[0], tokens[1], tokens[2], 1}, "Pass one rate per key.");
  const bool single = inputs.log_decay && inputs.log_decay.dim() == 4 && inputs.log_decay.size(3) == 1;
  check_sizes("log_decay", inputs.log_decay, {tokens[0], tokens[1], tokens[2], single ? 1 : query.size(3)},
              "Pass one decay per key, or one per feature.");
}

void check_options(const Inputs& inputs, const Options& options, bool normalized) {
  if (options.feature_map < CH_FEATURE_IDENTITY || options.feature_map > CH_FEATURE_RELU)
    fail(name, "feature_map", "be 0 (identity), 1 (elu) or 2 (relu)", std::to_string(options.feature_map),
         "Apply other feature maps before the call.");
  if (options.chunk < 1 || options.chunk > CH_MAX_CHUNK)
    fail(name, "chunk", "be 1 to " + std::to_string(CH_MAX_CHUNK), std::to_string(options.chunk), "Usual: 64.");
  if (!std::isfinite(options.scale)) fail(name, "scale", "be finite", std::to_string(options.scale), "Scale the query.");
  if (normalized && (inputs.log_decay || inputs.rate))
    fail(name, "normalized", "be False with log_decay or rate", "True", "Divide the output after the call.");
}

int64_t padded(int64_t count) { return (count + CH_LINEAR_PAD - 1) / CH_LINEAR_PAD * CH_LINEAR_PAD; }

// A call: its inputs, copied if they are not contiguous, and the description that points at them.
class Call {
 public:
  Call(Inputs inputs, const Options& options, bool normalized) : inputs(std::move(inputs)), normalized(normalized) {
    check_inputs(this->inputs);
    check_options(this->inputs, options, normalized);
    describe(options);
  }

  Sizes tokens(int64_t last) const { return {work.batch, work.heads, work.length, last}; }
  Sizes matrix() const { return {work.batch, work.kv_heads, work.features, work.value_dim}; }
  Sizes features() const { return {work.batch, work.kv_heads, work.features}; }
  Sizes rows() const { return {work.batch, work.heads, work.length}; }
  Sizes chunk_states() const { return {work.batch, work.kv_heads, chunks(), work.features, padded(work.value_dim)}; }
  Sizes chunk_sums() const { return {work.batch, work.kv_heads, chunks(), padded(work.features)}; }
  // Without tokens the kernels write nothing.
  bool is_empty() const { return work.batch == 0 || work.kv_heads == 0 || work.length == 0; }
  // Whether single chunks are distributed over the threads, which needs a state per chunk.
  bool has_few_heads() const {
    return work.threads > 1 && work.rate == nullptr && work.batch * work.kv_heads < min_heads_per_thread * work.threads;
  }
  float* take_states(Workspace& workspace) const { return take(workspace, chunk_states()); }
  float* take_sums(Workspace& workspace) const { return normalized ? take(workspace, chunk_sums()) : nullptr; }

  Inputs inputs;
  bool normalized;
  ch_linear work = {};

 private:
  int64_t chunks() const { return (work.length + work.chunk - 1) / work.chunk; }

  static float* take(Workspace& workspace, const Sizes& sizes) {
    int64_t bytes = sizeof(float);
    for (int64_t size : sizes) bytes *= size;
    return static_cast<float*>(workspace.take(bytes));
  }

  void describe(const Options& options) {
    inputs.query = std::move(inputs.query).with_contiguous_rows(), inputs.key = std::move(inputs.key).with_contiguous_rows();
    inputs.value = std::move(inputs.value).with_contiguous_rows();
    inputs.log_decay = contiguous_or_absent(std::move(inputs.log_decay));
    inputs.rate = contiguous_or_absent(std::move(inputs.rate));
    const Tensor &query = inputs.query, &key = inputs.key;
    work.size = sizeof(work), work.abi = CH_ABI, work.isa = instruction_set, work.threads = threads();
    work.feature_map = static_cast<int32_t>(options.feature_map), work.scale = options.scale, work.chunk = options.chunk;
    work.batch = query.size(0), work.heads = query.size(1), work.kv_heads = key.size(1), work.length = query.size(2);
    work.features = query.size(3), work.value_dim = inputs.value.size(3);
    work.query = view_of(query), work.key = view_of(key), work.value = view_of(inputs.value);
    if (inputs.log_decay) work.log_decay = inputs.log_decay.as<float>(), work.gates = inputs.log_decay.size(3);
    if (inputs.rate) work.rate = inputs.rate.as<float>();
  }
};

const float* address(const Tensor& tensor) { return tensor ? tensor.as<float>() : nullptr; }

// Copies the elements of `from`, or zeros if it is undefined.
void write(const Tensor& from, Tensor& to) {
  const size_t bytes = static_cast<size_t>(to.elements()) * sizeof(float);
  if (bytes == 0) return;
  if (from) memcpy(to.data(), from.data(), bytes);
  else memset(to.data(), 0, bytes);
}

// The results of forward other than the output and last state.
struct Saved {
  Tensor output, shares, states, sums;
};

void use_saved(Call& call, Saved& saved) {
  ch_linear& work = call.work;
  const char* advice = "Pass what forward returned.";
  check_sizes("states", saved.states, call.chunk_states(), advice);
  saved.states = std::move(saved.states).as_contiguous(), work.states = saved.states.as<float>();
  if (!call.normalized) return;
  check_given("output", saved.output), check_given("sums", saved.sums);
  check_sizes("output", saved.output, call.tokens(work.value_dim), advice);
  check_sizes("shares", saved.shares, call.rows(), advice), check_sizes("sums", saved.sums, call.chunk_sums(), advice);
  saved.output = std::move(saved.output).with_contiguous_rows(), saved.shares = std::move(saved.shares).as_contiguous();
  saved.sums = std::move(saved.sums).as_contiguous();
  work.output = view_of(saved.output), work.shares = saved.shares.as<float>(), work.sums = saved.sums.as<float>();
}

// Gradients of forward's results; undefined ones are zero.
struct IncomingGradients {
  Tensor output, last_state, last_normalizer;
};

void use_incoming(Call& call, IncomingGradients& grads) {
  ch_linear& work = call.work;
  const Sizes sizes = call.tokens(work.value_dim);
  const char* advice = "Pass the gradient of the output unmodified.";
  check_sizes("grad_output", grads.output, sizes, advice);
  check_sizes("grad_last_state", grads.last_state, call.matrix(), advice);
  grads.output = grads.output ? std::move(grads.output).with_contiguous_rows() : zeros(Dtype::float32, sizes);
  grads.last_state = contiguous_or_absent(std::move(grads.last_state));
  work.grad_output = view_of(grads.output), work.grad_last_state = address(grads.last_state);
  if (!call.normalized) return;
  check_sizes("grad_last_normalizer", grads.last_normalizer, call.features(), advice);
  grads.last_normalizer = contiguous_or_absent(std::move(grads.last_normalizer));
  work.grad_last_normalizer = address(grads.last_normalizer);
}

// Gradients of the inputs and of the first state: allocates them and sets the pointers in the description.
struct Gradients {
  explicit Gradients(Call& call) {
    ch_linear& work = call.work;
    const Inputs& inputs = call.inputs;
    query = empty_heads(inputs.query, work.features), key = empty_heads(inputs.key, work.features);
    value = empty_heads(inputs.value, work.value_dim), state = empty(Dtype::float32, call.matrix());
    work.grad_query = view_of(query), work.grad_key = view_of(key), work.grad_value = view_of(value);
    work.grad_state = state.as<float>();
    if (inputs.log_decay) {
      log_decay = empty(Dtype::float32, {work.batch, work.kv_heads, work.length, work.gates});
      work.grad_decay = log_decay.as<float>();
    }
    if (inputs.rate) {
      rate = empty(Dtype::float32, {work.batch, work.kv_heads, work.length, 1});
      work.grad_rate = rate.as<float>();
    }
    if (call.normalized) {
      normalizer = empty(Dtype::float32, call.features());
      // Backward does not write last_normalizer: a pointer there says that outputs were normalised.
      work.grad_normalizer = work.last_normalizer = normalizer.as<float>();
    }
  }

  void put(StableIValue* stack) {
    Results results(stack);
    results.tensor(std::move(query)), results.tensor(std::move(key)), results.tensor(std::move(value));
    results.optional_tensor(std::move(log_decay)), results.optional_tensor(std::move(rate));
    results.tensor(std::move(state)), results.optional_tensor(std::move(normalizer));
  }

  Tensor query, key, value, log_decay, rate, state, normalizer;
};

}  // namespace

void linear_attention_forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Inputs inputs = read_inputs(arguments);
  Tensor state = arguments.optional_tensor(), normalizer = arguments.optional_tensor();
  const Options options = read_options(arguments);
  const bool normalized = arguments.flag(), for_backward = arguments.flag();
  Call call(std::move(inputs), options, normalized);
  check_sizes("state", state, call.matrix(), "Pass the state that an earlier call returned.");
  check_sizes("normalizer", normalizer, call.features(), "Pass the normaliser that an earlier call returned.");
  state = contiguous_or_absent(std::move(state)), normalizer = contiguous_or_absent(std::move(normalizer));
  ch_linear& work = call.work;
  Tensor output = empty_heads(call.inputs.query, work.value_dim), last_state = empty(Dtype::float32, call.matrix());
  Tensor last_normalizer, shares, states, sums;
  if (normalized) last_normalizer = empty(Dtype::float32, call.features()), shares = empty(Dtype::float32, call.rows());
  Workspace workspace;
  if (for_backward) {
    states = empty(Dtype::float32, call.chunk_states());
    if (normalized) sums = empty(Dtype::float32, call.chunk_sums());
    work.states = states.as<float>(), work.sums = const_cast<float*>(address(sums));
  } else if (call.has_few_heads()) {
    work.states = call.take_states(workspace), work.sums = call.take_sums(workspace);
  }
  work.state = address(state), work.normalizer = address(normalizer), work.output = view_of(output);
  work.last_state = last_state.as<float>(), work.last_normalizer = const_cast<float*>(address(last_normalizer));
  work.shares = const_cast<float*>(address(shares));
  if (call.is_empty()) {
    write(state, last_state);
    if (normalized) write(normalizer, last_normalizer);
  } else {
    check_kernel(ch_linear_forward(&work), name);
  }
  Results results(stack);
  results.tensor(std::move(output)), results.tensor(std::move(last_state));
  results.optional_tensor(std::move(last_normalizer)), results.optional_tensor(std::move(shares));
  results.optional_tensor(std::move(states)), results.optional_tensor(std::move(sums));
}

void linear_attention_gradients(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  IncomingGradients incoming;
  incoming.output = arguments.optional_tensor(), incoming.last_state = arguments.optional_tensor();
  incoming.last_normalizer = arguments.optional_tensor();
  Inputs inputs = read_inputs(arguments);
  Saved saved;
  saved.output = arguments.optional_tensor(), saved.shares = arguments.optional_tensor();
  saved.states = arguments.tensor(), saved.sums = arguments.optional_tensor();
  const Options options = read_options(arguments);
  Call call(std::move(inputs), options, static_cast<bool>(saved.shares));
  use_saved(call, saved);
  use_incoming(call, incoming);
  Gradients grads(call);
  Workspace workspace;
  ch_linear& work = call.work;
  if (call.has_few_heads()) work.grad_states = call.take_states(workspace), work.grad_sums = call.take_sums(workspace);
  if (call.is_empty()) {
    write(incoming.last_state, grads.state);
    if (call.normalized) write(incoming.last_normalizer, grads.normalizer);
  } else {
    check_kernel(ch_linear_backward(&work), name);
  }
  grads.put(stack);
}

}  // namespace clearhead::torch
