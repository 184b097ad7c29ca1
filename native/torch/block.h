// A transformer block as data: attentions with their projections, a feedforward, norms and residuals.
//
// Three lists describe blocks: integers, floats and tensors, which Python writes (clearhead/ops/block.py) and
// `read_blocks` reads in the same order. A block with `residual` off is a bare attention or a bare feedforward.
#pragma once

#include <deque>

#include "attention.h"
#include "calls.h"
#include "pages.h"

namespace clearhead::torch {

// A tensor of the list and its index, which its gradient has too; no tensor for None.
struct Slot {
  const Tensor* tensor = nullptr;
  int64_t index = -1;
};

struct LinearSpec {
  Slot weight, bias;
  Linear layer;
};

struct NormSpec {
  Slot weight, bias;
  Norm norm;
};

// How a weight is stored: as its tensor, packed into panels, as integers of 8 or 4 bits with scales, or as 8 bits in panels.
enum class Stored : int64_t { plain = 0, panels = 1, int8 = 2, int4 = 3, int8_panels = 4 };
enum class Rotary : int64_t { none = 0, by_position = 1, by_token = 2 };
enum class Cache : int64_t { none = 0, grows = 1, memory = 2, paged = 3 };

struct AttentionSpec {
  std::vector<LinearSpec> sources;  // of queries, keys and values; or one fused layer for all three
  LinearSpec last;  // the output projection
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  std::vector<NormSpec> head_norms;  // QK norms, without gradients only
  Rotary rotary = Rotary::none;
  const Tensor* table = nullptr;  // [positions, head_dim]: cosines, then sines
  Cache cache = Cache::none;
  const Tensor *cached_key = nullptr, *cached_value = nullptr;  // [batch, kv_heads, capacity, head_dim]
  int64_t cached = 0;                                           // tokens in the cache
  PageTable page_table;  // of a paged cache, whose keys and values are pages
  ch_pages pages = {};
  AttentionOptions options;
};

struct FeedForwardSpec {
  std::vector<LinearSpec> layers;  // gate (if there is one), up and down projections
  int32_t activation = CH_PLAIN, dropped = 0;
  Seed seed;
  bool gated() const { return layers.size() == 3; }
};

// The parts around a sublayer: its norm, the optional norm of its result, and dropout of its result.
struct ConnectionSpec {
  NormSpec norm;
  bool has_result_norm = false;
  NormSpec result_norm;
  int32_t dropped = 0;
  Seed seed;
};

struct BlockSpec {
  bool residual = true, pre_norm = true;
  std::vector<AttentionSpec> attentions;
  bool has_feedforward = false;
  FeedForwardSpec feedforward;
  std::vector<ConnectionSpec> connections;  // one per sublayer, if there are residuals

  size_t sublayers() const { return attentions.size() + (has_feedforward ? 1 : 0); }
};

// The arguments of a call. Owns copies of tensors that the kernels cannot read in place.
struct BlockCall {
  std::vector<Tensor> tokens;  // [batch, len, width], and the memory for cross-attention
  std::vector<Tensor> tensors, caches;
  std::vector<BlockSpec> blocks;
  std::vector<Tensor> copies;
  Dtype dtype = Dtype::float32;
  int64_t batch = 0, length = 0, width = 0;
};

// Reads and checks everything except the tensors of mask and rules, which attention checks.
void read_blocks(BlockCall& call, const std::vector<int64_t>& integers, const std::vector<double>& numbers);

// Raises for calls whose gradients `block_backward` does not compute.
void check_training(const BlockCall& call);

// Width of a block's output.
int64_t output_width(const BlockCall& call, const BlockSpec& block);

// Blocks in sequence, without gradients; and one block, with the tensors saved for backward. torch functionalizes an
// operator that writes to its arguments only if it returns single tensors, so there are two operators.
void block(StableIValue* stack, uint64_t, uint64_t);
void block_forward(StableIValue* stack, uint64_t, uint64_t);
void block_backward(StableIValue* stack, uint64_t, uint64_t);

}  // namespace clearhead::torch
