// The entry points of attention: check the whole description, then call the kernels of one instruction set.
#include <cmath>
#include <stdlib.h>

#include "checks.h"

namespace clearhead {
namespace {

// Keys or values, and their channels.
struct Rows {
  const ch_tensor& tensor;
  int64_t last;
};

int64_t dtype_size(const ch_attention& work) { return work.dtype == CH_FLOAT32 ? 4 : 2; }

int check_tensor(const ch_attention& work, const ch_tensor& tensor, int64_t heads, int64_t rows, int64_t last,
                 Access access) {
  const Layout layout = {{{work.batch, tensor.batch}, {heads, tensor.head}, {rows, tensor.row}}, last};
  return check_memory(tensor.data, layout, dtype_size(work), access);
}

// Keys or values of `batch` entries of `rows` keys, or of pages.
int check_cached(const ch_attention& work, const ch_tensor& tensor, int64_t batch, int64_t rows, int64_t last) {
  const Layout layout = {{{batch, tensor.batch}, {work.kv_heads, tensor.head}, {rows, tensor.row}},
                         work.quantized ? last + CH_SCALE_BYTES : last};
  return check_memory(tensor.data, layout, work.quantized ? 1 : dtype_size(work));
}

// A contiguous float32 [batch, heads, q_len, last]; check_counts ensures that it fits in memory.
int check_per_query(const ch_attention& work, const float* data, int64_t last) {
  const Layout layout = {{{work.batch, work.heads * work.q_len * last}, {work.heads, work.q_len * last},
                          {work.q_len, last}}, last};
  return check_memory(data, layout, sizeof(float));
}

// A table [batch, heads, rows, columns]; its last axis may be strided too.
int check_table(const ch_attention& work, const ch_table& table, int64_t rows, int64_t columns, int64_t size) {
  int64_t last = 0;
  if (table.column < 0) return CH_BAD_STRIDE;
  if (columns > 0 && (__builtin_mul_overflow(columns - 1, table.column, &last) ||
                      __builtin_add_overflow(last, int64_t{1}, &last)))
    return CH_BAD_STRIDE;
  const Layout layout = {{{work.batch, table.batch}, {work.heads, table.head}, {rows, table.row}}, last};
  return check_memory(table.data, layout, size);
}

int check_counts(const ch_attention& work) {
  for (int64_t number : {work.batch, work.heads, work.kv_heads, work.q_len, work.k_len}) {
    if (!is_count(number)) return CH_BAD_SHAPE;
  }
  for (int64_t number : {work.head_dim, work.value_dim}) {
    if (number < 1 || number > CH_MAX_HEAD_DIM) return CH_BAD_SHAPE;
  }
  if (work.kv_heads == 0 ? work.heads != 0 : work.heads % work.kv_heads != 0) return CH_BAD_SHAPE;
  if (!countable(work.batch, work.heads, work.q_len, CH_MAX_HEAD_DIM)) return CH_BAD_SHAPE;
  if (!countable(work.batch, work.kv_heads, work.k_len, CH_MAX_HEAD_DIM)) return CH_BAD_SHAPE;
  if (work.pages != nullptr && !countable(work.pages->sequences, work.kv_heads, work.k_len, CH_MAX_HEAD_DIM))
    return CH_BAD_SHAPE;
  if (work.query_offset < -max_position || work.query_offset > max_position) return CH_BAD_SHAPE;
  for (int64_t place : {work.first_batch, work.first_head, work.first_key}) {
    if (!is_place(place)) return CH_BAD_SHAPE;
  }
  if (!is_place(work.first_position)) return CH_BAD_SHAPE;
  return CH_OK;
}

int check_options(const ch_attention& work) {
  if (work.threads < 1 || work.threads > max_threads) return CH_BAD_OPTION;
  if (!std::isfinite(work.scale)) return CH_BAD_OPTION;
  if (work.quantized != 0 && work.quantized != 1) return CH_BAD_OPTION;
  // Written so that NaN fails.
  if (!(work.dropout >= 0.0 && work.dropout < 1.0)) return CH_BAD_OPTION;
  if (work.token_numbers == nullptr) return CH_OK;
  if (work.batch != 1 || work.pages != nullptr) return CH_BAD_OPTION;
  return check_memory(work.token_numbers, {{{1, 0}, {1, 0}, {1, 0}}, work.k_len}, sizeof(int64_t));
}

int check_band(int64_t bound) {
  return bound == INT64_MAX || (bound >= -max_position && bound <= max_position) ? CH_OK : CH_BAD_MASK;
}

int check_intervals(const ch_attention& work) {
  if (work.intervals < 0 || work.intervals > CH_MAX_INTERVALS) return CH_BAD_MASK;
  if (work.intervals == 0) return work.start == nullptr && work.stop == nullptr ? CH_OK : CH_BAD_MASK;
  const Layout layout = {{{work.batch, work.interval_batch}, {work.heads, work.interval_head}, {work.q_len, work.interval_row}},
                         work.intervals};
  CH_TRY(check_memory(work.start, layout, sizeof(int32_t)));
  return check_memory(work.stop, layout, sizeof(int32_t));
}

int check_blocks(const ch_attention& work) {
  if (work.blocks.data == nullptr) return work.block_size == 0 ? CH_OK : CH_BAD_MASK;
  if (work.block_size < 1 || !is_count(work.block_rows) || !is_count(work.block_columns)) return CH_BAD_MASK;
  const int64_t end = work.query_offset + work.q_len;
  if (work.q_len > 0 && (work.query_offset < 0 || (end - 1) / work.block_size >= work.block_rows)) return CH_BAD_MASK;
  if (work.k_len > 0 && (work.k_len - 1) / work.block_size >= work.block_columns) return CH_BAD_MASK;
  return check_table(work, work.blocks, work.block_rows, work.block_columns, 1);
}

int check_mask(const ch_attention& work) {
  CH_TRY(check_band(work.before));
  CH_TRY(check_band(work.after));
  CH_TRY(check_intervals(work));
  CH_TRY(check_blocks(work));
  return work.allowed.data == nullptr ? CH_OK : check_table(work, work.allowed, work.q_len, work.k_len, 1);
}

// Written axes must not overlap unless their stride is 0; a stride of 0 sums over its axis.
int check_rule_grad(const ch_attention& work, const ch_rule& rule, int64_t rows, int64_t columns) {
  if (rule.grad == nullptr) return CH_OK;
  Layout layout = {{{work.batch, rule.grad_batch}, {work.heads, rule.grad_head}, {rows, rule.grad_row}}, columns};
  for (Axis& axis : layout.axes) {
    if (axis.stride == 0 && axis.count > 1) axis.count = 1;
  }
  return check_memory(rule.grad, layout, sizeof(float), Access::write);
}

int check_slope(const ch_attention& work, const ch_rule& rule) {
  const Layout layout = {{{work.heads, rule.table.head}, {1, 0}, {1, 0}}, 1};
  return rule.grad == nullptr ? check_memory(rule.table.data, layout, sizeof(float)) : CH_BAD_RULE;
}

int check_relative(const ch_attention& work, const ch_rule& rule) {
  if (rule.reach < 0 || rule.reach > max_count / 2 - 1) return CH_BAD_RULE;
  const int64_t columns = 2 * int64_t{rule.reach} + 1;
  const Layout layout = {{{work.heads, rule.table.head}, {1, 0}, {1, 0}}, columns};
  CH_TRY(check_memory(rule.table.data, layout, sizeof(float)));
  ch_rule shared = rule;
  shared.grad_batch = shared.grad_row = 0;
  return check_rule_grad(work, shared, 1, columns);
}

int check_dense(const ch_attention& work, const ch_rule& rule) {
  if (rule.table.column != 0 && rule.table.column != 1) return CH_BAD_RULE;
  CH_TRY(check_table(work, rule.table, work.q_len, work.k_len, sizeof(float)));
  return check_rule_grad(work, rule, work.q_len, work.k_len);
}

int check_softcap(const ch_rule& rule) {
  return std::isfinite(rule.value) && rule.value > 0.0f && rule.grad == nullptr ? CH_OK : CH_BAD_RULE;
}

int check_rule(const ch_attention& work, const ch_rule& rule) {
  switch (rule.kind) {
    case CH_RULE_SLOPE: return check_slope(work, rule);
    case CH_RULE_RELATIVE: return check_relative(work, rule);
    case CH_RULE_DENSE: return check_dense(work, rule);
    case CH_RULE_SOFTCAP: return check_softcap(rule);
    default: return CH_BAD_RULE;
  }
}

int check_rules(const ch_attention& work) {
  if (work.num_rules < 0 || work.num_rules > CH_MAX_RULES) return CH_BAD_RULE;
  int caps = 0, lines = 0;
  for (int i = 0; i < work.num_rules; ++i) {
    CH_TRY(check_rule(work, work.rules[i]));
    const int kind = work.rules[i].kind;
    caps += kind == CH_RULE_SOFTCAP, lines += kind == CH_RULE_SLOPE || kind == CH_RULE_RELATIVE;
  }
  // Backward saves the derivative of one soft-cap.
  if (caps > 1) return CH_BAD_RULE;
  // Every head has a vector of distances for each diagonal rule.
  if (lines > 0 && !countable(work.batch, work.heads, work.q_len + work.k_len, lines)) return CH_BAD_SHAPE;
  if (work.sink == nullptr) return CH_OK;
  return check_memory(work.sink, {{{work.heads, work.sink_head}, {1, 0}, {1, 0}}, 1}, sizeof(float));
}

// The starts of the queries of each sequence.
int check_query_start(const ch_attention& work, const ch_pages& pages) {
  if (pages.query_start == nullptr) return work.batch == pages.sequences ? CH_OK : CH_BAD_PAGES;
  if (work.batch != 1) return CH_BAD_PAGES;
  CH_TRY(check_memory(pages.query_start, {{{1, 0}, {1, 0}, {1, 0}}, pages.sequences + 1}, sizeof(int32_t)));
  if (pages.query_start[0] != 0 || pages.query_start[pages.sequences] != work.q_len) return CH_BAD_PAGES;
  for (int64_t s = 0; s < pages.sequences; ++s) {
    if (pages.query_start[s] > pages.query_start[s + 1]) return CH_BAD_PAGES;
  }
  return CH_OK;
}

// Every length and every entry of the table that is read.
int check_table_of_pages(const ch_attention& work, const ch_pages& pages) {
  const Layout table = {{{1, 0}, {1, 0}, {pages.sequences, pages.table_row}}, pages.columns};
  CH_TRY(check_memory(pages.table, table, sizeof(int32_t)));
  CH_TRY(check_memory(pages.lengths, {{{1, 0}, {1, 0}, {1, 0}}, pages.sequences}, sizeof(int32_t)));
  for (int64_t s = 0; s < pages.sequences; ++s) {
    const int64_t length = pages.lengths[s], columns = (length + pages.size - 1) / pages.size;
    if (length < 0 || length > work.k_len || columns > pages.columns) return CH_BAD_PAGES;
    for (int64_t column = 0; column < columns; ++column) {
      const int32_t page = pages.table[s * pages.table_row + column];
      if (page < 0 || page >= pages.count) return CH_BAD_PAGES;
    }
  }
  return CH_OK;
}

int check_pages(const ch_attention& work) {
  const ch_pages& pages = *work.pages;
  for (int64_t number : {pages.sequences, pages.columns, pages.count, pages.size}) {
    if (!is_count(number)) return CH_BAD_PAGES;
  }
  const bool masked = work.intervals != 0 || work.allowed.data != nullptr || work.blocks.data != nullptr;
  if (pages.size < 1 || masked || work.dropout != 0.0 || work.statistics != nullptr || work.softmax != nullptr ||
      work.output32 != nullptr || work.query_offset != 0 || work.first_position != 0)
    return CH_BAD_PAGES;
  for (int i = 0; i < work.num_rules && i < CH_MAX_RULES; ++i) {
    if (work.rules[i].kind == CH_RULE_DENSE) return CH_BAD_PAGES;
  }
  CH_TRY(check_query_start(work, pages));
  CH_TRY(check_table_of_pages(work, pages));
  for (const auto& [tensor, last] : {Rows{work.key, work.head_dim}, Rows{work.value, work.value_dim}}) {
    CH_TRY(check_cached(work, tensor, pages.count, pages.size, last));
  }
  return CH_OK;
}

int check_inputs(const ch_attention& work) {
  CH_TRY(check_tensor(work, work.query, work.heads, work.q_len, work.head_dim, Access::read));
  if (work.pages != nullptr) return check_pages(work);
  CH_TRY(check_cached(work, work.key, work.batch, work.k_len, work.head_dim));
  return check_cached(work, work.value, work.batch, work.k_len, work.value_dim);
}

int check_rows_of(const ch_attention& work, const float* data) {
  return data == nullptr ? CH_OK : check_per_query(work, data, 1);
}

// [batch, heads, rows, columns], contiguous; both counts are at most `max_count`.
int check_contiguous(const ch_attention& work, const void* data, int64_t rows, int64_t columns, int64_t size) {
  if (!countable(work.batch, work.heads, rows, columns)) return CH_BAD_STATISTIC;
  const Layout layout = {{{work.batch, work.heads * rows * columns}, {work.heads, rows * columns}, {rows, columns}},
                         columns};
  return check_memory(data, layout, size, Access::write);
}

int check_top(const ch_attention& work, const ch_statistics& s) {
  if (s.top_k < 0 || s.top_k > work.k_len) return CH_BAD_STATISTIC;
  if (s.top_k == 0) return CH_OK;
  CH_TRY(check_contiguous(work, s.top_weights, work.q_len, s.top_k, sizeof(float)));
  return check_contiguous(work, s.top_indices, work.q_len, s.top_k, sizeof(int64_t));
}

int check_weighted(const ch_attention& work, const ch_statistics& s) {
  if (!is_count(s.num_weights)) return CH_BAD_STATISTIC;
  if (s.num_weights == 0) return CH_OK;
  CH_TRY(check_contiguous(work, s.weighted, s.num_weights, work.k_len, sizeof(float)));
  const Layout read = {{{work.batch, s.weight_batch}, {work.heads, s.weight_head}, {s.num_weights, work.q_len}},
                       work.q_len};
  return check_memory(s.row_weights, read, sizeof(float));
}

int check_heatmap(const ch_attention& work, const ch_statistics& s) {
  if (!is_count(s.heatmap)) return CH_BAD_STATISTIC;
  if (s.heatmap == 0) return CH_OK;
  const int64_t q_tiles = (work.q_len + s.heatmap - 1) / s.heatmap, k_tiles = (work.k_len + s.heatmap - 1) / s.heatmap;
  CH_TRY(check_contiguous(work, s.heatmap_max, q_tiles, k_tiles, sizeof(float)));
  return check_contiguous(work, s.heatmap_mean, q_tiles, k_tiles, sizeof(float));
}

// No two queries may share a slot: two threads would write to it.
int check_slots(const ch_attention& work, const ch_statistics& s) {
  bool* used = static_cast<bool*>(calloc(static_cast<size_t>(s.num_rows), sizeof(bool)));
  if (used == nullptr) return CH_NO_MEMORY;
  bool distinct = true;
  for (int64_t i = 0; i < work.q_len && distinct; ++i) {
    const int32_t slot = s.row_slots[i];
    if (slot < 0) continue;
    distinct = !used[slot];
    used[slot] = true;
  }
  free(used);
  return distinct ? CH_OK : CH_BAD_STATISTIC;
}

int check_chosen_rows(const ch_attention& work, const ch_statistics& s) {
  if (!is_count(s.num_rows)) return CH_BAD_STATISTIC;
  if (s.num_rows == 0) return CH_OK;
  CH_TRY(check_contiguous(work, s.rows, s.num_rows, work.k_len, sizeof(float)));
  CH_TRY(check_memory(s.row_slots, {{{1, 0}, {1, 0}, {1, 0}}, work.q_len}, sizeof(int32_t)));
  for (int64_t i = 0; i < work.q_len; ++i) {
    if (s.row_slots[i] < -1 || s.row_slots[i] >= s.num_rows) return CH_BAD_STATISTIC;
  }
  return check_slots(work, s);
}

int check_statistics(const ch_attention& work) {
  if (work.statistics == nullptr) return CH_OK;
  const ch_statistics& s = *work.statistics;
  for (const float* one : {s.max_score, s.entropy, s.distance, s.sink}) CH_TRY(check_rows_of(work, one));
  if (s.ties != nullptr) CH_TRY(check_per_query(work, s.ties, 2));
  if (s.sink_keys < 0) return CH_BAD_STATISTIC;
  CH_TRY(check_top(work, s));
  if (s.received != nullptr) CH_TRY(check_contiguous(work, s.received, 1, work.k_len, sizeof(float)));
  CH_TRY(check_weighted(work, s));
  CH_TRY(check_heatmap(work, s));
  return check_chosen_rows(work, s);
}

int check_forward(const ch_attention& work) {
  CH_TRY(check_tensor(work, work.output, work.heads, work.q_len, work.value_dim, Access::write));
  if (work.output32 != nullptr) CH_TRY(check_per_query(work, work.output32, work.value_dim));
  if (work.softmax != nullptr) CH_TRY(check_per_query(work, work.softmax, 2));
  CH_TRY(check_statistics(work));
  return work.lse == nullptr ? CH_OK : check_per_query(work, work.lse, 1);
}

int check_statistics_gradients(const ch_attention& work) {
  if (work.statistics == nullptr) return CH_OK;
  const ch_statistics& s = *work.statistics;
  for (const float* one : {s.grad_max, s.grad_entropy, s.grad_distance, s.grad_sink}) CH_TRY(check_rows_of(work, one));
  if (s.sink_keys < 0) return CH_BAD_STATISTIC;
  if (s.grad_max != nullptr) CH_TRY(check_per_query(work, s.ties, 2));
  return s.grad_received == nullptr ? CH_OK : check_contiguous(work, s.grad_received, 1, work.k_len, sizeof(float));
}

// Whether backward reads forward's output: with all of a row's keys in one tile, its delta follows from its weights.
bool needs_output(const ch_attention& work) {
  if (work.partial_rows && work.grad_lse != nullptr) return false;
  return work.k_len > CH_TILE || work.allowed.data != nullptr || work.blocks.data != nullptr ||
         work.statistics != nullptr || work.partial_rows != 0;
}

int check_output(const ch_attention& work) {
  if (work.output32 != nullptr || work.dtype != CH_FLOAT32) return check_per_query(work, work.output32, work.value_dim);
  return check_tensor(work, work.output, work.heads, work.q_len, work.value_dim, Access::read);
}

int check_backward(const ch_attention& work) {
  if (work.quantized != 0) return CH_BAD_OPTION;
  if (work.pages != nullptr) return CH_BAD_PAGES;
  if (work.partial_rows != 0 && work.partial_rows != 1) return CH_BAD_OPTION;
  if (work.partial_rows != 0 && work.statistics != nullptr) return CH_BAD_STATISTIC;
  const bool given = work.output32 != nullptr || work.output.data != nullptr;
  if (given || needs_output(work)) CH_TRY(check_output(work));
  CH_TRY(check_per_query(work, work.softmax, 2));
  CH_TRY(check_per_query(work, work.delta, 1));
  if (work.grad_lse != nullptr) CH_TRY(check_per_query(work, work.grad_lse, 1));
  CH_TRY(check_statistics_gradients(work));
  CH_TRY(check_tensor(work, work.grad_output, work.heads, work.q_len, work.value_dim, Access::read));
  const bool of_keys = work.grad_key.data != nullptr;
  if (of_keys != (work.grad_value.data != nullptr)) return CH_BAD_POINTER;
  if (work.grad_query.data != nullptr || !of_keys)
    CH_TRY(check_tensor(work, work.grad_query, work.heads, work.q_len, work.head_dim, Access::write));
  if (!of_keys) return CH_OK;
  CH_TRY(check_tensor(work, work.grad_key, work.kv_heads, work.k_len, work.head_dim, Access::write));
  return check_tensor(work, work.grad_value, work.kv_heads, work.k_len, work.value_dim, Access::write);
}

using Check = int (*)(const ch_attention& work);
using Kernel = int (*Kernels::*)(const ch_attention* work);

int run(const ch_attention* work, Check check, Kernel kernel) {
  const Kernels* kernels = nullptr;
  CH_TRY(check_library(work, &kernels));
  if (work->dtype != CH_FLOAT32 && work->dtype != CH_BFLOAT16 && work->dtype != CH_FLOAT16) return CH_BAD_DTYPE;
  CH_TRY(check_counts(*work));
  CH_TRY(check_options(*work));
  CH_TRY(check_inputs(*work));
  CH_TRY(check_mask(*work));
  CH_TRY(check_rules(*work));
  CH_TRY(check(*work));
  if (work->batch == 0 || work->heads == 0) return CH_OK;
  return (kernels->*kernel)(work);
}

}  // namespace
}  // namespace clearhead

extern "C" {

int ch_forward(const ch_attention* work) {
  return clearhead::run(work, clearhead::check_forward, &clearhead::Kernels::forward);
}

int ch_backward(const ch_attention* work) {
  return clearhead::run(work, clearhead::check_backward, &clearhead::Kernels::backward);
}

}  // extern "C"
