// Linear layers whose weight is 8-bit or 4-bit integers: how their tensors are read, and their operator.
#pragma once

#include "arguments.h"
#include "calls.h"

namespace clearhead::torch {

// The tensors of a layer, offset and bias null for none, and how its input is rounded (enum ch_rounding). A weight in panels,
// which has three axes, reads `in` channels.
struct QuantizedLayer {
  const Tensor *weight = nullptr, *scale = nullptr, *offset = nullptr, *bias = nullptr;
  int64_t rounding = CH_ROUND_NONE, low = -128, high = 127, in = 0;
};

// Reads a layer for inputs of a dtype. Tensors that the kernels cannot read in place are copied into `copies`, which must
// outlive the result.
Linear quantized_linear_of(const char* function, const QuantizedLayer& layer, Dtype dtype, std::vector<Tensor>& copies);

void linear_quantized(StableIValue* stack, uint64_t, uint64_t);

}  // namespace clearhead::torch
