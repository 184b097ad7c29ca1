// The operators of single layers: linear, norm, RoPE, dropout and KV cache append.
#pragma once

#include "arguments.h"
#include "calls.h"

namespace clearhead::torch {

// Rows of a tensor [*batch, width], and the sizes of one with the same rows and another width.
int64_t rows_of(const Tensor& tensor);
Sizes sizes_with(const Tensor& like, int64_t width);
// The epilogue of an activation (enum ch_activation).
Epilogue epilogue_of(const char* function, int64_t activation);

void linear_forward(StableIValue* stack, uint64_t, uint64_t);
void linear_packed(StableIValue* stack, uint64_t, uint64_t);
void pack_weight(StableIValue* stack, uint64_t, uint64_t);
void unpack_weight(StableIValue* stack, uint64_t, uint64_t);
void linear_input_gradient(StableIValue* stack, uint64_t, uint64_t);
void linear_weight_gradient(StableIValue* stack, uint64_t, uint64_t);
void norm_forward(StableIValue* stack, uint64_t, uint64_t);
void norm_gradients(StableIValue* stack, uint64_t, uint64_t);
void rotary(StableIValue* stack, uint64_t, uint64_t);
// Cosines and then sines of each token's angles, [rows, head_dim]: of the tokens of one sequence where all have the same.
// Without a row where the second half of a token's cosines or sines is not its first one.
void token_angles(StableIValue* stack, uint64_t, uint64_t);
void dropout_add_forward(StableIValue* stack, uint64_t, uint64_t);
void cache_append(StableIValue* stack, uint64_t, uint64_t);

}  // namespace clearhead::torch
