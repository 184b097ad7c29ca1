#include "block_parts.h"

#include <algorithm>

namespace clearhead::torch {
namespace {

// The tensors saved by forward, in the order of saving.
class Saved {
 public:
  explicit Saved(const std::vector<Tensor>& tensors) : tensors_(tensors) {}

  const Tensor& next(const Sizes& sizes, Dtype dtype) {
    if (next_ >= tensors_.size()) fail("block", "saved", "be what forward saved", "too few tensors", "Use clearhead.ops.block.");
    const Tensor& tensor = tensors_[next_++];
    bool fits = tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.dtype() == dtype && tensor.contiguous();
    for (size_t axis = 0; fits && axis < sizes.size(); ++axis) fits = tensor.size(static_cast<int64_t>(axis)) == sizes[axis];
    if (!fits) fail("block", "saved", "be what forward saved", tensor.shape(), "Use clearhead.ops.block.");
    return tensor;
  }
  // The same if the next tensor has four axes, otherwise null: forward saves it in invariant mode only.
  const Tensor* next_of_heads(const Sizes& sizes, Dtype dtype) {
    return next_ < tensors_.size() && tensors_[next_].dim() == 4 ? &next(sizes, dtype) : nullptr;
  }
  Matrix matrix(int64_t rows, int64_t columns, Dtype dtype) { return matrix_of(next({rows, columns}, dtype)); }

 private:
  const std::vector<Tensor>& tensors_;
  size_t next_ = 0;
};

struct SavedAttention {
  std::vector<Matrix> projected;
  Matrix heads_output;
  const Tensor* softmax = nullptr;
  const Tensor* output32 = nullptr;
};

struct SavedFeedForward {
  Matrix hidden, slope, activated;
};

struct SavedSublayer {
  SavedAttention attention;
  SavedFeedForward feedforward;
  Matrix summed, normed;
  const float* moments = nullptr;
};

// Gradients by index: first those of the tokens, then those of the tensors. Only needed ones are allocated.
class Gradients {
 public:
  Gradients(const BlockCall& call, const std::vector<int64_t>& needs)
      : needs_(needs), results_(needs.size()), tokens_(call.tokens.size()) {
    if (needs.size() != call.tokens.size() + call.tensors.size())
      fail("block", "needs", "be one for each token and tensor", std::to_string(needs.size()), "Use clearhead.ops.block.");
  }
  bool tokens(size_t which) const { return needs_[which] != 0; }
  bool needs(const Slot& slot) const { return slot.index >= 0 && needs_[tokens_ + static_cast<size_t>(slot.index)] != 0; }
  bool needs(const LinearSpec& spec) const { return needs(spec.weight) || needs(spec.bias); }
  bool needs(const NormSpec& spec) const { return needs(spec.weight) || needs(spec.bias); }

  Tensor& of_tokens(size_t which, const Sizes& sizes, Dtype dtype) { return results_[which] = empty(dtype, sizes); }
  // The gradient of a weight or bias, uninitialised until written; null if it is not needed.
  Tensor* of(const Slot& slot) {
    if (!needs(slot)) return nullptr;
    Tensor& result = results_[tokens_ + static_cast<size_t>(slot.index)];
    if (!result) {
      Sizes sizes;
      for (int64_t axis = 0; axis < slot.tensor->dim(); ++axis) sizes.push_back(slot.tensor->size(axis));
      result = empty(slot.tensor->dtype(), sizes);
    }
    return &result;
  }
  std::vector<Tensor> take() {
    std::vector<Tensor> gradients;
    for (size_t index = 0; index < results_.size(); ++index)
      if (needs_[index]) {
        if (!results_[index])
          fail("block", "needs", "be 0 for what the block does not learn", "1 for tensor " + std::to_string(index),
               "Use clearhead.ops.block.");
        gradients.push_back(std::move(results_[index]));
      }
    return gradients;
  }

