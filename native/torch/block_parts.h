// What forward and backward of a block share: how heads lie in projections, and what reads which tokens.
#pragma once

#include "block.h"

namespace clearhead::torch {

// A product that queries, keys or values come from: whose layer's, on which tokens, and the part of the layer.
struct Source {
  size_t place;   // in AttentionSpec::sources
  size_t tokens;  // 0 for those that attend, 1 for the memory
  int64_t first;  // output of the layer that the part begins with
  Linear layer;
};

// Those of an attention that reads as many sequences; queries alone where keys and values are cached already.
std::vector<Source> sources_of(const AttentionSpec& spec, size_t sequences, Dtype dtype);

// Whether keys and values come from other tokens than queries.
bool reads_memory(const BlockCall& call, const BlockSpec& block, size_t place);

// Heads [batch, heads, len, head_dim] that lie side by side in rows of a projection.
ch_tensor heads_in(const Matrix& rows, int64_t first_channel, int64_t length, int64_t head_dim, Dtype dtype);

// Queries, keys and values in the projections, in this order, as many as there are.
std::vector<ch_tensor> split_heads(const AttentionSpec& spec, const std::vector<Matrix>& projected, int64_t q_len,
                                   int64_t k_len, Dtype dtype);

// Rotates queries, and keys where `keys` says so, in place.
void rotate_heads(const BlockCall& call, const AttentionSpec& spec, const std::vector<ch_tensor>& heads, bool keys,
                  int64_t k_len, bool back);

// A description of the attention on heads of these lengths, checked.
ch_attention describe_heads(const BlockCall& call, const AttentionSpec& spec, int64_t k_len);

// Whether backward reads forward's output: with one tile of keys a row's delta follows from its weights.
bool saves_output(const ch_attention& work);

inline Matrix matrix_of(const Tensor& tensor) {
  const int64_t columns = tensor.size(tensor.dim() - 1);
  return {tensor.data(), columns == 0 ? 0 : tensor.elements() / columns, columns, columns};
}

// Activations whose backward reads their output; the others' reads slopes.
inline bool keeps_output(int32_t activation) { return activation == CH_RELU; }

}  // namespace clearhead::torch
