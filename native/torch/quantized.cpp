#include "quantized.h"

#include "layers.h"

namespace clearhead::torch {
namespace {

// The tensor, or a contiguous copy.
const Tensor& dense(const Tensor& tensor, std::vector<Tensor>& copies) {
  if (tensor.contiguous()) return tensor;
  copies.push_back(tensor.reference().as_contiguous());
  return copies.back();
}

bool is_packed(const Tensor& weight) { return weight.dim() == 3 && weight.dtype() == Dtype::byte; }
int64_t bits_of(const Tensor& weight) { return weight.dtype() == Dtype::byte && !is_packed(weight) ? 4 : 8; }

// The integers of a layer: outputs, channels and where they are.
Linear integers_of(const char* function, const QuantizedLayer& from, std::vector<Tensor>& copies) {
  const Tensor& weight = *from.weight;
  if (is_packed(weight)) return packed_linear_of(function, weight, from.scale->dim() > 0 ? from.scale->size(0) : 0, from.in, Dtype::int8);
  if (weight.dim() != 2 || (weight.dtype() != Dtype::int8 && weight.dtype() != Dtype::byte))
    fail(function, "weight", "be [out, in] of int8, [out, in / 2] of uint8 with two integers a byte, or panels", weight.shape(),
         "Read the integers of the quantised weight.");
  Linear layer;
  layer.out = weight.size(0), layer.in = weight.size(1) * 8 / bits_of(weight);
  const bool has_rows = weight.stride(1) == 1 || weight.size(1) <= 1;
  const Tensor& read = has_rows ? weight : dense(weight, copies);
  layer.weight = read.data(), layer.step = read.stride(0);
  return layer;
}

void check_layer(const char* function, const QuantizedLayer& from, const Linear& layer, Dtype dtype) {
  const Tensor& scale = *from.scale;
  const bool has_groups = scale.dim() == 2 && scale.size(0) == layer.out && scale.size(1) > 0;
  if (!has_groups || layer.in % scale.size(1) != 0 || scale.dtype() != Dtype::float32)
    fail(function, "scale", "be float32 [out, groups] with a number of groups that divides the channels", scale.shape(),
         "Reshape the scales to [out, groups].");
  const Tensor *offset = from.offset, *bias = from.bias;
  if (offset && (offset->dtype() != Dtype::float32 || !offset->is_shaped({scale.size(0), scale.size(1)})))
    fail(function, "offset", "be float32 in the shape of scale", offset->shape(), "Pass None for no offset.");
  if (bias && (bias->dtype() != dtype || !bias->is_shaped({layer.out})))
    fail(function, "bias", "be [out] in the dtype of x", bias->shape(), "Pass None for no bias.");
}

void check_rounding(const char* function, const QuantizedLayer& layer, int64_t in) {
  if (layer.rounding < CH_ROUND_NONE || layer.rounding > CH_ROUND_TENSOR)
    fail(function, "rounding", "be 0 to 3", std::to_string(layer.rounding), "See clearhead.ops.kinds.Rounding.");
  if (is_packed(*layer.weight) && layer.rounding == CH_ROUND_NONE)
    fail(function, "weight", "not be in panels where x is not rounded", layer.weight->shape(), "Pass its integers.");
  if (layer.rounding == CH_ROUND_NONE) return;
  if (layer.low < -128 || layer.high > 127 || layer.low >= layer.high)
    fail(function, "low and high", "be a range within -128 to 127",
         std::to_string(layer.low) + " to " + std::to_string(layer.high), "Use -128 and 127.");
  if (bits_of(*layer.weight) != 8 || layer.scale->size(1) != 1 || layer.offset)
    fail(function, "weight", "be int8 with one scale a row and no offset where x is rounded", layer.scale->shape(),
         "Use rounding=0.");
  if (in > CH_MAX_ROUNDED)
    fail(function, "x", "have at most " + std::to_string(CH_MAX_ROUNDED) + " channels where it is rounded", std::to_string(in),
         "Use rounding=0.");
}

}  // namespace

Linear quantized_linear_of(const char* function, const QuantizedLayer& from, Dtype dtype, std::vector<Tensor>& copies) {
  Linear layer = integers_of(function, from, copies);
  check_layer(function, from, layer, dtype);
  check_rounding(function, from, layer.in);
  if (from.bias) layer.bias = dense(*from.bias, copies).data();
  Integers& integers = layer.integers;
  integers.bits = static_cast<int32_t>(bits_of(*from.weight)), integers.rounding = static_cast<int32_t>(from.rounding);
  integers.low = static_cast<int32_t>(from.low), integers.high = static_cast<int32_t>(from.high);
  integers.group = layer.in / from.scale->size(1);
  integers.scale = dense(*from.scale, copies).as<float>();
  if (from.offset) integers.offset = dense(*from.offset, copies).as<float>();
  return layer;
}

void linear_quantized(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* name = "linear_quantized";
  Arguments arguments(stack);
  Tensor input = arguments.tensor();
  const Tensor weight = arguments.tensor(), scale = arguments.tensor();
  const Tensor offset = arguments.optional_tensor(), bias = arguments.optional_tensor();
  QuantizedLayer from = {&weight, &scale, offset ? &offset : nullptr, bias ? &bias : nullptr};
  from.rounding = arguments.integer(), from.low = arguments.integer(), from.high = arguments.integer();
  const int64_t activation = arguments.integer();
  if (input.dtype() > Dtype::float16)
    fail(name, "x", "be float32, bfloat16 or float16", input.shape(), "Convert with .to(dtype).");
  if (input.dim() == 0) fail(name, "x", "have an axis of channels", input.shape(), "Use .unsqueeze.");
  const Tensor x = std::move(input).as_contiguous();
  const int64_t width = x.size(x.dim() - 1);
  from.in = width;
  std::vector<Tensor> copies;
  const Linear layer = quantized_linear_of(name, from, x.dtype(), copies);
  if (layer.in != width)
    fail(name, "weight", "read " + std::to_string(width) + " channels", weight.shape(), "Check the layer's widths.");
  const Epilogue epilogue = epilogue_of(name, activation);
  Tensor output = empty(x.dtype(), sizes_with(x, layer.out));
  linear(x.dtype(), {x.data(), rows_of(x), width, width}, layer, {output.data(), rows_of(x), layer.out, layer.out}, epilogue);
  Results(stack).tensor(std::move(output));
}

}  // namespace clearhead::torch
