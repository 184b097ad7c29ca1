#include "block_parts.h"

#include <algorithm>

namespace clearhead::torch {

std::vector<Source> sources_of(const AttentionSpec& spec, size_t sequences, Dtype dtype) {
  std::vector<Source> sources;
  const bool queries_alone = spec.cache == Cache::memory;
  if (spec.sources.size() == 1 && (sequences > 1 || queries_alone)) {
    // Queries read other tokens than keys and values, so one fused layer becomes two GEMMs.
    const Linear& layer = spec.sources[0].layer;
    const int64_t of_queries = spec.heads * spec.head_dim;
    sources.push_back({0, 0, 0, layer.outputs_from(0, of_queries, dtype)});
    if (!queries_alone) sources.push_back({0, 1, of_queries, layer.outputs_from(of_queries, layer.out - of_queries, dtype)});
    return sources;
  }
  for (size_t place = 0; place < (queries_alone ? 1 : spec.sources.size()); ++place)
    sources.push_back({place, sequences > 1 && place > 0 ? size_t{1} : size_t{0}, 0, spec.sources[place].layer});
  return sources;
}

bool reads_memory(const BlockCall& call, const BlockSpec& block, size_t place) {
  return call.tokens.size() > 1 && place + 1 == block.attentions.size();
}

ch_tensor heads_in(const Matrix& rows, int64_t first_channel, int64_t length, int64_t head_dim, Dtype dtype) {
  return {rows.columns_from(first_channel, 0, dtype).data, length * rows.step, head_dim, rows.step};
}

std::vector<ch_tensor> split_heads(const AttentionSpec& spec, const std::vector<Matrix>& projected, int64_t q_len,
                                   int64_t k_len, Dtype dtype) {
  const int64_t dim = spec.head_dim, of_queries = spec.heads * dim, of_keys = spec.kv_heads * dim;
  std::vector<ch_tensor> heads;
  if (projected.size() == 1) {
    heads.push_back(heads_in(projected[0], 0, q_len, dim, dtype));
    if (projected[0].columns > of_queries) {
      heads.push_back(heads_in(projected[0], of_queries, q_len, dim, dtype));
      heads.push_back(heads_in(projected[0], of_queries + of_keys, q_len, dim, dtype));
    }
    return heads;
  }
  heads.push_back(heads_in(projected[0], 0, q_len, dim, dtype));
  heads.push_back(heads_in(projected[1], 0, k_len, dim, dtype));
  if (projected.size() == 2) heads.push_back(heads_in(projected[1], of_keys, k_len, dim, dtype));
  else heads.push_back(heads_in(projected[2], 0, k_len, dim, dtype));
  return heads;
}

void rotate_heads(const BlockCall& call, const AttentionSpec& spec, const std::vector<ch_tensor>& heads, bool keys,
                  int64_t k_len, bool back) {
  if (spec.rotary == Rotary::none) return;
  const Tensor& table = *spec.table;
  for (size_t place = 0; place < (keys ? 2 : 1); ++place) {
    Rotation turn;
    turn.batch = call.batch, turn.heads = place == 0 ? spec.heads : spec.kv_heads;
    turn.rows = place == 0 ? call.length : k_len, turn.columns = spec.head_dim;
    turn.positions = table.size(0), turn.table = table.as<float>(), turn.back = back;
    turn.source = heads[place];
    if (spec.rotary == Rotary::by_position) {
      // With a growing cache, new keys have the positions of the query tokens.
      const bool follows_cache = spec.cache == Cache::grows;
      turn.first = place == 0 || follows_cache ? (follows_cache ? spec.cached : spec.options.query_offset) : 0;
    } else if (table.size(0) != turn.rows) {
      // Each token of the batch has its own cos/sin: the rows are one sequence.
      turn.source.batch = 0, turn.rows *= turn.batch, turn.batch = 1;
    }
    if (turn.first < 0 || turn.first > turn.positions - turn.rows)
      fail("block", "a rotary table", "have " + std::to_string(turn.rows) + " positions from " + std::to_string(turn.first),
           table.shape(), "Use ch.positions.");
    turn.target = turn.source;
    rotate(call.dtype, turn);
  }
}

ch_attention describe_heads(const BlockCall& call, const AttentionSpec& spec, int64_t k_len) {
  ch_attention work = describe_attention(call.dtype);
  work.batch = call.batch, work.heads = spec.heads, work.kv_heads = spec.kv_heads;
  work.q_len = call.length, work.k_len = k_len, work.head_dim = work.value_dim = spec.head_dim;
  describe_options("block", work, spec.options);
  if (spec.cache == Cache::grows) work.query_offset = spec.cached;
  return work;
}

bool saves_output(const ch_attention& work) {
  return work.k_len > CH_TILE || work.allowed.data != nullptr || work.blocks.data != nullptr;
}

}  // namespace clearhead::torch