 private:
  const std::vector<int64_t>& needs_;
  std::vector<Tensor> results_;
  size_t tokens_;
};

// Backward of one block. It stops at the first part that needs a gradient: frozen parts before it are skipped.
class Backward {
 public:
  Backward(const BlockCall& call, const BlockSpec& block, Saved& saved, Gradients& gradients)
      : call_(call), block_(block), gradients_(gradients), dtype_(call.dtype), rows_(call.batch * call.length) {
    read(saved);
  }

  // Returns false if a mask is given and an input or gradient has NaN or infinity; the gradients are invalid then.
  bool run(const Matrix& incoming) {
    if (!block_.residual) {
      const Matrix x = matrix_of(call_.tokens[0]);
      Matrix grad_x;
      if (gradients_.tokens(0)) grad_x = token_gradient(0);
      backward_sublayer(0, incoming, x, grad_x);
    } else if (block_.pre_norm) {
      run_pre_norm(incoming);
    } else {
      run_post_norm(incoming);
    }
    return finite_;
  }

 private:
  // ---- saved tensors ----

  void read(Saved& saved) {
    saved_.resize(block_.sublayers());
    for (size_t index = 0; index < block_.sublayers(); ++index) {
      SavedSublayer& sublayer = saved_[index];
      const bool first = index == 0, last = index + 1 == block_.sublayers();
      if (!block_.residual) {
        read_part(saved, index);
      } else if (block_.pre_norm) {
        sublayer.summed = first ? matrix_of(call_.tokens[0]) : saved.matrix(rows_, call_.width, dtype_);
        sublayer.moments = saved.next({rows_, 2}, Dtype::float32).as<float>();
        sublayer.normed = saved.matrix(rows_, call_.width, dtype_);
        read_part(saved, index);
      } else {
        read_part(saved, index);
        sublayer.summed = saved.matrix(rows_, call_.width, dtype_);
        sublayer.moments = saved.next({rows_, 2}, Dtype::float32).as<float>();
        if (!last) sublayer.normed = saved.matrix(rows_, call_.width, dtype_);
      }
    }
  }

  void read_part(Saved& saved, size_t index) {
    SavedSublayer& sublayer = saved_[index];
    if (index >= block_.attentions.size()) {
      const FeedForwardSpec& spec = block_.feedforward;
      const int64_t width = spec.layers.back().layer.in;
      SavedFeedForward& activations = sublayer.feedforward;
      if (spec.gated()) activations.activated = saved.matrix(rows_, width, dtype_);
      activations.hidden = saved.matrix(rows_, width, dtype_);
      if (spec.gated() || !activation_saves_output(spec.activation)) activations.slope = saved.matrix(rows_, width, dtype_);
      return;
    }
    const AttentionSpec& spec = block_.attentions[index];
    SavedAttention& attended = sublayer.attention;
    const bool memory = reads_memory(call_, block_, index);
    for (const Source& source : sources_of(spec, memory ? 2 : 1, dtype_)) {
      const int64_t rows = source.tokens == 0 ? rows_ : call_.batch * call_.tokens[1].size(1);
      attended.projected.push_back(saved.matrix(rows, source.layer.out, dtype_));
    }
    attended.heads_output = saved.matrix(rows_, spec.heads * spec.head_dim, dtype_);
    attended.softmax = &saved.next({call_.batch, spec.heads, call_.length, 2}, Dtype::float32);
    if (dtype_ != Dtype::float32)
      attended.output32 = saved.next_of_heads({call_.batch, spec.heads, call_.length, spec.head_dim}, Dtype::float32);
  }

  // ---- needed gradients ----

  bool needs_sublayer(size_t index) const {
    if (index >= block_.attentions.size()) {
      for (const LinearSpec& layer : block_.feedforward.layers)
        if (gradients_.needs(layer)) return true;
      return false;
    }
    const AttentionSpec& spec = block_.attentions[index];
    for (const LinearSpec& layer : spec.sources)
      if (gradients_.needs(layer)) return true;
    return gradients_.needs(spec.last) || (reads_memory(call_, block_, index) && gradients_.tokens(1));
  }

