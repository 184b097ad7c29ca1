// bf16 dot-product instructions (VDPBF16PS, BFDOT): each multiplies and adds the two neighbouring bfloat16 of a word.
// This file has what differs between instruction sets.
#pragma once

#include "vector.h"

#if defined(CH_BF16DOT)
namespace CH_NS {

// Adds the products of both halves of the pairs to each lane of `sum`.
CH_INLINE vf bf16_dot(vf sum, vf a, vf b) {
#if defined(CH_AVX512)
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
}

// A pair that is broadcast to all lanes, and its multiply-add.
#if defined(CH_AVX512)
CH_INLINE Broadcast broadcast_pair(const uint32_t* pair) { return (vf)(*pair + (vu){}); }
CH_INLINE vf bf16_dot_broadcast(vf sum, Broadcast one, vf b) { return bf16_dot(sum, one, b); }
#else
CH_INLINE Broadcast broadcast_pair(const uint32_t* pair) {
  Broadcast bits;
  memcpy(&bits, pair, sizeof(bits));
  return bits;
}
// GCC adds two instructions to the intrinsic, so this is inline assembly.
CH_INLINE vf bf16_dot_broadcast(vf sum, Broadcast one, vf b) {
  asm("bfdot %0.4s, %1.8h, %2.2h[0]" : "+w"(sum) : "w"(b), "w"(one));
  return sum;
}
#endif

// Rounded to bfloat16.
CH_INLINE vh rounded(vf x) {
#if defined(CH_AVX512)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  return (vh)vcvt_bf16_f32((float32x4_t)x);
#endif
}

// Words with `low` as lower and `high` as upper halves.
CH_INLINE vu paired(vh low, vh high) {
#if defined(CH_AVX512)
  const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)high), 16);
  return (vu)_mm512_or_si512(_mm512_cvtepu16_epi32((__m256i)low), upper);
#else
  const uint16x8_t lower = vcombine_u16((uint16x4_t)low, (uint16x4_t)low);
  return (vu)vzip1q_u16(lower, vcombine_u16((uint16x4_t)high, (uint16x4_t)high));
#endif
}

// Two vectors rounded: one by one, and interleaved as pairs.
struct Rounded {
  vh one, other;
  vu pairs;
};

CH_INLINE Rounded round_two(vf one, vf other) {
#if defined(CH_AVX512)
  static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)other, (__m512)one);
  return Rounded{(vh)_mm512_castsi512_si256(both), (vh)_mm512_extracti64x4_epi64(both, 1),
                 (vu)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), both)};
#else
  const vh first = rounded(one), second = rounded(other);
  return Rounded{first, second, paired(first, second)};
#endif
}

// A vector of pairs from a row with `count` elements left, zero-padded.
CH_INLINE vu get_pairs(const uint16_t* from, int count) {
  if (count >= 2 * VL) return *(const vu_any*)from;
#if defined(CH_AVX512)
  return (vu)_mm512_maskz_loadu_epi16(count > 0 ? (__mmask32)((1ull << count) - 1) : 0, from);
#else
  vu pairs = {};
  if (count > 0) memcpy(&pairs, from, (size_t)count * sizeof(*from));
  return pairs;
#endif
}

}  // namespace CH_NS
#endif
