// Shared by forward and backward of a block: the position of heads in projections, and which tokens each projection
// reads.
#pragma once

#include "block.h"

namespace clearhead::torch {

// A GEMM that computes queries, keys or values: the layer, its input tokens, and the rows of its weight.
struct Source {
  size_t index;  // index in AttentionSpec::sources
  size_t tokens;  // 0: the tokens of the queries; 1: the memory of cross-attention
  int64_t first;  // first output channel of the layer
  Linear layer;
};

// The GEMMs of an attention with this many input sequences; only queries if keys and values are cached already.
std::vector<Source> sources_of(const AttentionSpec& spec, size_t sequences, Dtype dtype);

// Whether keys and values are computed from other tokens than queries (cross-attention).
bool reads_memory(const BlockCall& call, const BlockSpec& block, size_t index);

// Heads [batch, heads, len, head_dim] that are side by side in the rows of a projection.
ch_tensor heads_in(const Matrix& rows, int64_t first_channel, int64_t length, int64_t head_dim, Dtype dtype);

// Queries, keys and values in the projections, in this order; absent ones are left out.
std::vector<ch_tensor> split_heads(const AttentionSpec& spec, const std::vector<Matrix>& projected, int64_t q_len,
                                   int64_t k_len, Dtype dtype);

// Applies RoPE to queries, and to keys if `keys` is set, in place.
void rotate_heads(const BlockCall& call, const AttentionSpec& spec, const std::vector<ch_tensor>& heads, bool keys,
                  int64_t k_len, bool back);

// A checked description of attention over heads of these lengths.
ch_attention describe_heads(const BlockCall& call, const AttentionSpec& spec, int64_t k_len);

// Whether backward reads forward's output: with one tile of keys, a row's delta follows from its weights.
bool saves_output(const ch_attention& work);

inline Matrix matrix_of(const Tensor& tensor) {
  const int64_t columns = tensor.size(tensor.dim() - 1);
  return {tensor.data(), columns == 0 ? 0 : tensor.elements() / columns, columns, columns};
}

// Activations whose backward reads their output; all others save derivatives.
inline bool activation_saves_output(int32_t activation) { return activation == CH_RELU; }

}  // namespace clearhead::torch