  // Whether a gradient is needed of the tokens, or within the first `sublayers` sublayers and `norms` norms.
  bool needed(size_t sublayers, size_t norms) const {
    if (gradients_.tokens(0)) return true;
    for (size_t index = 0; index < sublayers; ++index)
      if (needs_sublayer(index)) return true;
    for (size_t index = 0; index < norms; ++index)
      if (gradients_.needs(block_.connections[index].norm)) return true;
    return false;
  }

  // ---- norms and residuals ----

  void run_pre_norm(Matrix incoming) {
    Matrix grad_part = incoming;
    const ConnectionSpec& last = block_.connections.back();
    if (last.dropped) {
      grad_part = scratch(rows_, call_.width);
      dropout_add(dtype_, incoming, last.dropped, last.seed, nullptr, grad_part.data);
    }
    for (size_t index = block_.sublayers(); index-- > 0;) {
      if (!needed(index + 1, index + 1)) return;
      Matrix grad_normed;
      if (needed(index, index + 1)) grad_normed = scratch(rows_, call_.width);
      backward_sublayer(index, grad_part, saved_[index].normed, grad_normed);
      if (!grad_normed) return;
      const ConnectionSpec* before = index > 0 ? &block_.connections[index - 1] : nullptr;
      const Matrix grad_sum = index > 0 ? scratch(rows_, call_.width) : gradients_.tokens(0) ? token_gradient(0)
          : scratch(rows_, call_.width);
      grad_part = backward_norm(index, grad_normed, before, {}, incoming, grad_sum);
      if (!needed(index, index)) return;
      incoming = grad_sum;
    }
  }

  void run_post_norm(Matrix incoming) {
    Matrix grad_second;
    for (size_t index = block_.sublayers(); index-- > 0;) {
      const Matrix grad_sum = scratch(rows_, call_.width);
      const Matrix grad_part = backward_norm(index, incoming, &block_.connections[index], grad_second, {}, grad_sum);
      if (!needed(index + 1, index)) return;
      const Matrix read = index > 0 ? saved_[index - 1].normed : matrix_of(call_.tokens[0]);
      grad_second = needed(index, index) ? scratch(rows_, call_.width) : Matrix{};
      backward_sublayer(index, grad_part, read, grad_second);
      if (!grad_second) return;
      incoming = grad_sum;
    }
    dropout_add(dtype_, grad_second, 0, {}, incoming.data, token_gradient(0).data);
  }

  // The gradient of a norm's input besides the residual, whose gradient is written to `grad_sum`.
  Matrix backward_norm(size_t index, const Matrix& incoming, const ConnectionSpec* dropout, const Matrix& grad_second,
                       const Matrix& grad_residual, const Matrix& grad_sum) {
    const NormSpec& spec = block_.connections[index].norm;
    NormBackward call;
    call.sum = saved_[index].summed, call.moments = saved_[index].moments;
    call.grad_output = incoming.data, call.grad_output_second = grad_second.data, call.grad_residual = grad_residual.data;
    call.grad_sum = grad_sum.data;
    Matrix grad_input = grad_sum;
    if (dropout != nullptr && dropout->dropped) {
      grad_input = scratch(rows_, call_.width);
      call.dropped = dropout->dropped, call.seed = dropout->seed, call.grad_input = grad_input.data;
    }
    if (Tensor* weight = gradients_.of(spec.weight)) call.grad_weight = weight->data();
    if (Tensor* bias = gradients_.of(spec.bias)) call.grad_bias = bias->data();
    norm_backward(dtype_, spec.norm, call, call_.batch);
    return grad_input;
  }

  // ---- sublayers ----

  // Gradients of a sublayer's layers, and of its input in `grad_x` unless that is null.
  void backward_sublayer(size_t index, const Matrix& incoming, const Matrix& x, const Matrix& grad_x) {
    if (index < block_.attentions.size()) backward_attention(index, incoming, x, grad_x);
    else backward_feedforward(index, incoming, x, grad_x);
  }

