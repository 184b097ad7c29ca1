// Shared by forward and backward: derived sizes, and the distribution of work over threads.
#pragma once

#include "amx_tile.h"
#include "isa.h"
#include "pack.h"
#include "philox.h"
#include "rules.h"
#include "scratch.h"
#include "team.h"

namespace CH_NS {

using clearhead::scratch;

// Normal as a float: not 0, subnormal, or inf.
CH_INLINE bool is_normal(double factor) { return (float)factor >= __FLT_MIN__ && (float)factor <= __FLT_MAX__; }

CH_INLINE bool no_rules(const ch_attention& w) {
  return w.num_rules == 0 && is_normal(w.scale) && is_normal(w.scale * 1.4426950408889634);
}

// The factors from scores after the rules to natural scores, and to base 2. Scores are subtracted before the
// multiplication: the other order would turn the rounding of a product of 1e9 into an error of 100 in the exponent.
CH_INLINE float to_scores(const ch_attention& w) { return no_rules(w) ? (float)w.scale : 1.0f; }
CH_INLINE float to_base2(const ch_attention& w) { return no_rules(w) ? (float)(w.scale * 1.4426950408889634) : LOG2E; }

// Dropout of attention weights.
struct Dropout {
  bool on;
  int32_t dropped;  // of CH_LEVELS
  float factor;  // of the elements that are not dropped
};

CH_INLINE Dropout dropout_of(const ch_attention& w) {
  const int32_t dropped = (int32_t)(w.dropout * CH_LEVELS + 0.5);
  return Dropout{w.dropout > 0.0, minimum(dropped, CH_LEVELS - 1), (float)(1.0 / (1.0 - w.dropout))};
}

template <class IO> CH_INLINE typename IO::type* at(const ch_tensor& t, int64_t b, int64_t h, int64_t row) {
  return (typename IO::type*)t.data + b * t.batch + h * t.head + row * t.row;
}

// Whether a tensor's rows already have the layout of `get_operands` and `pack_rows`: float32, contiguous, whole vectors,
// one panel. For a tile of keys with few rows the copy took a fifth of the time (measured: 16 queries, 2,048 keys).
template <class M, class IO> CH_INLINE bool has_packed_layout(const ch_tensor& t, int64_t dim) {
  return M::PACK == 1 && __is_same(typename IO::type, float) && dim % VL == 0 && dim <= PW && t.row == dim;
}

// The first batch entry, query and key of a part.
struct Corner {
  int64_t b, query, key;
};

// A call, or a part of one that is processed like a call.
struct Task : ch_attention {
  int64_t head_stride;  // from head to head, in buffers with an element per row
  int64_t first_query;  // dropout's index of the first one
  int64_t units;  // key heads of the whole call, in parts that are independent of each other
  const int32_t* page_table;  // the pages of the only batch entry; null: keys are one after the other
  int64_t page_size;
  int64_t total_keys;  // that the call reads, of all sequences
  Corner corner;  // of this part in the whole call
  int64_t whole_keys;  // of a batch entry of the whole call

  explicit Task(const ch_attention& call)
      : ch_attention(call), head_stride(call.q_len), first_query(call.first_key + call.query_offset),
        units(call.batch * call.kv_heads), page_table(nullptr), page_size(0), total_keys(call.batch * call.k_len), corner{0, 0, 0}, whole_keys(call.k_len) {
    if (pages == nullptr) drop_idle_bounds();
  }

  // Bounds of the band that forbid no key.
  void drop_idle_bounds() {
    if (after != INT64_MAX && query_offset + after >= k_len - 1) after = INT64_MAX;
    if (before != INT64_MAX && query_offset + q_len - 1 <= before) before = INT64_MAX;
  }
};

CH_INLINE int64_t row_index(const Task& w, int64_t b, int64_t h, int64_t i) {
  return (b * w.heads + h) * w.head_stride + i;
}

// The Philox inputs of one query's weights.
CH_INLINE PhiloxRow philox_row(const Task& w, const Dropout& dropout, int64_t b, int64_t h, int64_t i) {
  return PhiloxRow{w.seed, dropout.dropped, (uint32_t)(w.first_query + i), (uint32_t)(w.first_head + h), (uint32_t)(w.first_batch + b)};
}

// Threads that `operations` are worth: waking another one costs a few microseconds.
template <class Description> CH_INLINE int threads_for(const Description& w, double operations) {
  if (clearhead::after_fork()) return 1;
  double worth = operations / 1e5;
  return worth < 2.0 ? 1 : worth < w.threads ? (int)worth : w.threads;
}

template <class Body> void parallel(int threads, int64_t units, const Body& body) {
  if (threads > units) threads = (int)units;
  if (threads <= 1) {
    const TileScope scope;
    for (int64_t u = 0; u < units; u++) body(u);
    return;
  }
  if (clearhead::Team* team = clearhead::Team::led(); team != nullptr) {
    const auto share = [](clearhead::Team& of, const void* work) {
      const TileScope scope;
      for (int64_t u; (u = of.take()) >= 0;) (*(const Body*)work)(u);
    };
    return team->run(threads, units, share, &body);
  }
#pragma omp parallel num_threads(threads)
  {
    const TileScope scope;
    bool is_master = false;
#pragma omp master
    is_master = true;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t u = 0; u < units; u++) body(u);
    // The master thread's buffers may still be in use.
    if (!is_master) clearhead::trim_scratch();
  }
}

// Flushes subnormals (below 2**-126) to 0 in this thread, as the bf16 dot-product instructions do anyway. Weights that
// far below the maximum change no digit of a result, and each multiplication with one costs Intel's processors a
// hundred cycles (measured: scores with a standard deviation of 20 made attention 12 times as slow).
class FlushSubnormals {
#if defined(__SSE__)
  static constexpr uint32_t FLUSH = 0x8040;  // results and operands (Intel 64, volume 1, section 10.2.3)
  const uint32_t before = __builtin_ia32_stmxcsr();

 public:
  explicit FlushSubnormals(bool wanted) { __builtin_ia32_ldmxcsr(wanted ? before | FLUSH : before); }
  ~FlushSubnormals() { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
  static constexpr uint64_t FLUSH = uint64_t(1) << 24;  // FPCR.FZ, as on x86: results and operands
  const uint64_t before = get();
  static uint64_t get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }

 public:
  explicit FlushSubnormals(bool wanted) { set(wanted ? before | FLUSH : before); }
  ~FlushSubnormals() { set(before); }
#else
 public:
  explicit FlushSubnormals(bool) {}
  ~FlushSubnormals() {}
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;
};

// An extreme scale can make subnormal products matter, so they are not flushed then.
CH_INLINE bool flushes_subnormals(const ch_attention& w) { return w.scale <= 1e6 && w.scale >= -1e6; }

// `parallel` for units of attention.
template <class Body> void parallel_units(const Task& w, int threads, int64_t units, const Body& body) {
  const bool flushes = flushes_subnormals(w);
  parallel(threads, units, [&](int64_t u) {
    const FlushSubnormals here(flushes);
    body(u);
  });
}

// Splits one buffer into aligned parts; a first pass over null gives the size.
struct BumpAllocator {
  char* next;
  template <class T> T* take(int64_t count) {
    char* here = next;
    next += round_up(count * (int64_t)sizeof(T), 64);
    return (T*)here;
  }
};

// An error code that any thread can set.
struct Fault {
  int code = CH_OK;
  void set(int code_now) { __atomic_store_n(&code, code_now, __ATOMIC_RELAXED); }
  int get() const { return __atomic_load_n(&code, __ATOMIC_RELAXED); }
};

}  // namespace CH_NS
