// The entry points: nothing of a description is followed before every count, stride and pointer in it has been
// held against the others; then the kernels of one instruction set do the work.
#include <cmath>
#include <initializer_list>
#include <pthread.h>

#include "isa.h"
#include "scratch.h"

#define CH_DECLARE(set)                       \
  namespace set {                             \
  extern const clearhead::Kernels kernels;    \
  }
#ifdef CH_WITH_AVX512BF16
CH_DECLARE(avx512bf16)
#endif
#ifdef CH_WITH_AVX512
CH_DECLARE(avx512)
#endif
#ifdef CH_WITH_AVX2
CH_DECLARE(avx2)
#endif
CH_DECLARE(baseline)

namespace clearhead {
namespace {

// ---- instruction sets -------------------------------------------------------------------------------------

struct Set {
  const char* name;
  bool (*usable)();
  const Kernels* kernels;
};

#if defined(__x86_64__)
// The compiler's own check includes whether the operating system saves the registers.
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("f16c");
}
[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
[[maybe_unused]] bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif
bool always() { return true; }

const Set sets[] = {
#ifdef CH_WITH_AVX512BF16
    {"avx512bf16", has_avx512bf16, &avx512bf16::kernels},
#endif
#ifdef CH_WITH_AVX512
    {"avx512", has_avx512, &avx512::kernels},
#endif
#ifdef CH_WITH_AVX2
    {"avx2", has_avx2, &avx2::kernels},
#endif
    {"baseline", always, &baseline::kernels},
};
constexpr int num_sets = sizeof(sets) / sizeof(sets[0]);

// ---- forks ------------------------------------------------------------------------------------------------

bool forked = false;

void note_fork() { forked = true; }

__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, note_fork); }

// ---- sizes, strides, pointers -----------------------------------------------------------------------------

// Positions stay far enough from the ends of int64 that sums and differences of two of them fit.
constexpr int64_t farthest = int64_t{1} << 48;
constexpr int64_t most = INT32_MAX;
constexpr int most_threads = 4096;
// No process has more memory to address.
constexpr int64_t most_bytes = int64_t{1} << 56;

struct Axis {
  int64_t count, stride;
};

struct Layout {
  Axis axes[3];
  int64_t last;  // elements of the contiguous last axis, or how far a strided one reaches
};

enum class Access { read, write };

// Elements from the first to one past the last that is touched; -1 where a stride is negative or the sum too large.
int64_t reach(const Layout& layout) {
  int64_t sum = layout.last;
  bool empty = layout.last == 0;
  for (const Axis& axis : layout.axes) {
    if (axis.stride < 0) return -1;
    if (axis.count == 0) empty = true;
    int64_t step = 0;
    if (axis.count > 1 && (__builtin_mul_overflow(axis.count - 1, axis.stride, &step) ||
                           __builtin_add_overflow(sum, step, &sum)))
      return -1;
  }
  return empty ? 0 : sum;
}

// Whether no element has two places: each axis steps over everything that the axes of smaller stride cover.
bool separate(const Layout& layout) {
  int64_t covered = layout.last;
  bool done[3] = {false, false, false};
  for (int round = 0; round < 3; ++round) {
    int next = -1;
    for (int i = 0; i < 3; ++i) {
      if (!done[i] && (next < 0 || layout.axes[i].stride < layout.axes[next].stride)) next = i;
    }
    done[next] = true;
    const Axis& axis = layout.axes[next];
    if (axis.count <= 1) continue;
    if (axis.stride < covered) return false;
    covered += (axis.count - 1) * axis.stride;
  }
  return true;
}

int check_memory(const void* data, const Layout& layout, int64_t size, Access access = Access::read) {
  const int64_t elements = reach(layout);
  int64_t bytes = 0;
  if (elements < 0 || __builtin_mul_overflow(elements, size, &bytes) || bytes > most_bytes) return CH_BAD_STRIDE;
  if (bytes == 0) return CH_OK;
  const uintptr_t first = reinterpret_cast<uintptr_t>(data);
  uintptr_t end = 0;
  if (data == nullptr || first % static_cast<uintptr_t>(size) != 0) return CH_BAD_POINTER;
  if (__builtin_add_overflow(first, static_cast<uintptr_t>(bytes), &end)) return CH_BAD_STRIDE;
  return access == Access::write && !separate(layout) ? CH_BAD_STRIDE : CH_OK;
}

