#include "layers.h"

#include <string.h>

namespace clearhead::torch {

int64_t rows_of(const Tensor& tensor) {
  int64_t rows = 1;
  for (int64_t axis = 0; axis + 1 < tensor.dim(); ++axis) rows *= tensor.size(axis);
  return rows;
}

Sizes sizes_with(const Tensor& like, int64_t width) {
  Sizes sizes;
  for (int64_t axis = 0; axis + 1 < like.dim(); ++axis) sizes.push_back(like.size(axis));
  sizes.push_back(width);
  return sizes;
}

Epilogue epilogue_of(const char* function, int64_t activation) {
  if (activation < CH_PLAIN || activation > CH_QUICK_GELU)
    fail(function, "activation", "be 0 to 5", std::to_string(activation), "See clearhead.ops.kinds.Activation.");
  Epilogue epilogue;
  epilogue.activation = static_cast<int32_t>(activation);
  return epilogue;
}

namespace {

std::string words(int64_t number) { return std::to_string(number); }

void check_dtype(const char* function, const char* argument, const Tensor& tensor) {
  if (tensor.dtype() > Dtype::float16)
    fail(function, argument, "be float32, bfloat16 or float16", tensor.shape(), "Convert with .to(dtype).");
}

// Sequences of [batch, length, width]; rows without a batch axis are one sequence.
int64_t sequences_of(const Tensor& tensor) { return tensor.dim() > 2 ? tensor.size(0) : 1; }

// [*batch, width] as [rows, width]; rows may be strided where there is one batch axis.
struct Flattened {
  Tensor tensor;
  Matrix matrix;
};

Flattened flatten(const char* function, const char* argument, Tensor input) {
  check_dtype(function, argument, input);
  if (input.dim() == 0) fail(function, argument, "have an axis of channels", input.shape(), "Use .unsqueeze.");
  const int64_t width = input.size(input.dim() - 1);
  if (input.dim() == 2) {
    Flattened result = {std::move(input).with_contiguous_rows(), {}};
    result.matrix = {result.tensor.data(), result.tensor.size(0), width, result.tensor.size(0) > 1
        ? result.tensor.stride(0) : width};
    return result;
  }
  Flattened result = {std::move(input).as_contiguous(), {}};
  result.matrix = {result.tensor.data(), rows_of(result.tensor), width, width};
  return result;
}

Matrix as_rows(const Tensor& tensor) {
  const int64_t width = tensor.size(tensor.dim() - 1);
  return {tensor.data(), rows_of(tensor), width, width};
}

Norm norm_of(const char* function, const Tensor& x, const Tensor& weight, const Tensor& bias, int64_t kind, double epsilon) {
  const int64_t width = x.size(x.dim() - 1);
  for (const Tensor* part : {&weight, &bias}) {
    if (*part && (!part->is_shaped({width}) || part->dtype() != x.dtype() || !part->contiguous()))
      fail(function, "weight and bias", "be contiguous [" + words(width) + "] in the dtype of x", part->shape(),
           "Convert with .to(dtype).");
  }
  if (kind < CH_NORM_LAYER || kind > CH_NORM_RMS_FROM_ONE)
    fail(function, "kind", "be 0, 1 or 2", words(kind), "See clearhead.ops.kinds.NormKind.");
  if (!(epsilon >= 0.0)) fail(function, "epsilon", "be 0 or more", std::to_string(epsilon), "1e-5 is usual.");
  return {static_cast<int32_t>(kind), epsilon, weight ? weight.data() : nullptr, bias ? bias.data() : nullptr};
}

}  // namespace

void linear_forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor input = arguments.tensor(), weight = arguments.tensor(), bias = arguments.optional_tensor();
  const int64_t activation = arguments.integer();
  const Flattened x = flatten("linear", "x", std::move(input));
  std::vector<Tensor> copies;
  const Linear layer = linear_of("linear", weight, bias, x.tensor.dtype(), copies);
  if (layer.in != x.matrix.columns)
    fail("linear", "weight", "read " + words(x.matrix.columns) + " channels", weight.shape(), "Check the layer's widths.");
  const Epilogue epilogue = epilogue_of("linear", activation);
  Tensor output = empty(x.tensor.dtype(), sizes_with(x.tensor, layer.out));
  linear(x.tensor.dtype(), x.matrix, layer, as_rows(output), epilogue);
  Results(stack).tensor(std::move(output));
}

