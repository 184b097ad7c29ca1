#include "block_parts.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

namespace clearhead::torch {
namespace {

// Operations from which two threads share a layer.
constexpr int64_t least_shared = 200000;
// Rows that a thread computes at a time from one operation to the next: what they are between two is in its cache.
constexpr int64_t rows_of_part = 96;
// Bytes of a core's second cache: 1 MB where the system does not tell.
#ifdef _SC_LEVEL2_CACHE_SIZE
const int64_t level2_told = sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
const int64_t level2_told = 0;
#endif
const int64_t level2_bytes = level2_told > 0 ? level2_told : int64_t(1) << 20;

// The error of a function that is called through C, in words: an exception_ptr needs a newer libstdc++ than torch does.
class CarriedError {
 public:
  template <class Function> void catch_of(const Function& function) {
    try {
      function();
    } catch (const std::bad_alloc&) {
      set(true, "");
    } catch (const std::exception& error) {
      set(false, error.what());
    }
  }
  void raise() const {
    if (out_of_memory_) throw std::bad_alloc();
    if (failed_) throw std::runtime_error(error_);
  }

 private:
  void set(bool out_of_memory, const char* error) {
    // Several threads may fail; the first one to say so has its error raised.
    if (__atomic_exchange_n(&failed_, true, __ATOMIC_ACQ_REL)) return;
    out_of_memory_ = out_of_memory, error_ = error;
  }
  bool failed_ = false, out_of_memory_ = false;
  std::string error_;
};

// Runs a function whose kernels share their work with threads that stay awake.
template <class Function> void in_team(const Function& function) {
  struct Call {
    const Function& function;
    CarriedError error;
  } call = {function, {}};
  const auto run = [](void* of) {
    Call& call = *static_cast<Call*>(of);
    call.error.catch_of(call.function);
  };
  ch_in_team(instruction_set, threads(), run, &call);
  call.error.raise();
}

// Calls a function with each of so many units, which threads share; kernels that it calls run on its thread alone.
template <class Function> void in_shares(int64_t units, const Function& function) {
  struct Call {
    const Function& function;
    CarriedError error;
  } call = {function, {}};
  const auto run = [](void* of, int64_t unit) {
    Call& call = *static_cast<Call*>(of);
    const Alone alone;
    call.error.catch_of([&] { call.function(unit); });
  };
  ch_share(instruction_set, threads(), units, run, &call);
  call.error.raise();
}

// Forward of one block: tensors that backward reads are newly allocated while training, and workspace memory otherwise.
class Forward {
 public:
  Forward(const BlockCall& call, const BlockSpec& block, std::vector<Tensor>* saved, Workspace& workspace)
      : call_(call), block_(block), saved_(saved), workspace_(workspace), dtype_(call.dtype), rows_(call.batch * call.length) {}

  void run(const Matrix& tokens, const Matrix& output) {
    if (!block_.residual) return void(sublayer(0, tokens, &output));
    if (is_worth_parts()) return run_in_parts(tokens, output);
    Stream stream = {tokens, {}};
    for (size_t index = 0; index < block_.sublayers(); ++index) {
      const Matrix x = enter(index, stream);
      leave(index, sublayer(index, x, nullptr), stream, output);
    }
  }

 private:
  bool training() const { return saved_ != nullptr; }
  Tensor& save(Dtype dtype, const Sizes& sizes) {
    saved_->push_back(empty(dtype, sizes));
    return saved_->back();
  }
  Matrix scratch(int64_t rows, int64_t columns) {
    return {workspace_.take(rows * columns * size_of(dtype_)), rows, columns, columns};
  }
  Matrix saved_matrix(int64_t rows, int64_t columns) {
    return training() ? matrix_of(save(dtype_, {rows, columns})) : scratch(rows, columns);
  }
  float* saved_moments() { return training() ? save(Dtype::float32, {rows_, 2}).as<float>() : nullptr; }

  // What sublayers add to; with norms before them, the output of the last one is added where the next one begins.
  struct Stream {
    Matrix sum, added;
  };

  // The input of a sublayer.
  Matrix enter(size_t index, Stream& stream) {
    if (!block_.pre_norm) return stream.sum;
    NormForward call;
    call.input = stream.sum;
    if (stream.added) {
      const ConnectionSpec& before = block_.connections[index - 1];
      const Matrix sum = saved_matrix(rows_, call_.width);
      call.input = stream.added, call.added = stream.sum.data, call.dropped = before.dropped, call.seed = before.seed;
      call.sum = sum.data;
      stream.sum = sum;
    }
    call.moments = saved_moments();
    const Matrix normed = saved_matrix(rows_, call_.width);
    call.output = normed.data;
    norm(dtype_, block_.connections[index].norm.norm, call);
    return normed;
  }