int64_t dtype_size(const ch_attention& work) { return work.dtype == CH_FLOAT32 ? 4 : 2; }

int check_tensor(const ch_attention& work, const ch_tensor& tensor, int64_t heads, int64_t rows, int64_t last,
                 Access access) {
  const Layout layout = {{{work.batch, tensor.batch}, {heads, tensor.head}, {rows, tensor.row}}, last};
  return check_memory(tensor.data, layout, dtype_size(work), access);
}

// A contiguous [batch, heads, q_len, last] of float32, which fits in memory by check_counts.
int check_plain(const ch_attention& work, const float* data, int64_t last) {
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

// ---- the parts of a description ---------------------------------------------------------------------------

// Returns from the function with the first code that is not CH_OK.
#define CH_TRY(expression)                 \
  do {                                     \
    const int code_ = (expression);        \
    if (code_ != CH_OK) return code_;      \
  } while (false)

bool is_count(int64_t number) { return number >= 0 && number <= most; }

// Whether [batch, heads, rows, last] can be counted in int64 with a MiB for each: room for every padding and packing.
bool countable(int64_t batch, int64_t heads, int64_t rows, int64_t last) {
  int64_t product = int64_t{1} << 20;
  for (int64_t factor : {batch, heads, rows, last}) {
    if (factor > 0 && __builtin_mul_overflow(product, factor, &product)) return false;
  }
  return true;
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
  if (work.query_offset < -farthest || work.query_offset > farthest) return CH_BAD_SHAPE;
  return CH_OK;
}

int check_options(const ch_attention& work) {
  if (work.threads < 1 || work.threads > most_threads) return CH_BAD_OPTION;
  if (!std::isfinite(work.scale)) return CH_BAD_OPTION;
  // Written so that NaN fails.
  if (!(work.dropout >= 0.0 && work.dropout < 1.0)) return CH_BAD_OPTION;
  return CH_OK;
}

int check_band(int64_t bound) {
  return bound == INT64_MAX || (bound >= -farthest && bound <= farthest) ? CH_OK : CH_BAD_MASK;
}

int check_runs(const ch_attention& work) {
  if (work.runs < 0 || work.runs > CH_MAX_RUNS) return CH_BAD_MASK;
  if (work.runs == 0) return work.start == nullptr && work.stop == nullptr ? CH_OK : CH_BAD_MASK;
  const Layout layout = {{{work.batch, work.run_batch}, {work.heads, work.run_head}, {work.q_len, work.run_row}},
                         work.runs};
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
  CH_TRY(check_runs(work));
  CH_TRY(check_blocks(work));
  return work.allowed.data == nullptr ? CH_OK : check_table(work, work.allowed, work.q_len, work.k_len, 1);
}

// What is written must be separate where strides are not 0; a stride of 0 sums over its axis.
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
  if (rule.reach < 0 || rule.reach > most / 2 - 1) return CH_BAD_RULE;
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
  int caps = 0;
  for (int i = 0; i < work.num_rules; ++i) {
    CH_TRY(check_rule(work, work.rules[i]));
    caps += work.rules[i].kind == CH_RULE_SOFTCAP;
  }
  // Backward keeps the slope of one.
  if (caps > 1) return CH_BAD_RULE;
  if (work.sink == nullptr) return CH_OK;
  return check_memory(work.sink, {{{work.heads, work.sink_head}, {1, 0}, {1, 0}}, 1}, sizeof(float));
}

int check_inputs(const ch_attention& work) {
  CH_TRY(check_tensor(work, work.query, work.heads, work.q_len, work.head_dim, Access::read));
  CH_TRY(check_tensor(work, work.key, work.kv_heads, work.k_len, work.head_dim, Access::read));
  return check_tensor(work, work.value, work.kv_heads, work.k_len, work.value_dim, Access::read);
}

int check_rows_of(const ch_attention& work, const float* data) {
  return data == nullptr ? CH_OK : check_plain(work, data, 1);
}