void linear_packed(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor input = arguments.tensor();
  const Tensor panels = arguments.tensor();
  const int64_t out = arguments.integer();
  const Tensor bias = arguments.optional_tensor();
  const int64_t activation = arguments.integer();
  const Flattened x = flatten("linear_packed", "x", std::move(input));
  const Dtype dtype = x.tensor.dtype();
  if (out < 0) fail("linear_packed", "out", "be 0 or more", words(out), "Give the outputs of the weight that was packed.");
  std::vector<Tensor> copies;
  Linear layer = packed_linear_of("linear_packed", panels, out, x.matrix.columns, dtype);
  if (bias) layer.bias = bias_of("linear_packed", bias, out, dtype, copies);
  const Epilogue epilogue = epilogue_of("linear_packed", activation);
  Tensor output = empty(dtype, sizes_with(x.tensor, out));
  linear(dtype, x.matrix, layer, as_rows(output), epilogue);
  Results(stack).tensor(std::move(output));
}

void pack_weight(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor weight = arguments.tensor(), none;
  if (weight.dtype() != Dtype::int8) check_dtype("pack_weight", "weight", weight);
  std::vector<Tensor> copies;
  Linear layer = linear_of("pack_weight", weight, none, weight.dtype(), copies);
  if (layer.transposed && weight.dtype() == Dtype::int8)
    layer = linear_of("pack_weight", copies.emplace_back(weight.reference().as_contiguous()), none, weight.dtype(), copies);
  const auto [count, columns, bytes] = panels_shape(weight.dtype(), layer.out, layer.in);
  Tensor panels = empty(Dtype::byte, {count, columns, bytes});
  // Packing leaves vectors beyond the last column as they are.
  memset(panels.data(), 0, static_cast<size_t>(panels.elements()));
  pack_weight(weight.dtype(), layer, panels.data());
  Results(stack).tensor(std::move(panels));
}

void unpack_weight(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor panels = arguments.tensor(), like = arguments.tensor();
  check_dtype("unpack_weight", "like", like);
  if (like.dim() != 2) fail("unpack_weight", "like", "be [out, in]", like.shape(), "Give a tensor of the weight's shape and dtype.");
  const int64_t out = like.size(0), in = like.size(1);
  const Linear layer = packed_linear_of("unpack_weight", panels, out, in, like.dtype());
  Tensor weight = empty(like.dtype(), {out, in});
  unpack_weight(like.dtype(), layer, weight.data());
  Results(stack).tensor(std::move(weight));
}

void linear_input_gradient(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  std::vector<Tensor> grads = arguments.required_tensors(), weights = arguments.required_tensors();
  const char* name = "linear_input_gradient";
  if (grads.empty() || grads.size() != weights.size() || grads.size() > CH_MAX_TERMS)
    fail(name, "grads and weights", "be as many, 1 to " + words(CH_MAX_TERMS), words(static_cast<int64_t>(grads.size())),
         "Add the gradients of more layers.");
  std::vector<Flattened> rows;
  std::vector<Tensor> copies;
  std::vector<InputTerm> terms;
  const Tensor none;
  for (size_t index = 0; index < grads.size(); ++index) {
    rows.push_back(flatten(name, "grads", std::move(grads[index])));
    const Linear layer = linear_of(name, weights[index], none, rows[0].tensor.dtype(), copies);
    if (layer.out != rows[index].matrix.columns || rows[index].matrix.rows != rows[0].matrix.rows ||
        layer.in != weights[0].size(1) || rows[index].tensor.dtype() != rows[0].tensor.dtype())
      fail(name, "grads and weights", "be [*batch, out] and [out, in] of one batch and in", weights[index].shape(),
           "Check the layers' widths.");
    terms.push_back({rows[index].matrix, layer});
  }
  Tensor output = empty(rows[0].tensor.dtype(), sizes_with(rows[0].tensor, terms[0].layer.in));
  input_gradient(rows[0].tensor.dtype(), terms, as_rows(output));
  Results(stack).tensor(std::move(output));
}

void linear_weight_gradient(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor incoming = arguments.tensor(), input = arguments.tensor();
  const bool with_bias = arguments.flag();
  const char* name = "linear_weight_gradient";
  const int64_t sequences = sequences_of(input);
  const Flattened grad = flatten(name, "grad", std::move(incoming)), x = flatten(name, "x", std::move(input));
  if (grad.matrix.rows != x.matrix.rows || grad.tensor.dtype() != x.tensor.dtype())
    fail(name, "grad and x", "have the same rows and dtype", grad.tensor.shape(), "Pass the gradient of the output unmodified.");
  const Dtype dtype = x.tensor.dtype();
  Tensor weight = empty(dtype, {grad.matrix.columns, x.matrix.columns});
  Tensor bias = empty(dtype, {with_bias ? grad.matrix.columns : 0});
  weight_gradient(dtype, grad.matrix, x.matrix, as_rows(weight), with_bias ? bias.data() : nullptr, sequences);
  Results results(stack);
  results.tensor(std::move(weight));
  results.tensor(std::move(bias));
}