  // Adds the output of a sublayer; the last sum of all is in `output`.
  void leave(size_t index, const Matrix& sublayer_output, Stream& stream, const Matrix& output) {
    const ConnectionSpec& connection = block_.connections[index];
    const bool last = index + 1 == block_.sublayers();
    if (block_.pre_norm) {
      stream.added = sublayer_output;
      if (last) dropout_add(dtype_, sublayer_output, connection.dropped, connection.seed, stream.sum.data, output.data);
      return;
    }
    NormForward call;
    call.input = sublayer_output;
    call.added = stream.sum.data, call.dropped = connection.dropped, call.seed = connection.seed;
    if (training()) call.sum = matrix_of(save(dtype_, {rows_, call_.width})).data;
    call.moments = saved_moments();
    stream.sum = last ? output : saved_matrix(rows_, call_.width);
    call.output = stream.sum.data;
    norm(dtype_, connection.norm.norm, call);
  }

  // The output of a sublayer, [rows, width], in `output` unless that is null.
  Matrix sublayer(size_t index, const Matrix& x, const Matrix* output) {
    if (index == block_.attentions.size()) return run_feedforward(x, output);
    std::vector<Matrix> projected;
    project(index, x, projected);
    norm_heads(block_.attentions[index], projected);
    return project_last(index, attend(index, projected), output);
  }

  // ---- parts --------------------------------------------------------------------------------------------------

  // Whether threads compute parts of the rows, each from one operation to the next, in place of parts of each operation:
  // what one writes the next one finds in the thread's own cache, if it fits, and threads wait for each other three times.
  // Each part reads all weights, which must be in panels for that, and the integers of a row must not depend on other rows.
  bool is_worth_parts() const {
    if (training() || block_.attentions.size() != 1 || !block_.has_feedforward || call_.tokens.size() != 1) return false;
    if (threads() < 2 || rows_ < threads() * rows_of_part || block_.feedforward.dropped != 0) return false;
    if (rows_of_part * block_.feedforward.layers.back().layer.in * size_of(dtype_) > level2_bytes) return false;
    const auto drops = [](const ConnectionSpec& connection) { return connection.dropped != 0; };
    if (std::any_of(block_.connections.begin(), block_.connections.end(), drops)) return false;
    const auto packed = [](const LinearSpec& linear) {
      return linear.layer.panels != nullptr && linear.layer.integers.rounding != CH_ROUND_TENSOR;
    };
    const AttentionSpec& attention = block_.attentions[0];
    const std::vector<LinearSpec>& layers = block_.feedforward.layers;
    return packed(attention.last) && std::all_of(attention.sources.begin(), attention.sources.end(), packed) &&
           std::all_of(layers.begin(), layers.end(), packed);
  }

  void run_in_parts(const Matrix& tokens, const Matrix& output) {
    std::vector<Matrix> projected;
    for (const Source& source : sources_of(block_.attentions[0], 1, dtype_)) projected.push_back(scratch(rows_, source.layer.out));
    for_parts([&](Forward& part, int64_t first) {
      Stream stream = {tokens.rows_from(first, part.rows_, dtype_), {}};
      std::vector<Matrix> targets;
      for (const Matrix& all : projected) targets.push_back(all.rows_from(first, part.rows_, dtype_));
      part.project(0, part.enter(0, stream), targets);
    });
    norm_heads(block_.attentions[0], projected);
    const Matrix heads_output = attend(0, projected);
    for_parts([&](Forward& part, int64_t first) {
      const auto rows_of = [&](const Matrix& all) { return all.rows_from(first, part.rows_, dtype_); };
      Stream stream = {rows_of(tokens), {}};
      part.leave(0, part.project_last(0, rows_of(heads_output), nullptr), stream, {});
      const Matrix x = part.enter(1, stream);
      part.leave(1, part.run_feedforward(x, nullptr), stream, rows_of(output));
    });
  }

  // Calls a function with each part of the rows and its first one.
  template <class Function> void for_parts(const Function& function) {
    const int64_t count = threads() * std::max<int64_t>(1, rows_ / (threads() * rows_of_part)), size = (rows_ + count - 1) / count;
    in_shares(count, [&](int64_t unit) {
      const int64_t first = unit * size;
      if (first >= rows_) return;
      Workspace workspace;
      Forward part(call_, block_, nullptr, workspace);
      part.rows_ = std::min(size, rows_ - first);
      function(part, first);
    });
  }

  // ---- attention ----------------------------------------------------------------------------------------------