// [batch, heads, rows, columns], contiguous; both counts are at most `most`.
int check_sheet(const ch_attention& work, const void* data, int64_t rows, int64_t columns, int64_t size) {
  if (!countable(work.batch, work.heads, rows, columns)) return CH_BAD_STATISTIC;
  const Layout layout = {{{work.batch, work.heads * rows * columns}, {work.heads, rows * columns}, {rows, columns}},
                         columns};
  return check_memory(data, layout, size, Access::write);
}

int check_top(const ch_attention& work, const ch_statistics& s) {
  if (s.top_k < 0 || s.top_k > work.k_len) return CH_BAD_STATISTIC;
  if (s.top_k == 0) return CH_OK;
  CH_TRY(check_sheet(work, s.top_weights, work.q_len, s.top_k, sizeof(float)));
  return check_sheet(work, s.top_indices, work.q_len, s.top_k, sizeof(int64_t));
}

int check_weighted(const ch_attention& work, const ch_statistics& s) {
  if (!is_count(s.num_weights)) return CH_BAD_STATISTIC;
  if (s.num_weights == 0) return CH_OK;
  CH_TRY(check_sheet(work, s.weighted, s.num_weights, work.k_len, sizeof(float)));
  const Layout read = {{{work.batch, s.weight_batch}, {work.heads, s.weight_head}, {s.num_weights, work.q_len}},
                       work.q_len};
  return check_memory(s.row_weights, read, sizeof(float));
}

int check_heatmap(const ch_attention& work, const ch_statistics& s) {
  if (!is_count(s.heatmap)) return CH_BAD_STATISTIC;
  if (s.heatmap == 0) return CH_OK;
  const int64_t q_tiles = (work.q_len + s.heatmap - 1) / s.heatmap, k_tiles = (work.k_len + s.heatmap - 1) / s.heatmap;
  CH_TRY(check_sheet(work, s.heatmap_max, q_tiles, k_tiles, sizeof(float)));
  return check_sheet(work, s.heatmap_mean, q_tiles, k_tiles, sizeof(float));
}

int check_chosen_rows(const ch_attention& work, const ch_statistics& s) {
  if (!is_count(s.num_rows)) return CH_BAD_STATISTIC;
  if (s.num_rows == 0) return CH_OK;
  CH_TRY(check_sheet(work, s.rows, s.num_rows, work.k_len, sizeof(float)));
  CH_TRY(check_memory(s.row_slots, {{{1, 0}, {1, 0}, {1, 0}}, work.q_len}, sizeof(int32_t)));
  for (int64_t i = 0; i < work.q_len; ++i) {
    if (s.row_slots[i] < -1 || s.row_slots[i] >= s.num_rows) return CH_BAD_STATISTIC;
  }
  return CH_OK;
}

int check_statistics(const ch_attention& work) {
  if (work.statistics == nullptr) return CH_OK;
  const ch_statistics& s = *work.statistics;
  for (const float* one : {s.max_score, s.entropy, s.distance, s.sink}) CH_TRY(check_rows_of(work, one));
  if (s.ties != nullptr) CH_TRY(check_plain(work, s.ties, 2));
  if (s.sink_keys < 0) return CH_BAD_STATISTIC;
  CH_TRY(check_top(work, s));
  if (s.received != nullptr) CH_TRY(check_sheet(work, s.received, 1, work.k_len, sizeof(float)));
  CH_TRY(check_weighted(work, s));
  CH_TRY(check_heatmap(work, s));
  return check_chosen_rows(work, s);
}

int check_forward(const ch_attention& work) {
  CH_TRY(check_tensor(work, work.output, work.heads, work.q_len, work.value_dim, Access::write));
  if (work.output32 != nullptr) CH_TRY(check_plain(work, work.output32, work.value_dim));
  if (work.softmax != nullptr) CH_TRY(check_plain(work, work.softmax, 2));
  CH_TRY(check_statistics(work));
  return work.lse == nullptr ? CH_OK : check_plain(work, work.lse, 1);
}

