// Score rules on a row of scores, and their derivatives for backward.
//
// Rules that depend only on q_pos - k_pos become one vector per head, indexed by k_pos - q_pos (the diagonals of a
// Toeplitz matrix), built once per unit of work.
#pragma once

#include "rows.h"

namespace CH_NS {

CH_INLINE bool is_diagonal(const ch_rule& rule) {
  return rule.kind == CH_RULE_SLOPE || rule.kind == CH_RULE_RELATIVE;
}

inline int count_diagonal(const ch_attention& w) {
  int count = 0;
  for (int r = 0; r < w.num_rules; r++) count += is_diagonal(w.rules[r]);
  return count;
}

// Elements of one diagonal vector: distances from -(last q_pos) to k_len - 1 - (first q_pos), and padding for reads
// past them.
CH_INLINE int64_t diagonal_length(const ch_attention& w) { return round_up(w.q_len + w.k_len + 4 * PW, 16); }

// The index of k_pos 0 for query i.
CH_INLINE int64_t diagonal_start(const ch_attention& w, int64_t i) { return w.q_len - 1 - i; }

// The vectors of all diagonal rules for one head, one after the other.
inline void make_diagonals(const ch_attention& w, int64_t h, float* to) {
  int64_t length = diagonal_length(w);
  for (int r = 0; r < w.num_rules; r++) {
    const ch_rule& rule = w.rules[r];
    if (!is_diagonal(rule)) continue;
    const float* data = (const float*)rule.table.data + h * rule.table.head;
    for (int64_t x = 0; x < length; x++) {
      // distance = q_pos - k_pos
      int64_t distance = w.query_offset + w.q_len - 1 - x;
      if (rule.kind == CH_RULE_SLOPE)
        to[x] = -data[0] * (float)(distance < 0 ? -distance : distance);
      else
        to[x] = data[clip(distance, -rule.reach, rule.reach) + rule.reach];
    }
    to += length;
  }
}

CH_INLINE vf tanh_of(vf x) {
  // Near 0 the polynomial of Cephes (Moshier 1989, tanhf), elsewhere 1 - 2 / (exp(2x) + 1).
  vf square = x * x;
  vf p = all(-5.70498872745e-3f);
  p = fused(p, square, all(2.06390887954e-2f));
  p = fused(p, square, all(-5.37397155531e-2f));
  p = fused(p, square, all(1.33314422036e-1f));
  p = fused(p, square, all(-3.33332819422e-1f));
  vf near = fused(p * square, x, x);
  vf far = all(1.0f) - all(2.0f) / (exp2_of<5>(x * all(2.0f * LOG2E)) + all(1.0f));
  return square < all(0.390625f) ? near : far;
}

// Applies scale and rules to the dot products of a row with keys [first, first + count); `slope` receives the
// derivative of the soft-cap if there is one. May write up to the next multiple of VL; reads VL elements before the
// diagonals, and writes arbitrary scores, for keys before 0.
inline void apply_rules(const ch_attention& w, const float* diagonals, int64_t b, int64_t h, int64_t i, int64_t first,
                        int count, float* scores, float* slope) {
  vf scale = all((float)w.scale);
  for (int c = 0; c < count; c += VL) store(scores + c, load(scores + c) * scale);
  for (int r = 0; r < w.num_rules; r++) {
    const ch_rule& rule = w.rules[r];
    if (is_diagonal(rule)) {
      const float* line = diagonals + diagonal_start(w, i) + first;
      for (int c = 0; c < count; c += VL) store(scores + c, load(scores + c) + load(line + c));
      diagonals += diagonal_length(w);
    } else if (rule.kind == CH_RULE_DENSE) {
      const float* line = (const float*)rule.table.data + b * rule.table.batch + h * rule.table.head +
                          i * rule.table.row + first * rule.table.column;
      if (rule.table.column == 0) {
        for (int c = 0; c < count; c += VL) store(scores + c, load(scores + c) + all(*line));
      } else {
        for (int c = (int)maximum(-first, (int64_t)0); c < count; c++) scores[c] += line[c];
      }
    } else {
      vf cap = all(rule.value), one = all(1.0f);
      for (int c = 0; c < count; c += VL) {
        vf t = tanh_of(load(scores + c) / cap);
        store(scores + c, cap * t);
        if (slope != nullptr) store(slope + c, fused(-t, t, one));
      }
    }
  }
}

}  // namespace CH_NS
