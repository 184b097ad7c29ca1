// Products of 8-bit integers with sums in 32 bits. They are exact, so every instruction set has the same bits in whatever
// order it adds. This file has what differs between the sets.
//
// A vector has STEPS integers of a row. A row of activations has them as `Left`, zero-padded to STEPS. `load_weight` adds
// SHIFT to the weight's integers, so a sum has SHIFT times the row's sum of activations too.
#pragma once

#include "work.h"

namespace CH_NS {

// Dot products along rows of the weight, which are read in place: ROWS rows of activations times COLUMNS rows of the
// weight have their sums in registers.
struct IntegerDot {
#if defined(CH_VNNI) && defined(CH_AVX512)
  // VPDPBUSD multiplies unsigned by signed bytes.
  typedef int8_t Left;
  typedef __m512i Vector;
  static constexpr int STEPS = 64, ROWS = 4, SHIFT = 128;
  static CH_INLINE Vector zero() { return _mm512_setzero_si512(); }
  static CH_INLINE Vector load_weight(const int8_t* w) {
    return _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8((char)0x80));
  }
  static CH_INLINE Vector unsigned_bytes(vu bytes) { return (Vector)bytes; }
  static CH_INLINE Vector madd(Vector sum, Vector weight, const Left* x) {
    return _mm512_dpbusd_epi32(sum, weight, _mm512_loadu_si512(x));
  }
#elif defined(CH_VNNI)
  typedef int8_t Left;
  typedef __m256i Vector;
  static constexpr int STEPS = 32, ROWS = 2, SHIFT = 128;
  static CH_INLINE Vector zero() { return _mm256_setzero_si256(); }
  static CH_INLINE Vector load_weight(const int8_t* w) {
    return _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)w), _mm256_set1_epi8((char)0x80));
  }
  static CH_INLINE Vector unsigned_bytes(vu bytes) { return (Vector)bytes; }
  static CH_INLINE Vector madd(Vector sum, Vector weight, const Left* x) {
    return _mm256_dpbusd_epi32(sum, weight, _mm256_loadu_si256((const __m256i*)x));
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
  static CH_INLINE int8x16_t unsigned_bytes(vu bytes) { return (int8x16_t)bytes; }
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
  typedef int8_t Bytes __attribute__((vector_size(4 * VL)));
  static constexpr int STEPS = 4 * VL, ROWS = 2, SHIFT = 0;
  static CH_INLINE Vector zero() { return (vi){}; }
  static CH_INLINE Bytes load_weight(const int8_t* w) {
    Bytes bytes;
    memcpy(&bytes, w, sizeof(bytes));
    return bytes;
  }
  static CH_INLINE Vector madd(Vector sum, Bytes weight, const Left* x) {
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

// The operands of the GEMM micro-kernel: a word has PACK steps of a row of activations, or of a column of a panel. Sums
// are integers in the bits of floats, which SET and CONTINUE only move.
struct IntegerGemm {
  typedef uint32_t operand;
  typedef uint32_t right;
  static constexpr int PACK = 4 / sizeof(IntegerDot::Left), LOAD_VECTORS = 1, HEIGHT = MR, BLOCK = 1;
  static_assert(IntegerDot::STEPS == VL * PACK);
  static CH_INLINE Broadcast broadcast(const uint32_t* a) {
    float bits;
    memcpy(&bits, a, sizeof(bits));
    return broadcast_float(&bits);
  }
  static CH_INLINE vf get(const uint32_t* b) { return (vf)*(const vu_any*)b; }
#if defined(CH_VNNI) && defined(CH_AVX512)
  static CH_INLINE vf madd_broadcast(vf sum, Broadcast a, vf b) {
    return (vf)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)b, (__m512i)a);
  }
#elif defined(CH_VNNI)
  static CH_INLINE vf madd_broadcast(vf sum, Broadcast a, vf b) {
    return (vf)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)b, (__m256i)a);
  }
#elif defined(CH_AVX512)
  static CH_INLINE vf madd_broadcast(vf sum, Broadcast a, vf b) {
    return (vf)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)b, (__m512i)a));
  }
#elif defined(CH_AVX2)
  static CH_INLINE vf madd_broadcast(vf sum, Broadcast a, vf b) {
    return (vf)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)b, (__m256i)a));
  }
#elif defined(CH_DOTPROD)
  static CH_INLINE vf madd_broadcast(vf sum, Broadcast a, vf b) {
    asm("sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(sum) : "w"(b), "w"(a));
    return sum;
  }
#elif defined(CH_NEON)
  static CH_INLINE vf madd_broadcast(vf sum, Broadcast a, vf b) {
    const int8x8_t left = vreinterpret_s8_f32(vdup_n_f32(a));
    const int8x16_t right = (int8x16_t)b;
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(right), left));
    const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(right), left));
    return (vf)vaddq_s32((int32x4_t)sum, vpaddq_s32(low, high));
  }
#else
  static CH_INLINE vf madd_broadcast(vf sum, Broadcast a, vf b) {
    vi total = (vi)sum;
    for (int shift = 0; shift < 32; shift += 8)
      total += ((vi)((vu)a << (24 - shift)) >> 24) * ((vi)((vu)b << (24 - shift)) >> 24);
    return (vf)total;
  }
#endif
};

}  // namespace CH_NS
