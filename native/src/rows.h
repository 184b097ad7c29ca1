// Which keys a row may attend to: intervals, bands and tables, in the form that the loops over tiles need.
#pragma once

#include "../include/clearhead_native.h"
#include "gemm_kernel.h"

namespace CH_NS {

// One row of the mask: up to CH_MAX_INTERVALS intervals of keys, intersected with the band, and its rows of the tables.
struct MaskRow {
  int32_t intervals;
  int32_t start[CH_MAX_INTERVALS], stop[CH_MAX_INTERVALS];  // ascending, disjoint, not empty
  int32_t low, high;  // of all intervals; low = high = 0 if there is none
  const uint8_t* allowed;  // null: no table
  const uint8_t* blocks;
};

// Clamps a value. Callers handle a bound of INT64_MAX separately, so q_pos - bound cannot overflow.
CH_INLINE int64_t clip(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// Writes into `row`: a returned struct would be copied with wider loads than its stores, which stalls store forwarding.
inline void mask_row(const ch_attention& w, int64_t b, int64_t h, int64_t i, MaskRow& row) {
  int64_t q_pos = w.query_offset + i, k_len = w.k_len;
  int64_t from = w.before == INT64_MAX ? 0 : clip(q_pos - w.before, 0, k_len);
  int64_t to = w.after == INT64_MAX ? k_len : clip(q_pos + w.after + 1, 0, k_len);
  const int64_t at = b * w.interval_batch + h * w.interval_head + i * w.interval_row;
  int num_intervals = w.start != nullptr ? w.intervals : 1;
  row.intervals = 0;
  for (int index = 0; index < num_intervals; index++) {
    int64_t low = from, high = to;
    if (w.start != nullptr) {
      low = maximum(low, (int64_t)w.start[at + index]);
      high = minimum(high, (int64_t)w.stop[at + index]);
      // Intervals that are not ascending would be read twice.
      if (row.intervals > 0) low = maximum(low, (int64_t)row.stop[row.intervals - 1]);
    }
    if (high <= low) continue;
    row.start[row.intervals] = (int32_t)low;
    row.stop[row.intervals] = (int32_t)high;
    row.intervals++;
  }
  row.low = row.intervals > 0 ? row.start[0] : 0;
  row.high = row.intervals > 0 ? row.stop[row.intervals - 1] : 0;
  row.allowed = nullptr;
  row.blocks = nullptr;
  if (w.allowed.data != nullptr)
    row.allowed = (const uint8_t*)w.allowed.data + b * w.allowed.batch + h * w.allowed.head + i * w.allowed.row;
  if (w.blocks.data != nullptr)
    row.blocks = (const uint8_t*)w.blocks.data + b * w.blocks.batch + h * w.blocks.head +
                 q_pos / w.block_size * w.blocks.row;
}

CH_INLINE bool has_tables(const ch_attention& w) { return w.allowed.data != nullptr || w.blocks.data != nullptr; }

CH_INLINE bool is_masked(const ch_attention& w) {
  return has_tables(w) || w.start != nullptr || w.before != INT64_MAX || w.after != INT64_MAX;
}

CH_INLINE bool may_attend(const ch_attention& w, const MaskRow& row, int64_t key) {
  bool in_interval = false;
  for (int index = 0; index < row.intervals; index++) in_interval = in_interval ||
      (key >= row.start[index] && key < row.stop[index]);
  if (!in_interval) return false;
  if (row.allowed != nullptr && !row.allowed[key * w.allowed.column]) return false;
  return row.blocks == nullptr || row.blocks[key / w.block_size * w.blocks.column];
}

struct Interval {
  int low, high;  // empty if high <= low
};

CH_INLINE bool none_of_eight(const uint8_t* from) {
  uint64_t eight;
  memcpy(&eight, from, 8);
  return eight == 0;
}

// The interval of keys in [first, last) that a row can attend to, tables included.
inline Interval attended_interval(const ch_attention& w, const MaskRow& row, int64_t first, int64_t last) {
  int64_t low = maximum((int64_t)row.low, first), high = minimum((int64_t)row.high, last);
  // Between two intervals many tiles may be empty.
  for (int index = 0; row.intervals > 1 && index < row.intervals; index++) {
    if (row.stop[index] > low) {
      low = maximum(low, (int64_t)row.start[index]);
      break;
    }
  }
  for (int index = row.intervals - 1; row.intervals > 1 && index >= 0; index--) {
    if (row.start[index] < high) {
      high = minimum(high, (int64_t)row.stop[index]);
      break;
    }
  }
  if (row.blocks != nullptr) {
    while (low < high && !row.blocks[low / w.block_size * w.blocks.column])
      low = (low / w.block_size + 1) * (int64_t)w.block_size;
    while (low < high && !row.blocks[(high - 1) / w.block_size * w.blocks.column])
      high = (high - 1) / w.block_size * (int64_t)w.block_size;
  }
  if (row.allowed != nullptr) {
    // Eight keys at a time: for a sliding window given as a dense table this scans most of a row.
    const bool dense = w.allowed.column == 1;
    while (dense && low + 8 <= high && none_of_eight(row.allowed + low)) low += 8;
    while (low < high && !row.allowed[low * w.allowed.column]) low++;
    while (dense && low + 8 <= high && none_of_eight(row.allowed + high - 8)) high -= 8;
    while (low < high && !row.allowed[(high - 1) * w.allowed.column]) high--;
  }
  return Interval{(int)low, (int)(high > low ? high : low)};
}

// Whether the block table lets any of a head's rows [first, first + count) attend to any of the keys [from, to). In a
// long call with a block pattern most tiles are empty, and this test is cheaper than one per row; with smaller blocks
// it is not.
inline bool blocks_allow(const ch_attention& w, int64_t b, int64_t h, int64_t first, int64_t count, int64_t from,
                         int64_t to) {
  constexpr int64_t SMALL = 16;
  if (w.blocks.data == nullptr || w.block_size < SMALL) return true;
  const int64_t size = w.block_size, begin = w.query_offset + first, left = from / size, right = (to - 1) / size;
  const uint8_t* head = (const uint8_t*)w.blocks.data + b * w.blocks.batch + h * w.blocks.head;
  for (int64_t row = begin / size; row <= (begin + count - 1) / size; row++)
    for (int64_t column = left; column <= right; column++)
      if (head[row * w.blocks.row + column * w.blocks.column]) return true;
  return false;
}

CH_INLINE void fill(float* p, int64_t from, int64_t to, float value) {
  for (int64_t c = from; c < to; c++) p[c] = value;
}

// Writes -inf after the last of `count` scores in its vector.
CH_INLINE void mask_tail(float* scores, int count) {
  const int whole = count / VL * VL;
  if (whole < count) store(scores + whole, first_of(load(scores + whole), count - whole, all(-INF)));
}

// Writes -inf to the scores of keys [first, first + count) that the row may not attend to.
inline void mask_scores(const ch_attention& w, const MaskRow& row, int64_t first, int count, float* scores) {
  int64_t done = 0;
  for (int index = 0; index < row.intervals; index++) {
    fill(scores, done, clip(row.start[index] - first, done, count), -INF);
    done = clip(row.stop[index] - first, done, count);
  }
  fill(scores, done, count, -INF);
  int64_t low = clip(row.low - first, 0, count), high = clip(row.high - first, 0, count);
  if (row.allowed != nullptr) {
    const uint8_t* line = row.allowed + first * w.allowed.column;
    if (w.allowed.column == 1) {
      for (int64_t c = low; c < high; c++) scores[c] = line[c] ? scores[c] : -INF;
    } else {
      for (int64_t c = low; c < high; c++) scores[c] = line[c * w.allowed.column] ? scores[c] : -INF;
    }
  }
  if (row.blocks != nullptr) {
    for (int64_t c = low; c < high;) {
      int64_t block = (first + c) / w.block_size, next = minimum((block + 1) * (int64_t)w.block_size - first, high);
      if (!row.blocks[block * w.blocks.column]) fill(scores, c, next, -INF);
      c = next;
    }
  }
}

// Whether a row may attend to all keys [first, last).
CH_INLINE bool allows_all(const MaskRow& row, int64_t first, int64_t last) {
  return row.intervals == 1 && row.start[0] <= first && row.stop[0] >= last && row.allowed == nullptr &&
         row.blocks == nullptr;
}

}  // namespace CH_NS