int check_statistics_gradients(const ch_attention& work) {
  if (work.statistics == nullptr) return CH_OK;
  const ch_statistics& s = *work.statistics;
  for (const float* one : {s.grad_max, s.grad_entropy, s.grad_distance, s.grad_sink}) CH_TRY(check_rows_of(work, one));
  if (s.sink_keys < 0) return CH_BAD_STATISTIC;
  if (s.grad_max != nullptr) CH_TRY(check_plain(work, s.ties, 2));
  return s.grad_received == nullptr ? CH_OK : check_sheet(work, s.grad_received, 1, work.k_len, sizeof(float));
}

int check_backward(const ch_attention& work) {
  if (work.output32 != nullptr || work.dtype != CH_FLOAT32) {
    CH_TRY(check_plain(work, work.output32, work.value_dim));
  } else {
    CH_TRY(check_tensor(work, work.output, work.heads, work.q_len, work.value_dim, Access::read));
  }
  CH_TRY(check_plain(work, work.softmax, 2));
  CH_TRY(check_plain(work, work.delta, 1));
  if (work.grad_lse != nullptr) CH_TRY(check_plain(work, work.grad_lse, 1));
  CH_TRY(check_statistics_gradients(work));
  CH_TRY(check_tensor(work, work.grad_output, work.heads, work.q_len, work.value_dim, Access::read));
  CH_TRY(check_tensor(work, work.grad_query, work.heads, work.q_len, work.head_dim, Access::write));
  CH_TRY(check_tensor(work, work.grad_key, work.kv_heads, work.k_len, work.head_dim, Access::write));
  return check_tensor(work, work.grad_value, work.kv_heads, work.k_len, work.value_dim, Access::write);
}

using Check = int (*)(const ch_attention& work);
using Kernel = int (*Kernels::*)(const ch_attention* work);

int run(const ch_attention* work, Check check, Kernel kernel) {
  if (work == nullptr) return CH_BAD_POINTER;
  if (work->size != sizeof(ch_attention) || work->abi != CH_ABI) return CH_BAD_SIZE;
  const int index = work->isa == -1 ? ch_isa_best() : work->isa;
  if (!ch_isa_usable(index)) return CH_BAD_ISA;
  if (work->dtype != CH_FLOAT32 && work->dtype != CH_BFLOAT16 && work->dtype != CH_FLOAT16) return CH_BAD_DTYPE;
  CH_TRY(check_counts(*work));
  CH_TRY(check_options(*work));
  CH_TRY(check_inputs(*work));
  CH_TRY(check_mask(*work));
  CH_TRY(check_rules(*work));
  CH_TRY(check(*work));
  if (work->batch == 0 || work->heads == 0) return CH_OK;
  return (sets[index].kernels->*kernel)(work);
}

// ---- the linear family ------------------------------------------------------------------------------------

int check_sizes(const ch_linear& work) {
  for (int64_t number : {work.batch, work.heads, work.kv_heads, work.length}) {
    if (!is_count(number)) return CH_BAD_SHAPE;
  }
  for (int64_t number : {work.features, work.value_dim}) {
    if (number < 1 || number > CH_MAX_HEAD_DIM) return CH_BAD_SHAPE;
  }
  if (work.chunk < 1 || work.chunk > CH_MAX_CHUNK) return CH_BAD_SHAPE;
  if (work.kv_heads == 0 ? work.heads != 0 : work.heads % work.kv_heads != 0) return CH_BAD_SHAPE;
  if (work.log_decay == nullptr ? work.gates != 0 : work.gates != 1 && work.gates != work.features) return CH_BAD_SHAPE;
  return countable(work.batch, work.heads, work.length, CH_MAX_HEAD_DIM) ? CH_OK : CH_BAD_SHAPE;
}

// [batch, heads, rows, last] of which only the last axis must be contiguous.
int check_rows(const ch_linear& work, const ch_tensor& tensor, int64_t heads, int64_t last, Access access) {
  const Layout layout = {{{work.batch, tensor.batch}, {heads, tensor.head}, {work.length, tensor.row}}, last};
  return check_memory(tensor.data, layout, sizeof(float), access);
}

// Contiguous, `each` numbers for every head of keys.
int check_each(const ch_linear& work, const float* data, int64_t each) {
  return check_memory(data, {{{work.batch * work.kv_heads, each}, {1, 0}, {1, 0}}, each}, sizeof(float));
}

