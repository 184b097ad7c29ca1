// The linear attention family as operators: causal linear attention in chunks, and its gradients.
#pragma once

#include "arguments.h"

namespace clearhead::torch {

inline constexpr const char* linear_attention_forward_schema =
    "linear_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? log_decay, Tensor? rate, Tensor? state, "
    "Tensor? normalizer, int feature_map, float scale, int chunk, bool normalized, bool for_backward) "
    "-> (Tensor output, Tensor last_state, Tensor? last_normalizer, Tensor? shares, Tensor? states, Tensor? sums)";

// Outputs were normalised if `shares` is given.
inline constexpr const char* linear_attention_gradients_schema =
    "linear_attention_gradients(Tensor? grad_output, Tensor? grad_last_state, Tensor? grad_last_normalizer, Tensor query, "
    "Tensor key, Tensor value, Tensor? log_decay, Tensor? rate, Tensor? output, Tensor? shares, Tensor states, "
    "Tensor? sums, int feature_map, float scale, int chunk) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, "
    "Tensor? grad_log_decay, Tensor? grad_rate, Tensor grad_state, Tensor? grad_normalizer)";

void linear_attention_forward(StableIValue* stack, uint64_t, uint64_t);
void linear_attention_gradients(StableIValue* stack, uint64_t, uint64_t);

}  // namespace clearhead::torch
