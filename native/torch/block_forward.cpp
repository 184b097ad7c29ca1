#include "block_parts.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

namespace clearhead::torch {
namespace {

// Operations from which two threads share a layer.
constexpr int64_t least_shared = 200000;

// Forward of one block: tensors that backward reads are newly allocated while training, and workspace memory otherwise.
class Forward {
 public:
  Forward(const BlockCall& call, const BlockSpec& block, std::vector<Tensor>* saved)
      : call_(call), block_(block), saved_(saved), dtype_(call.dtype), rows_(call.batch * call.length) {}

  void run(const Matrix& tokens, const Matrix& output) {
    if (!block_.residual) sublayer(0, tokens, &output);
    else if (block_.pre_norm) run_pre_norm(tokens, output);
    else run_post_norm(tokens, output);
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

  void run_pre_norm(Matrix stream, const Matrix& output) {
    Matrix sublayer_output;
    for (size_t index = 0; index < block_.sublayers(); ++index) {
      NormForward call;
      call.input = stream;
      if (sublayer_output) {
        const ConnectionSpec& before = block_.connections[index - 1];
        const Matrix sum = saved_matrix(rows_, call_.width);
        call.input = sublayer_output, call.added = stream.data, call.dropped = before.dropped, call.seed = before.seed;
        call.sum = sum.data;
        stream = sum;
      }
      call.moments = saved_moments();
      const Matrix normed = saved_matrix(rows_, call_.width);
      call.output = normed.data;
      norm(dtype_, block_.connections[index].norm.norm, call);
      sublayer_output = sublayer(index, normed, nullptr);
    }
    const ConnectionSpec& last = block_.connections.back();
    dropout_add(dtype_, sublayer_output, last.dropped, last.seed, stream.data, output.data);
  }

  void run_post_norm(Matrix stream, const Matrix& output) {
    for (size_t index = 0; index < block_.sublayers(); ++index) {
      const ConnectionSpec& connection = block_.connections[index];
      const bool last = index + 1 == block_.sublayers();
      NormForward call;
      call.input = sublayer(index, stream, nullptr);
      call.added = stream.data, call.dropped = connection.dropped, call.seed = connection.seed;
      if (training()) call.sum = matrix_of(save(dtype_, {rows_, call_.width})).data;
      call.moments = saved_moments();
      const Matrix normed = last ? output : saved_matrix(rows_, call_.width);
      call.output = normed.data;
      norm(dtype_, connection.norm.norm, call);
      stream = normed;
    }
  }

  // The output of a sublayer, [rows, width], in `output` unless that is null.
  Matrix sublayer(size_t index, const Matrix& x, const Matrix* output) {
    const bool attends = index < block_.attentions.size();
    const int64_t width = attends ? block_.attentions[index].last.layer.out : block_.feedforward.layers.back().layer.out;
    const Matrix sublayer_output = output != nullptr ? *output : scratch(rows_, width);
    if (attends) run_attention_sublayer(index, x, sublayer_output);
    else run_feedforward(x, sublayer_output);
    if (!block_.residual || !block_.connections[index].has_result_norm) return sublayer_output;
    NormForward call;
    const Matrix normed = scratch(rows_, width);
    call.input = sublayer_output, call.output = normed.data;
    norm(dtype_, block_.connections[index].result_norm.norm, call);
    return normed;
  }

  void run_attention_sublayer(size_t index, const Matrix& x, const Matrix& output) {
    const AttentionSpec& spec = block_.attentions[index];
    const bool memory = reads_memory(call_, block_, index);
    const Matrix read[] = {x, memory ? matrix_of(call_.tokens[1]) : x};
    const int64_t k_len = memory ? call_.tokens[1].size(1) : call_.length;
    std::vector<Matrix> projected;
    for (const Source& source : sources_of(spec, memory ? 2 : 1, dtype_)) {
      projected.push_back(saved_matrix(read[source.tokens].rows, source.layer.out));
      linear(dtype_, read[source.tokens], source.layer, projected.back());
    }
    for (size_t which = 0; which < spec.head_norms.size() && which < projected.size(); ++which) {
      const Matrix heads = {projected[which].data, projected[which].rows * projected[which].columns / spec.head_dim,
                            spec.head_dim, spec.head_dim};
      const Matrix normed = scratch(projected[which].rows, projected[which].columns);
      NormForward call;
      call.input = heads, call.output = normed.data;
      norm(dtype_, spec.head_norms[which].norm, call);
      projected[which] = normed;
    }
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
    run_attention(spec, work, output);
  }

  int64_t attended_keys(const AttentionSpec& spec, int64_t k_len) const {
    if (spec.cache == Cache::none) return k_len;
    if (spec.cache == Cache::paged) return longest(spec.pages);
    return spec.cache == Cache::grows ? spec.cached + call_.length : spec.cached;
  }

  void run_attention(const AttentionSpec& spec, ch_attention& work, const Matrix& output) {
    const Matrix heads_output = saved_matrix(rows_, spec.heads * spec.head_dim);
    work.output = heads_in(heads_output, 0, call_.length, spec.head_dim, dtype_);
    if (training()) {
      work.softmax = save(Dtype::float32, {work.batch, work.heads, work.q_len, 2}).as<float>();
      if (dtype_ != Dtype::float32 && saves_output(work))
        work.output32 = save(Dtype::float32, {work.batch, work.heads, work.q_len, work.value_dim}).as<float>();
    }
    check_kernel(ch_forward(&work), "attention");
    linear(dtype_, heads_output, spec.last.layer, output);
  }

  void run_feedforward(const Matrix& x, const Matrix& output) {
    const FeedForwardSpec& spec = block_.feedforward;
    const int64_t width = spec.layers.back().layer.in;
    Epilogue first;
    first.activation = spec.activation, first.dropped = spec.dropped, first.seed = spec.seed;
    const bool slopes = training() && (spec.gated() || !activation_saves_output(spec.activation));
    if (!spec.gated()) {
      const Matrix hidden = saved_matrix(x.rows, width);
      if (slopes) first.slope = saved_matrix(x.rows, width);
      linear(dtype_, x, spec.layers[0].layer, hidden, first);
      linear(dtype_, hidden, spec.layers[1].layer, output);
      return;
    }
    const Matrix activated = saved_matrix(x.rows, width);
    if (slopes) first.slope = scratch(x.rows, width);
    linear(dtype_, x, spec.layers[0].layer, activated, first);
    // Dropping an element of one factor drops the same element of the product.
    Epilogue second;
    second.gate = activated, second.gate_kind = CH_GATE_SLOPE, second.slope_gate = first.slope;
    const Matrix hidden = saved_matrix(x.rows, width);
    if (slopes) second.slope = saved_matrix(x.rows, width);
    linear(dtype_, x, spec.layers[1].layer, hidden, second);
    linear(dtype_, hidden, spec.layers[2].layer, output);
  }

  const BlockCall& call_;
  const BlockSpec& block_;
  std::vector<Tensor>* saved_;
  Dtype dtype_;
  int64_t rows_;
  Workspace workspace_;
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

// Runs a function whose kernels share their work with threads that stay awake. An error is carried over C in words: an
// exception_ptr needs a newer libstdc++ than torch does.
template <class Function> void in_team(const Function& function) {
  struct Call {
    const Function& function;
    bool out_of_memory, failed;
    std::string error;
  } call = {function, false, false, ""};
  const auto run = [](void* of) {
    Call& call = *static_cast<Call*>(of);
    try {
      call.function();
    } catch (const std::bad_alloc&) {
      call.out_of_memory = true;
    } catch (const std::exception& error) {
      call.failed = true, call.error = error.what();
    }
  };
  ch_in_team(instruction_set, threads(), run, &call);
  if (call.out_of_memory) throw std::bad_alloc();
  if (call.failed) throw std::runtime_error(call.error);
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
  Workspace workspace;
  Matrix second = output;
  if (call.blocks.size() > 1) second.data = workspace.take(output.rows * output.columns * size_of(call.dtype));
  Matrix stream = matrix_of(call.tokens[0]);
  const auto run = [&] {
    for (size_t index = 0; index < call.blocks.size(); ++index) {
      // Blocks write alternately to the output and to a second buffer, so that the last block writes to the output.
      const Matrix target = (call.blocks.size() - 1 - index) % 2 == 0 ? output : second;
      Forward(call, call.blocks[index], nullptr).run(stream, target);
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
  Forward(call, call.blocks[0], &saved).run(matrix_of(call.tokens[0]), output);
  for (Tensor& tensor : saved) results.push_back(std::move(tensor));
  Results(stack).tensors(std::move(results));
}

}  // namespace clearhead::torch