int check_optional(const ch_linear& work, const float* data, int64_t each) {
  return data == nullptr ? CH_OK : check_each(work, data, each);
}

int64_t padded(int64_t count) { return (count + CH_LINEAR_PAD - 1) / CH_LINEAR_PAD * CH_LINEAR_PAD; }

// What lies between calls, or is room for backward.
int check_between(const ch_linear& work, const float* states, const float* sums) {
  const int64_t chunks = (work.length + work.chunk - 1) / work.chunk;
  CH_TRY(check_optional(work, states, chunks * work.features * padded(work.value_dim)));
  return check_optional(work, sums, chunks * padded(work.features));
}

int check_call(const ch_linear& work) {
  const bool normalized = work.last_normalizer != nullptr;
  if (work.feature_map < CH_FEATURE_IDENTITY || work.feature_map > CH_FEATURE_RELU) return CH_BAD_OPTION;
  if (work.threads < 1 || work.threads > most_threads || !std::isfinite(work.scale)) return CH_BAD_OPTION;
  // A decayed sum of features is nobody's yet.
  if (normalized && (work.log_decay != nullptr || work.rate != nullptr)) return CH_BAD_OPTION;
  CH_TRY(check_rows(work, work.query, work.heads, work.features, Access::read));
  CH_TRY(check_rows(work, work.key, work.kv_heads, work.features, Access::read));
  CH_TRY(check_rows(work, work.value, work.kv_heads, work.value_dim, Access::read));
  CH_TRY(check_optional(work, work.log_decay, work.length * work.gates));
  CH_TRY(check_optional(work, work.rate, work.length));
  return check_between(work, work.states, work.sums);
}

int check_linear_forward(const ch_linear& work) {
  const int64_t matrix = work.features * work.value_dim;
  CH_TRY(check_rows(work, work.output, work.heads, work.value_dim, Access::write));
  CH_TRY(check_optional(work, work.state, matrix));
  CH_TRY(check_each(work, work.last_state, matrix));
  CH_TRY(check_optional(work, work.normalizer, work.features));
  if (work.last_normalizer == nullptr) return CH_OK;
  // Sums are kept where states are: the chunks of one head are then for any thread.
  if (work.states != nullptr && work.sums == nullptr) return CH_BAD_POINTER;
  CH_TRY(check_each(work, work.last_normalizer, work.features));
  return check_memory(work.shares, {{{work.batch * work.heads, work.length}, {1, 0}, {1, 0}}, work.length},
                      sizeof(float));
}

int check_linear_backward(const ch_linear& work) {
  const int64_t matrix = work.features * work.value_dim;
  const bool normalized = work.grad_normalizer != nullptr;
  if (normalized != (work.last_normalizer != nullptr)) return CH_BAD_POINTER;
  CH_TRY(check_each(work, work.states, 1));
  CH_TRY(check_rows(work, work.grad_output, work.heads, work.value_dim, Access::read));
  CH_TRY(check_rows(work, work.grad_query, work.heads, work.features, Access::write));
  CH_TRY(check_rows(work, work.grad_key, work.kv_heads, work.features, Access::write));
  CH_TRY(check_rows(work, work.grad_value, work.kv_heads, work.value_dim, Access::write));
  CH_TRY(check_optional(work, work.grad_last_state, matrix));
  CH_TRY(check_each(work, work.grad_state, matrix));
  if (work.log_decay != nullptr) CH_TRY(check_each(work, work.grad_decay, work.length * work.gates));
  if (work.rate != nullptr) CH_TRY(check_each(work, work.grad_rate, work.length));
  CH_TRY(check_between(work, work.later, work.later_sums));
  if (!normalized) return CH_OK;
  if (work.later != nullptr && work.later_sums == nullptr) return CH_BAD_POINTER;
  CH_TRY(check_each(work, work.sums, 1));
  CH_TRY(check_rows(work, work.output, work.heads, work.value_dim, Access::read));
  CH_TRY(check_optional(work, work.grad_last_normalizer, work.features));
  CH_TRY(check_each(work, work.grad_normalizer, work.features));
  return check_memory(work.shares, {{{work.batch * work.heads, work.length}, {1, 0}, {1, 0}}, work.length},
                      sizeof(float));
}

