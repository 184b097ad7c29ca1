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
  Matrix matrix(int64_t rows, int64_t columns, Dtype dtype) { return matrix_of(next({rows, columns}, dtype)); }

 private:
  const std::vector<Tensor>& tensors_;
  size_t next_ = 0;
};

struct SavedAttention {
  std::vector<Matrix> projected;
  Matrix joined;
  const Tensor* softmax = nullptr;
  const Tensor* exact = nullptr;
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
  bool needs(const Slot& slot) const { return slot.place >= 0 && needs_[tokens_ + static_cast<size_t>(slot.place)] != 0; }
  bool needs(const LinearSpec& spec) const { return needs(spec.weight) || needs(spec.bias); }
  bool needs(const NormSpec& spec) const { return needs(spec.weight) || needs(spec.bias); }

  Tensor& of_tokens(size_t which, const Sizes& sizes, Dtype dtype) { return results_[which] = empty(dtype, sizes); }
  // The gradient of a weight or bias, uninitialised until written; null if it is not needed.
  Tensor* of(const Slot& slot) {
    if (!needs(slot)) return nullptr;
    Tensor& result = results_[tokens_ + static_cast<size_t>(slot.place)];
    if (!result) {
      Sizes sizes;
      for (int64_t axis = 0; axis < slot.tensor->dim(); ++axis) sizes.push_back(slot.tensor->size(axis));
      result = empty(slot.tensor->dtype(), sizes);
    }
    return &result;
  }
  std::vector<Tensor> take() {
    std::vector<Tensor> gradients;
    for (size_t place = 0; place < results_.size(); ++place)
      if (needs_[place]) {
        if (!results_[place])
          fail("block", "needs", "be 0 for what the block does not learn", "1 for tensor " + std::to_string(place),
               "Use clearhead.ops.block.");
        gradients.push_back(std::move(results_[place]));
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
  bool run(const Matrix& arrived) {
    if (!block_.residual) {
      const Matrix x = matrix_of(call_.tokens[0]);
      Matrix of_x;
      if (gradients_.tokens(0)) of_x = token_gradient(0);
      through(0, arrived, x, of_x);
    } else if (block_.pre_norm) {
      norms_before(arrived);
    } else {
      norms_behind(arrived);
    }
    return finite_;
  }

 private:
  // ---- saved tensors ----

  void read(Saved& saved) {
    saved_.resize(block_.sublayers());
    for (size_t place = 0; place < block_.sublayers(); ++place) {
      SavedSublayer& each = saved_[place];
      const bool first = place == 0, last = place + 1 == block_.sublayers();
      if (!block_.residual) {
        read_part(saved, place);
      } else if (block_.pre_norm) {
        each.summed = first ? matrix_of(call_.tokens[0]) : saved.matrix(rows_, call_.width, dtype_);
        each.moments = saved.next({rows_, 2}, Dtype::float32).as<float>();
        each.normed = saved.matrix(rows_, call_.width, dtype_);
        read_part(saved, place);
      } else {
        read_part(saved, place);
        each.summed = saved.matrix(rows_, call_.width, dtype_);
        each.moments = saved.next({rows_, 2}, Dtype::float32).as<float>();
        if (!last) each.normed = saved.matrix(rows_, call_.width, dtype_);
      }
    }
  }

  void read_part(Saved& saved, size_t place) {
    SavedSublayer& each = saved_[place];
    if (place >= block_.attentions.size()) {
      const FeedForwardSpec& spec = block_.feedforward;
      const int64_t width = spec.layers.back().layer.in;
      SavedFeedForward& fed = each.feedforward;
      if (spec.gated()) fed.activated = saved.matrix(rows_, width, dtype_);
      fed.hidden = saved.matrix(rows_, width, dtype_);
      if (spec.gated() || !keeps_output(spec.activation)) fed.slope = saved.matrix(rows_, width, dtype_);
      return;
    }
    const AttentionSpec& spec = block_.attentions[place];
    SavedAttention& attended = each.attention;
    const bool memory = reads_memory(call_, block_, place);
    for (const Source& source : sources_of(spec, memory ? 2 : 1, dtype_)) {
      const int64_t rows = source.tokens == 0 ? rows_ : call_.batch * call_.tokens[1].size(1);
      attended.projected.push_back(saved.matrix(rows, source.layer.out, dtype_));
    }
    attended.joined = saved.matrix(rows_, spec.heads * spec.head_dim, dtype_);
    attended.softmax = &saved.next({call_.batch, spec.heads, call_.length, 2}, Dtype::float32);
    const ch_attention work = describe_heads(call_, spec, memory ? call_.tokens[1].size(1) : call_.length);
    if (dtype_ != Dtype::float32 && saves_output(work))
      attended.exact = &saved.next({call_.batch, spec.heads, call_.length, spec.head_dim}, Dtype::float32);
  }

  // ---- needed gradients ----

  bool needs_sublayer(size_t place) const {
    if (place >= block_.attentions.size()) {
      for (const LinearSpec& layer : block_.feedforward.layers)
        if (gradients_.needs(layer)) return true;
      return false;
    }
    const AttentionSpec& spec = block_.attentions[place];
    for (const LinearSpec& layer : spec.sources)
      if (gradients_.needs(layer)) return true;
    return gradients_.needs(spec.last) || (reads_memory(call_, block_, place) && gradients_.tokens(1));
  }

  // Whether a gradient is needed of the tokens, or within the first `sublayers` sublayers and `norms` norms.
  bool needed(size_t sublayers, size_t norms) const {
    if (gradients_.tokens(0)) return true;
    for (size_t place = 0; place < sublayers; ++place)
      if (needs_sublayer(place)) return true;
    for (size_t place = 0; place < norms; ++place)
      if (gradients_.needs(block_.around[place].norm)) return true;
    return false;
  }

  // ---- norms and residuals ----

  void norms_before(Matrix arrived) {
    Matrix of_part = arrived;
    const AroundSpec& last = block_.around.back();
    if (last.dropped) {
      of_part = scratch(rows_, call_.width);
      dropout_add(dtype_, arrived, last.dropped, last.seed, nullptr, of_part.data);
    }
    for (size_t place = block_.sublayers(); place-- > 0;) {
      if (!needed(place + 1, place + 1)) return;
      Matrix of_normed;
      if (needed(place, place + 1)) of_normed = scratch(rows_, call_.width);
      through(place, of_part, saved_[place].normed, of_normed);
      if (!of_normed) return;
      const AroundSpec* before = place > 0 ? &block_.around[place - 1] : nullptr;
      const Matrix of_sum = place > 0 ? scratch(rows_, call_.width) : gradients_.tokens(0) ? token_gradient(0) : scratch(rows_, call_.width);
      of_part = through_norm(place, of_normed, before, {}, arrived, of_sum);
      if (!needed(place, place)) return;
      arrived = of_sum;
    }
  }

  void norms_behind(Matrix arrived) {
    Matrix more;
    for (size_t place = block_.sublayers(); place-- > 0;) {
      const Matrix of_sum = scratch(rows_, call_.width);
      const Matrix of_part = through_norm(place, arrived, &block_.around[place], more, {}, of_sum);
      if (!needed(place + 1, place)) return;
      const Matrix read = place > 0 ? saved_[place - 1].normed : matrix_of(call_.tokens[0]);
      more = needed(place, place) ? scratch(rows_, call_.width) : Matrix{};
      through(place, of_part, read, more);
      if (!more) return;
      arrived = of_sum;
    }
    dropout_add(dtype_, more, 0, 0, arrived.data, token_gradient(0).data);
  }

  // The gradient of a norm's input besides the residual, whose gradient is written to `of_sum`.
  Matrix through_norm(size_t place, const Matrix& arrived, const AroundSpec* dropout, const Matrix& more,
                      const Matrix& at_sum, const Matrix& of_sum) {
    const NormSpec& spec = block_.around[place].norm;
    NormBackward call;
    call.sum = saved_[place].summed, call.moments = saved_[place].moments;
    call.grad_output = arrived.data, call.grad_more = more.data, call.grad_at_sum = at_sum.data;
    call.grad_sum = of_sum.data;
    Matrix of_input = of_sum;
    if (dropout != nullptr && dropout->dropped) {
      of_input = scratch(rows_, call_.width);
      call.dropped = dropout->dropped, call.seed = dropout->seed, call.grad_input = of_input.data;
    }
    if (Tensor* weight = gradients_.of(spec.weight)) call.grad_weight = weight->data();
    if (Tensor* bias = gradients_.of(spec.bias)) call.grad_bias = bias->data();
    norm_backward(dtype_, spec.norm, call);
    return of_input;
  }

  // ---- sublayers ----

  // Gradients of a sublayer's layers, and of its input in `of_x` unless that is null.
  void through(size_t place, const Matrix& arrived, const Matrix& x, const Matrix& of_x) {
    if (place < block_.attentions.size()) through_attention(place, arrived, x, of_x);
    else through_feedforward(place, arrived, x, of_x);
  }

  void through_feedforward(size_t place, const Matrix& arrived, const Matrix& x, const Matrix& of_x) {
    const FeedForwardSpec& spec = block_.feedforward;
    const SavedFeedForward& fed = saved_[place].feedforward;
    const LinearSpec& contract = spec.layers.back();
    layer_gradients(contract, arrived, fed.hidden);
    bool first = static_cast<bool>(of_x);
    for (size_t which = 0; which + 1 < spec.layers.size(); ++which) first = first || gradients_.needs(spec.layers[which]);
    if (!first) return;
    const int64_t width = fed.hidden.columns;
    std::vector<Matrix> of_layers = {scratch(x.rows, width)};
    Epilogue epilogue;
    if (spec.gated()) {
      of_layers.push_back(scratch(x.rows, width));
      epilogue.gate = fed.activated, epilogue.gate_kind = CH_GATE_SLOPE;
      epilogue.slope_gate = fed.slope, epilogue.slope = of_layers[0];
    } else if (keeps_output(spec.activation)) {
      // Saved slopes include dropout; a saved output does not.
      epilogue.gate = fed.hidden, epilogue.gate_kind = CH_GATE_OUTPUT, epilogue.dropped = spec.dropped;
    } else {
      epilogue.gate = fed.slope, epilogue.gate_kind = CH_GATE_SLOPE;
    }
    input_gradient(dtype_, {{arrived, contract.layer}}, of_layers.back(), epilogue);
    std::vector<InputTerm> terms;
    for (size_t which = 0; which < of_layers.size(); ++which) {
      layer_gradients(spec.layers[which], of_layers[which], x);
      terms.push_back({of_layers[which], spec.layers[which].layer});
    }
    if (of_x) input_gradient(dtype_, terms, of_x);
  }

  void through_attention(size_t place, const Matrix& arrived, const Matrix& x, const Matrix& of_x) {
    const AttentionSpec& spec = block_.attentions[place];
    const SavedAttention& attended = saved_[place].attention;
    const bool memory = reads_memory(call_, block_, place);
    const Matrix read[] = {x, memory ? matrix_of(call_.tokens[1]) : x};
    layer_gradients(spec.last, arrived, attended.joined);
    const bool of_memory = memory && gradients_.tokens(1);
    bool before = static_cast<bool>(of_x) || of_memory;
    for (const LinearSpec& layer : spec.sources) before = before || gradients_.needs(layer);
    if (!before) return;
    const std::vector<Source> sources = sources_of(spec, memory ? 2 : 1, dtype_);
    std::vector<Matrix> of_projected;
    for (const Matrix& projected : attended.projected) of_projected.push_back(scratch(projected.rows, projected.columns));
    attention_gradients(spec, attended, arrived, of_projected, memory ? call_.tokens[1].size(1) : call_.length);
    std::vector<InputTerm> terms[2];
    for (size_t which = 0; which < sources.size(); ++which) {
      const Source& source = sources[which];
      part_gradients(spec.sources[source.place], source, of_projected[which], read[source.tokens]);
      terms[source.tokens].push_back({of_projected[which], source.layer});
    }
    if (of_x) input_gradient(dtype_, terms[0], of_x);
    if (of_memory) input_gradient(dtype_, terms[1], token_gradient(1));
  }

  void attention_gradients(const AttentionSpec& spec, const SavedAttention& attended, const Matrix& arrived,
                           const std::vector<Matrix>& of_projected, int64_t k_len) {
    const Matrix of_joined = scratch(rows_, attended.joined.columns);
    input_gradient(dtype_, {{arrived, spec.last.layer}}, of_joined);
    ch_attention work = describe_heads(call_, spec, k_len);
    const std::vector<ch_tensor> heads = split_heads(spec, attended.projected, call_.length, k_len, dtype_);
    const std::vector<ch_tensor> of_heads = split_heads(spec, of_projected, call_.length, k_len, dtype_);
    work.query = heads[0], work.key = heads[1], work.value = heads[2];
    work.grad_query = of_heads[0], work.grad_key = of_heads[1], work.grad_value = of_heads[2];
    work.grad_output = heads_in(of_joined, 0, call_.length, spec.head_dim, dtype_);
    work.softmax = const_cast<float*>(attended.softmax->as<float>());
    if (saves_output(work)) {
      work.output = heads_in(attended.joined, 0, call_.length, spec.head_dim, dtype_);
      if (attended.exact != nullptr) {
        work.output32 = attended.exact->as<float>();
        work.output = view_of(*attended.exact);
      }
    }
    work.delta = static_cast<float*>(workspace_.take(work.batch * work.heads * work.q_len * static_cast<int64_t>(sizeof(float))));
    const int code = ch_backward(&work);
    if (code == CH_NOT_FINITE) finite_ = false;
    else check_kernel(code, "attention");
    rotate_heads(call_, spec, of_heads, true, k_len, true);
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
      weight_gradient(dtype_, grad, x, matrix_of(*weight).rows_from(source.first, source.layer.out, dtype_), sums);
    } else if (sums != nullptr) {
      bias_gradient(dtype_, grad, sums);
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
    fail("block", "grad", "have the output's shape and dtype", grad.shape(), "Pass the gradient as it arrived.");
  grad = std::move(grad).as_contiguous();
  Gradients gradients(call, needs);
  Saved saved(saved_tensors);
  const bool finite = Backward(call, call.blocks[0], saved, gradients).run(matrix_of(grad));
  Results results(stack);
  results.tensors(gradients.take());
  results.flag(finite);
}

}  // namespace clearhead::torch
