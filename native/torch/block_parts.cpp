#include "block_parts.h"

#include "../src/invariance.h"

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
  for (size_t index = 0; index < (queries_alone ? 1 : spec.sources.size()); ++index)
    sources.push_back({index, sequences > 1 && index > 0 ? size_t{1} : size_t{0}, 0, spec.sources[index].layer});
  return sources;
}

bool reads_memory(const BlockCall& call, const BlockSpec& block, size_t index) {
  return call.tokens.size() > 1 && index + 1 == block.attentions.size();
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

// Rotates the tokens of each sequence in pages from its own position on: its last token is at its end.
static void rotate_sequences(const BlockCall& call, const AttentionSpec& spec, const Rotation& all) {
  const ch_tensor& heads = all.source;
  for_sequences(spec.pages, call.length, [&](int64_t b, int64_t first, int64_t rows, int64_t s) {
    Rotation rotation = all;
    rotation.batch = 1, rotation.rows = rows, rotation.first = spec.pages.lengths[s] - rows;
    rotation.source.data = static_cast<char*>(heads.data) + (b * heads.batch + first * heads.row) * size_of(call.dtype);
    if (spec.pages.lengths[s] > rotation.positions)
      fail("block", "a rotary table", "have " + std::to_string(spec.pages.lengths[s]) + " positions", spec.table->shape(),
           "Use ch.positions.");
    rotation.target = rotation.source;
    rotate(call.dtype, rotation);
  });
}

void rotate_heads(const BlockCall& call, const AttentionSpec& spec, const std::vector<ch_tensor>& heads, bool keys,
                  int64_t k_len, bool back) {
  if (spec.rotary == Rotary::none) return;
  const Tensor& table = *spec.table;
  for (size_t index = 0; index < (keys ? 2 : 1); ++index) {
    Rotation rotation;
    rotation.batch = call.batch, rotation.heads = index == 0 ? spec.heads : spec.kv_heads;
    rotation.rows = index == 0 ? call.length : k_len, rotation.columns = spec.head_dim;
    rotation.positions = table.size(0), rotation.table = table.as<float>(), rotation.back = back;
    rotation.source = heads[index];
    if (spec.rotary == Rotary::by_position && spec.cache == Cache::paged) {
      rotate_sequences(call, spec, rotation);
      continue;
    }
    if (spec.rotary == Rotary::by_position) {
      // With a growing cache, new keys have the positions of the query tokens.
      const bool follows_cache = spec.cache == Cache::grows;
      rotation.first = index == 0 || follows_cache ? (follows_cache ? spec.cached : spec.options.query_offset) : 0;
    } else if (table.size(0) != rotation.rows) {
      // Each token of the batch has its own cos/sin: the rows are one sequence.
      rotation.source.batch = 0, rotation.rows *= rotation.batch, rotation.batch = 1;
    }
    if (rotation.first < 0 || rotation.first > rotation.positions - rotation.rows)
      fail("block", "a rotary table", "have " + std::to_string(rotation.rows) + " positions from " + std::to_string(rotation.first),
           table.shape(), "Use ch.positions.");
    rotation.target = rotation.source;
    rotate(call.dtype, rotation);
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
  return work.k_len > CH_TILE || work.allowed.data != nullptr || work.blocks.data != nullptr || is_invariant();
}

}  // namespace clearhead::torch
