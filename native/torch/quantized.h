// The operator of linear layers whose weight is 8-bit or 4-bit integers.
#pragma once

#include "arguments.h"

namespace clearhead::torch {

void linear_quantized(StableIValue* stack, uint64_t, uint64_t);

}  // namespace clearhead::torch