void norm_forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor input = arguments.tensor(), weight = arguments.optional_tensor(), bias = arguments.optional_tensor();
  const int64_t kind = arguments.integer();
  const double epsilon = arguments.number();
  const bool training = arguments.flag();
  check_dtype("norm", "x", input);
  if (input.dim() == 0) fail("norm", "x", "have an axis of channels", input.shape(), "Use .unsqueeze.");
  const Tensor x = std::move(input).as_contiguous();
  const Norm what = norm_of("norm", x, weight, bias, kind, epsilon);
  Tensor output = empty(x.dtype(), sizes_with(x, x.size(x.dim() - 1)));
  const Matrix rows = as_rows(x);
  Tensor moments = empty(Dtype::float32, {training ? rows.rows : 0, 2});
  NormForward call;
  call.input = rows, call.output = output.data(), call.moments = training ? moments.as<float>() : nullptr;
  norm(x.dtype(), what, call);
  Results results(stack);
  results.tensor(std::move(output));
  results.tensor(std::move(moments));
}

void norm_gradients(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor incoming = arguments.tensor(), input = arguments.tensor(), moments = arguments.tensor();
  Tensor weight = arguments.optional_tensor(), bias = arguments.optional_tensor();
  const int64_t kind = arguments.integer();
  const double epsilon = arguments.number();
  const bool of_weight = arguments.flag(), of_bias = arguments.flag();
  const char* name = "norm_gradients";
  check_dtype(name, "x", input);
  const Tensor grad = std::move(incoming).as_contiguous(), x = std::move(input).as_contiguous();
  if (x.dim() == 0 || grad.dtype() != x.dtype() || grad.elements() != x.elements())
    fail(name, "grad", "have the shape and dtype of x", grad.shape(), "Pass the gradient of the output unmodified.");
  const Norm what = norm_of(name, x, weight, bias, kind, epsilon);
  const Matrix rows = as_rows(x);
  if (!moments.is_shaped({rows.rows, 2}) || moments.dtype() != Dtype::float32 || !moments.contiguous())
    fail(name, "moments", "be what forward returned", moments.shape(), "Call forward with training=True.");
  Tensor grad_x = empty(x.dtype(), sizes_with(x, rows.columns));
  Tensor weight_grad = empty(x.dtype(), {of_weight && weight ? rows.columns : 0});
  Tensor bias_grad = empty(x.dtype(), {of_bias && bias ? rows.columns : 0});
  NormBackward call;
  call.sum = rows, call.moments = moments.as<float>(), call.grad_output = grad.data(), call.grad_sum = grad_x.data();
  if (of_weight && weight) call.grad_weight = weight_grad.data();
  if (of_bias && bias) call.grad_bias = bias_grad.data();
  norm_backward(x.dtype(), what, call, sequences_of(x));
  Results results(stack);
  results.tensor(std::move(grad_x));
  results.tensor(std::move(weight_grad));
  results.tensor(std::move(bias_grad));
}

void rotary(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor input = arguments.tensor(), table = arguments.tensor();
  const int64_t first = arguments.integer();
  const bool back = arguments.flag();
  check_dtype("rotary", "x", input);
  if (input.dim() != 4 || input.size(3) % 2 != 0)
    fail("rotary", "x", "be [batch, heads, len, head_dim] of an even head_dim", input.shape(), "Add the missing axes.");
  if (table.dim() != 2 || table.size(1) != input.size(3) || table.dtype() != Dtype::float32 || !table.contiguous())
    fail("rotary", "table", "be contiguous float32 [positions, head_dim]", table.shape(), "Use ch.positions.");
  if (first < 0 || first > table.size(0) - input.size(2))
    fail("rotary", "first", "leave every token a position in the table", words(first), "Make a longer table.");
  const Tensor x = std::move(input).with_contiguous_rows();
  Tensor output = empty_heads(x, x.size(3));
  Rotation call;
  call.batch = x.size(0), call.heads = x.size(1), call.rows = x.size(2), call.columns = x.size(3);
  call.first = first, call.positions = table.size(0), call.table = table.as<float>(), call.back = back;
  call.source = view_of(x), call.target = view_of(output);
  if (x.elements() > 0) rotate(x.dtype(), call);
  Results(stack).tensor(std::move(output));
}

