// Dot products of 8-bit integers with sums in 32 bits. They are exact, so every instruction set has the same bits in
// whatever order it adds. This file has what differs between the sets.
//
// STEPS integers of a row are multiplied at a time. A row of activations has them as `Left`, zero-padded to STEPS; a row
// of the weight is read in place. ROWS rows of activations times COLUMNS rows of the weight have their sums in registers.
// `shift` is what `load_weight` adds to the weight's integers, so a sum has shift times the row's sum of activations too.
#pragma once

#include "work.h"

namespace CH_NS {

struct IntegerDot {
#if defined(CH_VNNI)
  // VPDPBUSD multiplies unsigned by signed bytes.
  typedef int8_t Left;
  typedef __m512i Vector;
  static constexpr int STEPS = 64, ROWS = 4, SHIFT = 128;
  static CH_INLINE Vector zero() { return _mm512_setzero_si512(); }
  static CH_INLINE Vector load_weight(const int8_t* w) {
    return _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8((char)0x80));
  }
  static CH_INLINE Vector madd(Vector sum, Vector weight, const Left* x) {
    return _mm512_dpbusd_epi32(sum, weight, _mm512_loadu_si512(x));
  }
#elif defined(CH_AVX512)
  typedef int16_t Left;
  typedef __m512i Vector;
  static constexpr int STEPS = 32, ROWS = 4, SHIFT = 0;
  static CH_INLINE Vector zero() { return _mm512_setzero_si512(); }
  static CH_INLINE Vector load_weight(const int8_t* w) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w));
  }
  static CH_INLINE Vector madd(Vector sum, Vector weight, const Left* x) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(weight, _mm512_loadu_si512(x)));
  }
#elif defined(CH_AVX2)
  typedef int16_t Left;
  typedef __m256i Vector;
  static constexpr int STEPS = 16, ROWS = 2, SHIFT = 0;
  static CH_INLINE Vector zero() { return _mm256_setzero_si256(); }
  static CH_INLINE Vector load_weight(const int8_t* w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w)); }
  static CH_INLINE Vector madd(Vector sum, Vector weight, const Left* x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(weight, _mm256_loadu_si256((const __m256i*)x)));
  }
#elif defined(CH_NEON)
  typedef int8_t Left;
  typedef int32x4_t Vector;
  static constexpr int STEPS = 16, ROWS = 4, SHIFT = 0;
  static CH_INLINE Vector zero() { return vdupq_n_s32(0); }
  static CH_INLINE int8x16_t load_weight(const int8_t* w) { return vld1q_s8(w); }
  static CH_INLINE Vector madd(Vector sum, int8x16_t weight, const Left* x) {
    const int8x16_t left = vld1q_s8(x);
#if defined(CH_DOTPROD)
    return vdotq_s32(sum, weight, left);
#else
    sum = vpadalq_s16(sum, vmull_s8(vget_low_s8(weight), vget_low_s8(left)));
    return vpadalq_s16(sum, vmull_s8(vget_high_s8(weight), vget_high_s8(left)));
#endif
  }
#else
  typedef int8_t Left;
  typedef vi Vector;
  static constexpr int STEPS = 16, ROWS = 2, SHIFT = 0;
  static CH_INLINE Vector zero() { return (vi){}; }
  static CH_INLINE const int8_t* load_weight(const int8_t* w) { return w; }
  static CH_INLINE Vector madd(Vector sum, const int8_t* weight, const Left* x) {
    for (int i = 0; i < STEPS; i++) sum[i % VL] += (int32_t)weight[i] * x[i];
    return sum;
  }
#endif
  static constexpr int COLUMNS = 4;

  // The sum of a vector's lanes; they wrap around as unsigned integers do.
  static CH_INLINE int32_t total(Vector sum) {
    uint32_t lanes[sizeof(Vector) / 4], all = 0;
    memcpy(lanes, &sum, sizeof(sum));
    for (uint32_t lane : lanes) all += lane;
    return (int32_t)all;
  }
};

}  // namespace CH_NS
