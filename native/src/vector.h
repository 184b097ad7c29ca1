// One vector of floats in the width of the instruction set, and its operations.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(CH_AVX512) || defined(CH_AVX2)
#include <immintrin.h>
#elif defined(CH_NEON)
#include <arm_neon.h>
#endif

#define CH_INLINE inline __attribute__((always_inline))
#define CH_INLINED __attribute__((always_inline))  // for lambdas

namespace CH_NS {

#if defined(CH_AVX512)
constexpr int VL = 16;
#elif defined(CH_AVX2)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef float vf_any __attribute__((vector_size(VL * 4), aligned(4)));
typedef uint32_t vu_any __attribute__((vector_size(VL * 4), aligned(2), may_alias));

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float INF = __builtin_inff();

CH_INLINE vf load(const float* p) { return *(const vf_any*)p; }
CH_INLINE void store(float* p, vf v) { *(vf_any*)p = v; }
// 16-bit elements, aligned to 2 bytes only.
CH_INLINE vh get_halves(const uint16_t* p) {
  vh halves;
  memcpy(&halves, p, sizeof(halves));
  return halves;
}
CH_INLINE void put_halves(uint16_t* p, vh halves) { memcpy(p, &halves, sizeof(halves)); }
CH_INLINE vf all(float x) { return x - (vf){}; }

// A value broadcast to all lanes. NEON's multiplications broadcast a lane by themselves, and a separate broadcast would
// occupy a multiplier; left to choose, GCC emits one for every sixth row.
#if defined(CH_NEON)
typedef float Broadcast;
CH_INLINE Broadcast broadcast_float(const float* x) { return *x; }
CH_INLINE vf madd_float(vf sum, Broadcast a, vf b) {
  asm("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(sum) : "w"(b), "w"(a));
  return sum;
}
#else
typedef vf Broadcast;
CH_INLINE Broadcast broadcast_float(const float* x) { return all(*x); }
CH_INLINE vf madd_float(vf sum, Broadcast a, vf b) { return sum + a * b; }
#endif

template <class T> CH_INLINE constexpr T minimum(T a, T b) { return a < b ? a : b; }
template <class T> CH_INLINE constexpr T maximum(T a, T b) { return a > b ? a : b; }
CH_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

CH_INLINE vf vmax(vf a, vf b) {
#if defined(CH_AVX512)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(CH_AVX2)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// a * b + c with one rounding, where the set has it. Expressions leave it to the compiler which of two products it fuses.
CH_INLINE vf fused(vf a, vf b, vf c) {
#if defined(CH_AVX512)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(CH_AVX2)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(CH_NEON)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// What a row has, and a tile's sum, each with its factor of the online softmax.
CH_INLINE vf merged(vf before, vf shrink, vf tile, vf factor) { return fused(before, shrink, tile * factor); }

CH_INLINE vf absolute(vf v) { return (vf)((vi)v & 0x7fffffff); }

// Interleaves the elements of two vectors: the results continue from `one` to `other`.
CH_INLINE void interleave(vf& one, vf& other) {
#if defined(CH_AVX512)
  const __m512i low = (__m512i)(vi){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const __m512i high = (__m512i)(vi){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512 first = (__m512)one;
  one = (vf)_mm512_permutex2var_ps(first, low, (__m512)other);
  other = (vf)_mm512_permutex2var_ps(first, high, (__m512)other);
#elif defined(CH_AVX2)
  const __m256 low = _mm256_unpacklo_ps((__m256)one, (__m256)other), high = _mm256_unpackhi_ps((__m256)one, (__m256)other);
  one = (vf)_mm256_permute2f128_ps(low, high, 0x20);
  other = (vf)_mm256_permute2f128_ps(low, high, 0x31);
#elif defined(CH_NEON)
  const float32x4_t first = (float32x4_t)one, second = (float32x4_t)other;
  one = (vf)vzip1q_f32(first, second);
  other = (vf)vzip2q_f32(first, second);
#else
  const vf first = one, second = other;
  for (int i = 0; i < VL; i++) {
    one[i] = i % 2 == 0 ? first[i / 2] : second[i / 2];
    other[i] = i % 2 == 0 ? first[VL / 2 + i / 2] : second[VL / 2 + i / 2];
  }
#endif
}

// 0, 1, 2 and so on.
CH_INLINE vf counting() {
  vf v;
  for (int i = 0; i < VL; i++) v[i] = (float)i;
  return v;
}

// A lane mask.
#if defined(CH_AVX512)
typedef __mmask16 Lanes;
#else
typedef vi Lanes;  // 0 or -1
#endif

// One bit per lane.
CH_INLINE uint32_t bits_of(Lanes lanes) {
#if defined(CH_AVX512)
  return lanes;
#elif defined(CH_AVX2)
  return (uint32_t)_mm256_movemask_ps((__m256)lanes);
#elif defined(CH_NEON)
  return vaddvq_u32((uint32x4_t)(lanes & (vi){1, 2, 4, 8}));
#else
  uint32_t bits = 0;
  for (int i = 0; i < VL; i++) bits |= (uint32_t)(lanes[i] & 1) << i;
  return bits;
#endif
}

// One bit per lane: a > b.
CH_INLINE uint32_t above(vf a, vf b) {
#if defined(CH_AVX512)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
  return bits_of((Lanes)(a > b));
#endif
}

// The first `count` lanes of v, and the others of `rest`.
CH_INLINE vf first_of(vf v, int64_t count, vf rest = (vf){}) {
#if defined(CH_AVX512)
  return (vf)_mm512_mask_mov_ps((__m512)rest, (__mmask16)((1u << count) - 1), (__m512)v);
#else
  const vi inside = counting() < all((float)count);
  return (vf)(((vi)v & inside) | ((vi)rest & ~inside));
#endif
}

CH_INLINE float sum_of(vf v) {
#if defined(CH_AVX512)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(CH_AVX2)
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#elif defined(CH_NEON)
  return vaddvq_f32((float32x4_t)v);
#else
  float s = 0;
  for (int i = 0; i < VL; i++) s += v[i];
  return s;
#endif
}

CH_INLINE float max_of(vf v) {
#if defined(CH_AVX512)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(CH_AVX2)
  __m128 s = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
#elif defined(CH_NEON)
  return vmaxvq_f32((float32x4_t)v);
#else
  float s = v[0];
  for (int i = 1; i < VL; i++) s = s > v[i] ? s : v[i];
  return s;
#endif
}

// 2**x. Relative error 1e-7 (DEGREE 5) or 4e-6 (DEGREE 4); exactly 0 for -inf, NaN for NaN.
//
// x is split into its floor and a fraction in [0, 1), whose power is a minimax polynomial.
template <int DEGREE> CH_INLINE vf exp2_of(vf x) {
#if defined(CH_AVX512)
  // The immediate 1 rounds down; the fraction of -inf is 0, and scalef of -inf is 0.
  vf f = (vf)_mm512_reduce_ps((__m512)x, 0x09);
#else
  // Below -126 the result is not a normal float: the exponent bits 0 of -127 make it 0.
  const vf low = all(-127.0f), high = all(127.0f);
#if defined(CH_AVX2)
  // NaN as the second operand propagates.
  const vf bounded = (vf)_mm256_min_ps((__m256)high, _mm256_max_ps((__m256)low, (__m256)x));
  const vf floor = (vf)_mm256_floor_ps((__m256)bounded);
  const vi whole = (vi)_mm256_cvtps_epi32((__m256)floor);
  const vf f = bounded - floor;
#elif defined(CH_NEON)
  // NaN propagates.
  const vf bounded = (vf)vminq_f32((float32x4_t)high, vmaxq_f32((float32x4_t)low, (float32x4_t)x));
  const vi whole = (vi)vcvtmq_s32_f32((float32x4_t)bounded);
  const vf f = bounded - (vf)vrndmq_f32((float32x4_t)bounded);
#else
  vf bounded = x < low ? low : x;
  bounded = bounded > high ? high : bounded;
  vi whole = __builtin_convertvector(bounded, vi);
  whole += __builtin_convertvector(whole, vf) > bounded;  // -1 if the conversion rounded up
  const vf f = bounded - __builtin_convertvector(whole, vf);
#endif
#endif
  vf p;
  if constexpr (DEGREE == 5) {
    p = all(1.877576695e-03f);
    p = p * f + all(8.989340626e-03f);
    p = p * f + all(5.582631752e-02f);
    p = p * f + all(2.401536107e-01f);
    p = p * f + all(6.931530833e-01f);
    p = p * f + all(9.999999404e-01f);
  } else {
    p = all(1.353416778e-02f);
    p = p * f + all(5.201146379e-02f);
    p = p * f + all(2.414427549e-01f);
    p = p * f + all(6.930038333e-01f);
    p = p * f + all(1.000002623f);
  }
#if defined(CH_AVX512)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  const vf power = p * (vf)((whole + 127) << 23);
#if defined(CH_AVX2) || defined(CH_NEON)
  return power;
#else
  return x == x ? power : x;
#endif
#endif
}

}  // namespace CH_NS