  void backward_feedforward(size_t index, const Matrix& incoming, const Matrix& x, const Matrix& grad_x) {
    const FeedForwardSpec& spec = block_.feedforward;
    const SavedFeedForward& activations = saved_[index].feedforward;
    const LinearSpec& contract = spec.layers.back();
    layer_gradients(contract, incoming, activations.hidden);
    bool first = static_cast<bool>(grad_x);
    for (size_t which = 0; which + 1 < spec.layers.size(); ++which) first = first || gradients_.needs(spec.layers[which]);
    if (!first) return;
    const int64_t width = activations.hidden.columns;
    std::vector<Matrix> grad_layers = {scratch(x.rows, width)};
    Epilogue epilogue;
    if (spec.gated()) {
      grad_layers.push_back(scratch(x.rows, width));
      epilogue.gate = activations.activated, epilogue.gate_kind = CH_GATE_SLOPE;
      epilogue.slope_gate = activations.slope, epilogue.slope = grad_layers[0];
    } else if (activation_saves_output(spec.activation)) {
      // Saved slopes include dropout; a saved output does not.
      epilogue.gate = activations.hidden, epilogue.gate_kind = CH_GATE_OUTPUT, epilogue.dropped = spec.dropped;
    } else {
      epilogue.gate = activations.slope, epilogue.gate_kind = CH_GATE_SLOPE;
    }
    input_gradient(dtype_, {{incoming, contract.layer}}, grad_layers.back(), epilogue);
    std::vector<InputTerm> terms;
    for (size_t which = 0; which < grad_layers.size(); ++which) {
      layer_gradients(spec.layers[which], grad_layers[which], x);
      terms.push_back({grad_layers[which], spec.layers[which].layer});
    }
    if (grad_x) input_gradient(dtype_, terms, grad_x);
  }

  void backward_attention(size_t index, const Matrix& incoming, const Matrix& x, const Matrix& grad_x) {
    const AttentionSpec& spec = block_.attentions[index];
    const SavedAttention& attended = saved_[index].attention;
    const bool memory = reads_memory(call_, block_, index);
    const Matrix read[] = {x, memory ? matrix_of(call_.tokens[1]) : x};
    layer_gradients(spec.last, incoming, attended.heads_output);
    const bool needs_memory_grad = memory && gradients_.tokens(1);
    bool before = static_cast<bool>(grad_x) || needs_memory_grad;
    for (const LinearSpec& layer : spec.sources) before = before || gradients_.needs(layer);
    if (!before) return;
    const std::vector<Source> sources = sources_of(spec, memory ? 2 : 1, dtype_);
    std::vector<Matrix> grad_projected;
    for (const Matrix& projected : attended.projected) grad_projected.push_back(scratch(projected.rows, projected.columns));
    attention_gradients(spec, attended, incoming, grad_projected, memory ? call_.tokens[1].size(1) : call_.length);
    std::vector<InputTerm> terms[2];
    for (size_t which = 0; which < sources.size(); ++which) {
      const Source& source = sources[which];
      part_gradients(spec.sources[source.index], source, grad_projected[which], read[source.tokens]);
      terms[source.tokens].push_back({grad_projected[which], source.layer});
    }
    if (grad_x) input_gradient(dtype_, terms[0], grad_x);
    if (needs_memory_grad) input_gradient(dtype_, terms[1], token_gradient(1));
  }

