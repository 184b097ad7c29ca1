// Attention as operators: the arguments of a call, and the description that the kernels take.
#pragma once

#include "arguments.h"

namespace clearhead::torch {

// Score rules in order, a sink, and the parts of the mask, whose conjunction is the mask; absent ones are undefined.
struct Rules {
  std::vector<int64_t> kinds;  // enum ch_rule_kind
  std::vector<double> values;  // the cap of a soft-cap
  std::vector<Tensor> tables;  // float32, of every rule but soft-caps, in their order
  Tensor sink;                 // [heads] or [1], float32
};

struct Mask {
  int64_t before = INT64_MAX, after = INT64_MAX;
  Tensor start, stop;  // [batch, heads, q_len, intervals], int32, contiguous; sizes may be 1 to broadcast
  Tensor allowed;  // [batch, heads, q_len, k_len], bool; sizes may be 1 to broadcast
  Tensor blocks;       // [batch, heads, query blocks, key blocks]; bool
  int64_t block_size = 0;
};

struct AttentionOptions {
  double scale = 1.0, dropout = 0.0;
  uint64_t seed = 0;
  int64_t query_offset = 0;
  int64_t first_batch = 0, first_head = 0, first_key = 0;  // places of dropout, see ch_attention
  int64_t first_position = 0;
  Tensor token_numbers;  // [k_len], int64, contiguous; see ch_attention
  Mask mask;
  Rules rules;
};

// Reads the arguments after `scale`, in the order of the schema.
AttentionOptions read_options(Arguments& arguments, double scale);

// A description of attention of these sizes; query, key and value are set by the caller.
ch_attention describe_attention(Dtype dtype);

// Writes scale, dropout, mask and rules into a description whose sizes are set.
void describe_options(const char* function, ch_attention& work, const AttentionOptions& options);

inline constexpr const char* attention_options_schema =
    "int? before=None, int? after=None, float dropout=0.0, int seed=0, SymInt query_offset=0, "
    "Tensor? start=None, Tensor? stop=None, Tensor? allowed=None, Tensor? blocks=None, int block_size=0, "
    "int[]? rule_kinds=None, float[]? rule_values=None, Tensor[]? rule_tables=None, Tensor? sink=None, "
    "int first_batch=0, int first_head=0, int first_key=0, int first_position=0, "
    "Tensor? token_numbers=None";

void attention_forward(StableIValue* stack, uint64_t, uint64_t);
void attention_gradients(StableIValue* stack, uint64_t, uint64_t);

}  // namespace clearhead::torch