  // Queries, keys and values, in the matrices of `projected`; without any, in new ones that are appended to it.
  void project(size_t index, const Matrix& x, std::vector<Matrix>& projected) {
    const bool memory = reads_memory(call_, block_, index);
    const Matrix read[] = {x, memory ? matrix_of(call_.tokens[1]) : x};
    std::vector<LinearCall> calls[2];
    const std::vector<Source> sources = sources_of(block_.attentions[index], memory ? 2 : 1, dtype_);
    for (size_t place = 0; place < sources.size(); ++place) {
      const Source& source = sources[place];
      if (place == projected.size()) projected.push_back(saved_matrix(read[source.tokens].rows, source.layer.out));
      calls[source.tokens].push_back({&source.layer, projected[place], {}});
    }
    for (size_t tokens = 0; tokens < 2; ++tokens) linears(dtype_, read[tokens], calls[tokens]);
  }

  void norm_heads(const AttentionSpec& spec, std::vector<Matrix>& projected) {
    for (size_t which = 0; which < spec.head_norms.size() && which < projected.size(); ++which) {
      const Matrix heads = {projected[which].data, projected[which].rows * projected[which].columns / spec.head_dim,
                            spec.head_dim, spec.head_dim};
      const Matrix normed = scratch(projected[which].rows, projected[which].columns);
      NormForward call;
      call.input = heads, call.output = normed.data;
      norm(dtype_, spec.head_norms[which].norm, call);
      projected[which] = normed;
    }
  }

  // The heads' outputs.
  Matrix attend(size_t index, const std::vector<Matrix>& projected) {
    const AttentionSpec& spec = block_.attentions[index];
    const int64_t k_len = reads_memory(call_, block_, index) ? call_.tokens[1].size(1) : call_.length;
    std::vector<ch_tensor> heads = split_heads(spec, projected, call_.length, k_len, dtype_);
    rotate_heads(call_, spec, heads, heads.size() > 1, k_len, false);
    ch_attention work = describe_heads(call_, spec, attended_keys(spec, k_len));
    if (spec.cache == Cache::grows) {
      const Tensor* caches[] = {spec.cached_key, spec.cached_value};
      for (size_t which = 0; which < 2; ++which)
        append_rows(dtype_, call_.batch, spec.kv_heads, call_.length, spec.head_dim, spec.cached, heads[which + 1],
                    view_of(*caches[which]), is_quantized(*caches[which]));
    }
    work.query = heads[0];
    work.quantized = spec.cache != Cache::none && is_quantized(*spec.cached_key) ? 1 : 0;
    if (spec.cache == Cache::paged) {
      append_to_pages(spec.pages, call_.length, heads[1], dtype_, *spec.cached_key);
      append_to_pages(spec.pages, call_.length, heads[2], dtype_, *spec.cached_value);
      work.key = view_of_pages(*spec.cached_key), work.value = view_of_pages(*spec.cached_value);
      work.pages = &spec.pages;
    } else {
      work.key = spec.cache == Cache::none ? heads[1] : view_of(*spec.cached_key);
      work.value = spec.cache == Cache::none ? heads[2] : view_of(*spec.cached_value);
    }
    const Matrix heads_output = saved_matrix(rows_, spec.heads * spec.head_dim);
    work.output = heads_in(heads_output, 0, call_.length, spec.head_dim, dtype_);
    if (training()) {
      work.softmax = save(Dtype::float32, {work.batch, work.heads, work.q_len, 2}).as<float>();
      if (dtype_ != Dtype::float32 && saves_output(work))
        work.output32 = save(Dtype::float32, {work.batch, work.heads, work.q_len, work.value_dim}).as<float>();
    }
    check_kernel(ch_forward(&work), "attention");
    return heads_output;
  }

  int64_t attended_keys(const AttentionSpec& spec, int64_t k_len) const {
    if (spec.cache == Cache::none) return k_len;
    if (spec.cache == Cache::paged) return longest(spec.pages);
    return spec.cache == Cache::grows ? spec.cached + call_.length : spec.cached;
  }

  Matrix project_last(size_t index, const Matrix& heads_output, const Matrix* output) {
    const Linear& layer = block_.attentions[index].last.layer;
    const Matrix last = output != nullptr ? *output : scratch(rows_, layer.out);
    linear(dtype_, heads_output, layer, last);
    return with_result_norm(index, last);
  }

  Matrix with_result_norm(size_t index, const Matrix& sublayer_output) {
    if (!block_.residual || !block_.connections[index].has_result_norm) return sublayer_output;
    NormForward call;
    const Matrix normed = scratch(rows_, sublayer_output.columns);
    call.input = sublayer_output, call.output = normed.data;
    norm(dtype_, block_.connections[index].result_norm.norm, call);
    return normed;
  }

  // ---- feedforward --------------------------------------------------------------------------------------------