  void attention_gradients(const AttentionSpec& spec, const SavedAttention& attended, const Matrix& incoming,
                           const std::vector<Matrix>& grad_projected, int64_t k_len) {
    const Matrix grad_heads_output = scratch(rows_, attended.heads_output.columns);
    input_gradient(dtype_, {{incoming, spec.last.layer}}, grad_heads_output);
    ch_attention work = describe_heads(call_, spec, k_len);
    const std::vector<ch_tensor> heads = split_heads(spec, attended.projected, call_.length, k_len, dtype_);
    const std::vector<ch_tensor> grad_heads = split_heads(spec, grad_projected, call_.length, k_len, dtype_);
    work.query = heads[0], work.key = heads[1], work.value = heads[2];
    work.grad_query = grad_heads[0], work.grad_key = grad_heads[1], work.grad_value = grad_heads[2];
    work.grad_output = heads_in(grad_heads_output, 0, call_.length, spec.head_dim, dtype_);
    work.softmax = const_cast<float*>(attended.softmax->as<float>());
    if (dtype_ == Dtype::float32) {
      work.output = heads_in(attended.heads_output, 0, call_.length, spec.head_dim, dtype_);
    } else if (attended.output32 != nullptr) {
      work.output32 = attended.output32->as<float>();
      work.output = view_of(*attended.output32);
    }
    work.delta = static_cast<float*>(workspace_.take(work.batch * work.heads * work.q_len * static_cast<int64_t>(sizeof(float))));
    const int code = ch_backward(&work);
    if (code == CH_NOT_FINITE) finite_ = false;
    else check_kernel(code, "attention");
    rotate_heads(call_, spec, grad_heads, true, k_len, true);
  }

  // ---- layers ----

  void layer_gradients(const LinearSpec& spec, const Matrix& grad, const Matrix& x) {
    part_gradients(spec, {0, 0, 0, spec.layer}, grad, x);
  }

  // Gradients of the part of a layer that one GEMM used.
  void part_gradients(const LinearSpec& spec, const Source& source, const Matrix& grad, const Matrix& x) {
    Tensor* weight = gradients_.of(spec.weight);
    Tensor* bias = gradients_.of(spec.bias);
    void* sums = bias == nullptr ? nullptr : static_cast<char*>(bias->data()) + source.first * size_of(dtype_);
    if (weight != nullptr) {
      weight_gradient(dtype_, grad, x, matrix_of(*weight).rows_from(source.first, source.layer.out, dtype_), sums,
                      call_.batch);
    } else if (sums != nullptr) {
      bias_gradient(dtype_, grad, sums, call_.batch);
    }
  }

  Matrix scratch(int64_t rows, int64_t columns) {
    return {workspace_.take(rows * columns * size_of(dtype_)), rows, columns, columns};
  }
  Matrix token_gradient(size_t which) {
    const Tensor& tokens = call_.tokens[which];
    return matrix_of(gradients_.of_tokens(which, {tokens.size(0), tokens.size(1), tokens.size(2)}, dtype_));
  }

  const BlockCall& call_;
  const BlockSpec& block_;
  Gradients& gradients_;
  Dtype dtype_;
  int64_t rows_;
  std::vector<SavedSublayer> saved_;
  Workspace workspace_;
  bool finite_ = true;
};

}  // namespace

void block_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor grad = arguments.tensor();
  BlockCall call;
  call.tokens = arguments.required_tensors(), call.tensors = arguments.required_tensors();
  const std::vector<Tensor> saved_tensors = arguments.required_tensors();
  const std::vector<int64_t> integers = arguments.required_integers();
  const std::vector<double> numbers = arguments.required_numbers();
  const std::vector<int64_t> needs = arguments.required_integers();
  read_blocks(call, integers, numbers);
  check_training(call);
  if (!grad.is_shaped({call.batch, call.length, output_width(call, call.blocks[0])}) || grad.dtype() != call.dtype)
    fail("block", "grad", "have the output's shape and dtype", grad.shape(), "Pass the gradient of the output unmodified.");
  grad = std::move(grad).as_contiguous();
  Gradients gradients(call, needs);
  Saved saved(saved_tensors);
  const bool finite = Backward(call, call.blocks[0], saved, gradients).run(matrix_of(grad));
  Results results(stack);
  results.tensors(gradients.take());
  results.flag(finite);
}

}  // namespace clearhead::torch