using LinearCheck = int (*)(const ch_linear& work);
using LinearKernel = int (*Kernels::*)(const ch_linear* work);

int run_linear(const ch_linear* work, LinearCheck check, LinearKernel kernel) {
  if (work == nullptr) return CH_BAD_POINTER;
  if (work->size != sizeof(ch_linear) || work->abi != CH_ABI) return CH_BAD_SIZE;
  const int index = work->isa == -1 ? ch_isa_best() : work->isa;
  if (!ch_isa_usable(index)) return CH_BAD_ISA;
  CH_TRY(check_sizes(*work));
  CH_TRY(check_call(*work));
  CH_TRY(check(*work));
  // Without tokens there is no state to hand on; the caller has it already.
  if (work->batch == 0 || work->heads == 0 || work->length == 0) return CH_OK;
  return (sets[index].kernels->*kernel)(work);
}

}  // namespace

bool after_fork() noexcept { return forked; }

}  // namespace clearhead

extern "C" {

int ch_abi(void) { return CH_ABI; }

int64_t ch_description_size(void) { return sizeof(ch_attention); }

const char* ch_isa_name(int index) {
  return index >= 0 && index < clearhead::num_sets ? clearhead::sets[index].name : nullptr;
}

int ch_isa_usable(int index) {
  return index >= 0 && index < clearhead::num_sets && clearhead::sets[index].usable() ? 1 : 0;
}

int ch_isa_best(void) {
  int index = 0;
  while (!ch_isa_usable(index)) ++index;
  return index;
}

int ch_forward(const ch_attention* work) {
  return clearhead::run(work, clearhead::check_forward, &clearhead::Kernels::forward);
}

int ch_backward(const ch_attention* work) {
  return clearhead::run(work, clearhead::check_backward, &clearhead::Kernels::backward);
}

int64_t ch_linear_description_size(void) { return sizeof(ch_linear); }

int ch_linear_forward(const ch_linear* work) {
  return clearhead::run_linear(work, clearhead::check_linear_forward, &clearhead::Kernels::linear_forward);
}

int ch_linear_backward(const ch_linear* work) {
  return clearhead::run_linear(work, clearhead::check_linear_backward, &clearhead::Kernels::linear_backward);
}

void ch_expect_writes(void* data, int64_t bytes) {
  if (data != nullptr && bytes > 0) clearhead::expect_writes(data, static_cast<size_t>(bytes));
}

int ch_all_finite(const float* data, int64_t count) {
  // What is not finite stays so times 0, and a NaN stays in the sum. Sixteen sums do not wait for each other.
  float sums[16] = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int lane = 0; lane < 16; ++lane) sums[lane] += data[i + lane] * 0.0f;
  }
  for (; i < count; ++i) sums[0] += data[i] * 0.0f;
  for (int lane = 1; lane < 16; ++lane) sums[0] += sums[lane];
  return sums[0] == 0.0f;
}

const char* ch_message(int code) {
  switch (code) {
    case CH_OK: return "done";
    case CH_BAD_SIZE: return "the description is not of this library's version";
    case CH_BAD_SHAPE: return "a count is negative, too large, or does not divide";
    case CH_BAD_DTYPE: return "no such dtype";
    case CH_BAD_POINTER: return "a tensor that is needed is null or not aligned to its elements";
    case CH_BAD_STRIDE: return "a stride is negative or too large, or rows that are written overlap";
    case CH_BAD_MASK: return "the runs, bounds or tables of the mask do not fit the call";
    case CH_BAD_RULE: return "no such score rule, or its numbers do not fit the call";
    case CH_BAD_OPTION: return "scale, dropout or threads are out of range";
    case CH_BAD_ISA: return "the processor lacks the instruction set asked for";
    case CH_NO_MEMORY: return "scratch memory could not be had; what was written is of no use";
    case CH_NOT_FINITE: return "NaN or inf in query, key or value under a mask; no gradient was written";
    case CH_BAD_STATISTIC: return "a statistic's size or count does not fit the call";
    default: return "no such code";
  }
}

}  // extern "C"
