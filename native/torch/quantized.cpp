#include "quantized.h"

#include "layers.h"

namespace clearhead::torch {
namespace {

constexpr const char* name = "linear_quantized";

// A layer's tensors: the integers, scales, offsets and bias; the last two may be undefined.
struct Layer {
  Tensor weight, scale, offset, bias;
  int64_t bits() const { return weight.dtype() == Dtype::byte ? 4 : 8; }
};

void check_layer(const Layer& layer, const Tensor& x) {
  const int64_t width = x.size(x.dim() - 1);
  const Tensor& weight = layer.weight;
  if (weight.dim() != 2 || (weight.dtype() != Dtype::int8 && weight.dtype() != Dtype::byte))
    fail(name, "weight", "be [out, in] of int8, or [out, in / 2] of uint8 with two integers a byte", weight.shape(),
         "Read the integers of the quantised weight.");
  if (weight.size(1) * 8 != width * layer.bits())
    fail(name, "weight", "read " + std::to_string(width) + " channels", weight.shape(), "Check the layer's widths.");
  const Tensor& scale = layer.scale;
  const bool divides = scale.dim() == 2 && scale.size(0) == weight.size(0) && scale.size(1) > 0 && width % scale.size(1) == 0;
  if (!divides || scale.dtype() != Dtype::float32)
    fail(name, "scale", "be float32 [out, groups] with a number of groups that divides the channels", scale.shape(),
         "Reshape the scales to [out, groups].");
  if (layer.offset && (layer.offset.dtype() != Dtype::float32 || !layer.offset.is_shaped({scale.size(0), scale.size(1)})))
    fail(name, "offset", "be float32 in the shape of scale", layer.offset.shape(), "Pass None for no offset.");
  if (layer.bias && (layer.bias.dtype() != x.dtype() || !layer.bias.is_shaped({weight.size(0)})))
    fail(name, "bias", "be [out] in the dtype of x", layer.bias.shape(), "Pass None for no bias.");
}

void check_rounding(const Layer& layer, int64_t width, int64_t rounding, int64_t low, int64_t high) {
  if (rounding < CH_ROUND_NONE || rounding > CH_ROUND_TENSOR)
    fail(name, "rounding", "be 0 to 3", std::to_string(rounding), "See clearhead.ops.kinds.Rounding.");
  if (rounding == CH_ROUND_NONE) return;
  if (low < -128 || high > 127 || low >= high)
    fail(name, "low and high", "be a range within -128 to 127", std::to_string(low) + " to " + std::to_string(high),
         "Use -128 and 127.");
  if (layer.bits() != 8 || layer.scale.size(1) != 1 || layer.offset)
    fail(name, "weight", "be int8 with one scale a row and no offset where x is rounded", layer.scale.shape(),
         "Use rounding=0.");
  if (width > CH_MAX_ROUNDED)
    fail(name, "x", "have at most " + std::to_string(CH_MAX_ROUNDED) + " channels where it is rounded", std::to_string(width),
         "Use rounding=0.");
}

Tensor run(const Tensor& x, const Layer& layer, int64_t rounding, int64_t low, int64_t high) {
  ch_quantized work = {};
  work.size = sizeof(work), work.abi = CH_ABI, work.isa = instruction_set, work.threads = threads();
  work.dtype = static_cast<int32_t>(x.dtype()), work.bits = static_cast<int32_t>(layer.bits());
  work.rounding = static_cast<int32_t>(rounding);
  work.low = static_cast<int32_t>(low), work.high = static_cast<int32_t>(high);
  work.steps = x.size(x.dim() - 1), work.rows = rows_of(x), work.columns = layer.weight.size(0);
  work.group = work.steps / layer.scale.size(1);
  work.x = x.data(), work.x_row = work.steps;
  work.weight = layer.weight.data(), work.weight_row = layer.weight.stride(0);
  work.scale = layer.scale.as<float>(), work.offset = layer.offset ? layer.offset.as<float>() : nullptr;
  work.bias = layer.bias ? layer.bias.data() : nullptr;
  Tensor output = empty(x.dtype(), sizes_with(x, work.columns));
  work.output = output.data(), work.output_row = work.columns;
  if (work.rows > 0 && work.columns > 0) check_kernel(ch_multiply_quantized(&work), name);
  return output;
}

}  // namespace

void linear_quantized(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor input = arguments.tensor();
  Layer layer;
  layer.weight = arguments.tensor(), layer.scale = arguments.tensor();
  layer.offset = arguments.optional_tensor(), layer.bias = arguments.optional_tensor();
  const int64_t rounding = arguments.integer(), low = arguments.integer(), high = arguments.integer();
  if (input.dtype() > Dtype::float16)
    fail(name, "x", "be float32, bfloat16 or float16", input.shape(), "Convert with .to(dtype).");
  if (input.dim() == 0) fail(name, "x", "have an axis of channels", input.shape(), "Use .unsqueeze.");
  const Tensor x = std::move(input).as_contiguous();
  check_layer(layer, x);
  check_rounding(layer, x.size(x.dim() - 1), rounding, low, high);
  layer.weight = std::move(layer.weight).with_contiguous_rows();
  for (Tensor* part : {&layer.scale, &layer.offset, &layer.bias})
    if (*part) *part = std::move(*part).as_contiguous();
  Results(stack).tensor(run(x, layer, rounding, low, high));
}

}  // namespace clearhead::torch