void token_angles(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor of_cosine = arguments.tensor(), of_sine = arguments.tensor();
  if (of_cosine.dim() != 3 || of_cosine.size(2) % 2 != 0 || of_cosine.dtype() != Dtype::float32)
    fail("token_angles", "cosine", "be float32 [batch, len, head_dim] of an even head_dim", of_cosine.shape(), "Convert with .float().");
  const int64_t batch = of_cosine.size(0), length = of_cosine.size(1), half = of_cosine.size(2) / 2;
  if (!of_sine.is_shaped({batch, length, 2 * half}) || of_sine.dtype() != Dtype::float32)
    fail("token_angles", "sine", "have the shape and dtype of cosine", of_sine.shape(), "Convert with .float().");
  const Tensor cosine = std::move(of_cosine).as_contiguous(), sine = std::move(of_sine).as_contiguous();
  const auto same = [](const float* a, const float* b, int64_t count) {
    return memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
  };
  bool repeats = true, each_sequence = true;
  for (const float* all : {cosine.as<float>(), sine.as<float>()}) {
    for (int64_t row = 0; row < batch * length && repeats; ++row) repeats = same(all + 2 * row * half, all + (2 * row + 1) * half, half);
    const int64_t size = length * 2 * half;
    for (int64_t place = 1; place < batch && each_sequence; ++place) each_sequence = same(all, all + place * size, size);
  }
  const int64_t rows = !repeats ? 0 : each_sequence && batch > 0 ? length : batch * length;
  Tensor output = empty(Dtype::float32, {rows, 2 * half});
  float* target = output.as<float>();
  for (int64_t row = 0; row < rows; ++row) {
    for (const Tensor* part : {&cosine, &sine}) {
      memcpy(target, part->as<float>() + 2 * row * half, static_cast<size_t>(half) * sizeof(float));
      target += half;
    }
  }
  Results(stack).tensor(std::move(output));
}

void dropout_add_forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor input = arguments.tensor(), residual = arguments.optional_tensor();
  const int64_t levels = arguments.integer();
  Seed seed;
  seed.value = static_cast<uint64_t>(arguments.integer()), seed.first_row = arguments.integer();
  const Tensor numbers = arguments.optional_tensor();
  check_dtype("dropout_add", "x", input);
  if (levels < 0 || levels >= CH_LEVELS)
    fail("dropout_add", "levels", "be 0 to " + words(CH_LEVELS - 1), words(levels), "It is the probability times 65536.");
  if (seed.first_row < 0)
    fail("dropout_add", "first_row", "be 0 or more", words(seed.first_row), "It is the first row's index in the whole.");
  if (input.dim() == 0) fail("dropout_add", "x", "have an axis", input.shape(), "Use .unsqueeze.");
  const Tensor x = std::move(input).as_contiguous();
  if (residual) {
    if (residual.dtype() != x.dtype() || residual.elements() != x.elements())
      fail("dropout_add", "residual", "have the shape and dtype of x", residual.shape(), "Pass None for no residual.");
    residual = std::move(residual).as_contiguous();
  }
  seed.row_numbers = row_numbers_of("dropout_add", numbers, as_rows(x).rows);
  Tensor output = empty(x.dtype(), sizes_with(x, x.size(x.dim() - 1)));
  dropout_add(x.dtype(), as_rows(x), static_cast<int32_t>(levels), seed, residual ? residual.data() : nullptr, output.data());
  Results(stack).tensor(std::move(output));
}

void cache_append(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor cache = arguments.tensor();
  Tensor input = arguments.tensor();
  const int64_t first = arguments.integer();
  check_dtype("cache_append", "new", input);
  const Tensor new_tokens = std::move(input).with_contiguous_rows();
  if (cache.dim() != 4 || new_tokens.dim() != 4 || !is_cached_as(cache, new_tokens.dtype()) || cache.size(0) != new_tokens.size(0) ||
      cache.size(1) != new_tokens.size(1) || channels_of(cache) != new_tokens.size(3) || cache.stride(3) != 1)
    fail("cache_append", "new", "be [batch, kv_heads, new, head_dim] as the cache is, " + cache.shape(), new_tokens.shape(),
         "Use one cache per layer and per batch.");
  if (first < 0 || first > cache.size(2) - new_tokens.size(2))
    fail("cache_append", "first", "leave capacity for " + words(new_tokens.size(2)) + " tokens in " + words(cache.size(2)), words(first),
         "Make a larger cache.");
  if (new_tokens.elements() > 0)
    append_rows(new_tokens.dtype(), new_tokens.size(0), new_tokens.size(1), new_tokens.size(2), new_tokens.size(3),
                first, view_of(new_tokens), view_of(cache), is_quantized(cache));
}

}  // namespace clearhead::torch