  Matrix run_feedforward(const Matrix& x, const Matrix* target) {
    const FeedForwardSpec& spec = block_.feedforward;
    const int64_t width = spec.layers.back().layer.in;
    const Matrix output = target != nullptr ? *target : scratch(rows_, spec.layers.back().layer.out);
    Epilogue first;
    first.activation = spec.activation, first.dropped = spec.dropped, first.seed = spec.seed;
    const bool slopes = training() && (spec.gated() || !activation_saves_output(spec.activation));
    if (!spec.gated()) {
      const Matrix hidden = saved_matrix(x.rows, width);
      if (slopes) first.slope = saved_matrix(x.rows, width);
      linear(dtype_, x, spec.layers[0].layer, hidden, first);
      linear(dtype_, hidden, spec.layers[1].layer, output);
      return with_result_norm(block_.sublayers() - 1, output);
    }
    const Matrix activated = saved_matrix(x.rows, width);
    if (slopes) first.slope = scratch(x.rows, width);
    // Dropping an element of one factor drops the same element of the product.
    Epilogue second;
    second.gate = activated, second.gate_kind = CH_GATE_SLOPE, second.slope_gate = first.slope;
    const Matrix hidden = saved_matrix(x.rows, width);
    if (slopes) second.slope = saved_matrix(x.rows, width);
    linears(dtype_, x, {{&spec.layers[0].layer, activated, first}, {&spec.layers[1].layer, hidden, second}});
    linear(dtype_, hidden, spec.layers[2].layer, output);
    return with_result_norm(block_.sublayers() - 1, output);
  }

  const BlockCall& call_;
  const BlockSpec& block_;
  std::vector<Tensor>* saved_;
  Workspace& workspace_;
  Dtype dtype_;
  int64_t rows_;
};

// Whether a layer of a call is worth several threads.
bool is_worth_a_team(const BlockCall& call) {
  const int64_t rows = call.batch * call.length;
  int64_t largest = 0;
  const auto add = [&](const LinearSpec& spec) { largest = std::max(largest, spec.layer.out * spec.layer.in); };
  for (const LinearSpec& spec : call.blocks[0].feedforward.layers) add(spec);
  for (const AttentionSpec& attention : call.blocks[0].attentions) add(attention.last);
  return 2 * rows * largest >= least_shared;
}

}  // namespace

int64_t output_width(const BlockCall& call, const BlockSpec& block) {
  if (block.residual) return call.width;
  return block.attentions.empty() ? block.feedforward.layers.back().layer.out : block.attentions.back().last.layer.out;
}

static Tensor empty_output(const BlockCall& call) {
  return empty(call.dtype, {call.batch, call.length, output_width(call, call.blocks[0])});
}

void block(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  BlockCall call;
  call.tokens = arguments.required_tensors(), call.tensors = arguments.required_tensors(),
      call.caches = arguments.required_tensors();
  const std::vector<int64_t> integers = arguments.required_integers();
  const std::vector<double> numbers = arguments.required_numbers();
  read_blocks(call, integers, numbers);
  Tensor result = empty_output(call);
  const Matrix output = matrix_of(result);
  Workspace of_streams, of_block;
  Matrix second = output;
  if (call.blocks.size() > 1) second.data = of_streams.take(output.rows * output.columns * size_of(call.dtype));
  Matrix stream = matrix_of(call.tokens[0]);
  const auto run = [&] {
    for (size_t index = 0; index < call.blocks.size(); ++index) {
      // Blocks write alternately to the output and to a second buffer, so that the last block writes to the output.
      const Matrix target = (call.blocks.size() - 1 - index) % 2 == 0 ? output : second;
      of_block.rewind();
      Forward(call, call.blocks[index], nullptr, of_block).run(stream, target);
      stream = target;
    }
  };
  if (is_worth_a_team(call)) in_team(run);
  else run();
  Results(stack).tensor(std::move(result));
}

void block_forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  BlockCall call;
  call.tokens = arguments.required_tensors(), call.tensors = arguments.required_tensors();
  const std::vector<int64_t> integers = arguments.required_integers();
  const std::vector<double> numbers = arguments.required_numbers();
  read_blocks(call, integers, numbers);
  check_training(call);
  std::vector<Tensor> results;
  results.push_back(empty_output(call));
  const Matrix output = matrix_of(results[0]);
  std::vector<Tensor> saved;
  Workspace workspace;
  Forward(call, call.blocks[0], &saved, workspace).run(matrix_of(call.tokens[0]), output);
  for (Tensor& tensor : saved) results.push_back(std::move(tensor));
  Results(stack).tensors(std::move(results));
}

}  // namespace clearhead::torch
