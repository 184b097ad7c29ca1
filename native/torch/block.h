// A block of a transformer: attentions with their projections, a feedforward, norms and residuals, as data.
//
// Three lists say what a block is: integers, floats and tensors, which Python writes (clearhead/ops/block.py) and
// `read_blocks` reads in the same order. A block with `residual` off is a bare attention or a bare feedforward.
#pragma once

#include <deque>

#include "attention.h"
#include "calls.h"

namespace clearhead::torch {

// A tensor of the list, and its place there, where its gradient goes; no tensor for None.
struct Slot {
  const Tensor* tensor = nullptr;
  int64_t place = -1;
};

struct LinearSpec {
  Slot weight, bias;
  Linear layer;
};

struct NormSpec {
  Slot weight, bias;
  Norm norm;
};

enum class Rotary : int64_t { none = 0, by_position = 1, by_token = 2 };
enum class Cache : int64_t { none = 0, grows = 1, memory = 2 };

struct AttentionSpec {
  std::vector<LinearSpec> sources;  // of queries, keys and values; or one that makes all three side by side
  LinearSpec last;                  // mixes the heads
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  std::vector<NormSpec> head_norms;  // of each head's queries and keys, without gradients alone
  Rotary rotary = Rotary::none;
  const Tensor* table = nullptr;  // [positions, head_dim]: cosines, then sines
  Cache cache = Cache::none;
  const Tensor *cached_key = nullptr, *cached_value = nullptr;  // [batch, kv_heads, capacity, head_dim]
  int64_t cached = 0;                                           // tokens in the cache
  AttentionOptions options;
};

struct FeedForwardSpec {
  std::vector<LinearSpec> layers;  // of the gate, where there is one, of what expands and of what contracts
  int32_t activation = CH_PLAIN, dropped = 0;
  uint64_t seed = 0;
  bool gated() const { return layers.size() == 3; }
};

// What stands around a sublayer: its norm, the norm of its result where there is one, and dropout of its result.
struct AroundSpec {
  NormSpec norm;
  bool has_result_norm = false;
  NormSpec result_norm;
  int32_t dropped = 0;
  uint64_t seed = 0;
};

struct BlockSpec {
  bool residual = true, pre_norm = true;
  std::vector<AttentionSpec> attentions;
  bool has_feedforward = false;
  FeedForwardSpec feedforward;
  std::vector<AroundSpec> around;  // one for each sublayer, where there are residuals

  size_t sublayers() const { return attentions.size() + (has_feedforward ? 1 : 0); }
};

// The arguments of a call. Copies of what the kernels cannot read where it lies live as long as it.
struct BlockCall {
  std::vector<Tensor> tokens;  // [batch, len, width], and the memory where an attention reads one
  std::vector<Tensor> tensors, caches;
  std::vector<BlockSpec> blocks;
  std::vector<Tensor> copies;
  Dtype dtype = Dtype::float32;
  int64_t batch = 0, length = 0, width = 0;
};

// Reads and checks everything but the mask's and rules' tensors, which attention checks.
void read_blocks(BlockCall& call, const std::vector<int64_t>& integers, const std::vector<double>& numbers);

// Refuses calls whose gradients `block_backward` does not compute.
void check_training(const BlockCall& call);

// Width of what a block gives.
int64_t output_width(const BlockCall& call, const BlockSpec& block);

// Blocks one after the other, without gradients; and one block, with what backward reads. torch functionalizes an operator
// that writes to its arguments only if it returns single tensors, so they are two.
void block(StableIValue* stack, uint64_t, uint64_t);
void block_forward(StableIValue* stack, uint64_t, uint64_t);
void block_backward(StableIValue* stack, uint64_t, uint64_t);

}  // namespace clearhead::torch
