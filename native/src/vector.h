// One vector of floats in the width of the instruction set, and its operations.
//
// Every set with fused multiply-add computes the same bits from the same floats. Products are fused where the source
// says so (`fused`), never by the compiler (-ffp-contract=off); sums along a row have LANES lanes whatever the width of
// a vector (`LaneSums`); and functions use no approximation that only one set has.
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

// Prefetches a cache line: into L2, or with LEVEL 3 into L1. GCC takes a function that only prefetches for one without
// effects and deletes its calls; the empty statement is an effect.
template <int LEVEL = 2, bool WRITTEN = false> CH_INLINE void prefetch_line(const void* line) {
  __builtin_prefetch(line, WRITTEN, LEVEL);
  asm volatile("");
}

// How far each of several contiguous streams of memory prefetches, and into which cache: Intel's processors read them faster
// so. Measured on Emerald Rapids, weights in memory: 1.1 to 1.2 times as fast for bfloat16 and 8-bit integers. Floats leave
// the first cache's few line fill buffers no time, and gain from the second. Zen 3 is slower with it.
#if defined(CH_AVX512) && (defined(CH_AMX) || !defined(CH_BF16DOT))
constexpr int64_t STREAM_BYTES = 2048;
template <class Element> constexpr int stream_level() { return sizeof(Element) < sizeof(float) ? 3 : 2; }
#else
constexpr int64_t STREAM_BYTES = 0;
template <class Element> constexpr int stream_level() { return 2; }
#endif

constexpr int64_t LINE_BYTES = 64;  // of a cache line

// Prefetches what four streams, read by STEP elements, read STREAM_BYTES after element `at`: of each line once, as it begins.
template <int STEP, class Element> CH_INLINE void prefetch_streams(const Element* const streams[4], int64_t at) {
  constexpr int64_t SIZE = sizeof(Element);
  if constexpr (STREAM_BYTES > 0)
    if (STEP * SIZE % LINE_BYTES == 0 || at * SIZE % LINE_BYTES == 0)
#pragma GCC unroll 4
      for (int s = 0; s < 4; s++) prefetch_line<stream_level<Element>()>((const char*)(streams[s] + at) + STREAM_BYTES);
}

#if defined(CH_AVX512)
constexpr int VL = 16;
#elif defined(CH_AVX2)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif
// Partial sums of a sum along a row: one for each column modulo LANES, in PARTS vectors.
constexpr int LANES = 16, PARTS = LANES / VL;

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

// Holds a value that was loaded in a register. GCC would load it again for each of two or three products.
CH_INLINE void hold([[maybe_unused]] vf& value) {
#if defined(CH_AVX512) && defined(__AVX512F__)
  asm("" : "+v"(value));
#elif defined(CH_AVX2)
  asm("" : "+x"(value));
#endif
}

// a * b + c with one rounding, except in the baseline set, which has no such instruction.
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
CH_INLINE vf madd_float(vf sum, Broadcast a, vf b) { return fused(a, b, sum); }
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

CH_INLINE vf vmin(vf a, vf b) {
#if defined(CH_AVX512)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(CH_AVX2)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
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

// The sum of all lanes: of each two that are half a vector apart, and so on down to one.
CH_INLINE float sum_of(vf v) {
#if defined(CH_AVX512) || defined(CH_AVX2)
#if defined(CH_AVX512)
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  const __m256 half = (__m256)v;
#endif
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// The largest lane; never -0.
CH_INLINE float max_of(vf v) {
#if defined(CH_AVX512)
  return _mm512_reduce_max_ps((__m512)v) + 0.0f;
#elif defined(CH_AVX2)
  __m128 s = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s))) + 0.0f;
#elif defined(CH_NEON)
  return vmaxvq_f32((float32x4_t)v) + 0.0f;
#else
  float s = v[0];
  for (int i = 1; i < VL; i++) s = s > v[i] ? s : v[i];
  return s + 0.0f;
#endif
}

// The LANES partial sums of a sum along a row.
struct LaneSums {
  vf part[PARTS] = {};

  CH_INLINE LaneSums operator+(const LaneSums& other) const {
    LaneSums sums;
    for (int p = 0; p < PARTS; p++) sums.part[p] = part[p] + other.part[p];
    return sums;
  }
};

CH_INLINE LaneSums load_lanes(const float* from) {
  LaneSums sums;
  for (int p = 0; p < PARTS; p++) sums.part[p] = load(from + p * VL);
  return sums;
}
CH_INLINE void store_lanes(float* to, const LaneSums& sums) {
  for (int p = 0; p < PARTS; p++) store(to + p * VL, sums.part[p]);
}

CH_INLINE LaneSums merged(LaneSums before, vf shrink, const LaneSums& tile, vf factor) {
  for (int p = 0; p < PARTS; p++) before.part[p] = merged(before.part[p], shrink, tile.part[p], factor);
  return before;
}

CH_INLINE float sum_of(LaneSums sums) {
#pragma GCC unroll 2
  for (int half = PARTS / 2; half > 0; half /= 2)
#pragma GCC unroll 2
    for (int p = 0; p < half; p++) sums.part[p] += sums.part[p + half];
  return sum_of(sums.part[0]);
}

CH_INLINE float max_of(const LaneSums& lanes) {
  vf most = lanes.part[0];
  for (int p = 1; p < PARTS; p++) most = vmax(most, lanes.part[p]);
  return max_of(most);
}

// Calls `body(column, part)` with each vector of columns [low, high), and the part of LANES lanes that it belongs to.
template <class Body> CH_INLINE void for_lanes(int64_t low, int64_t high, const Body& body) {
  int64_t c = low;
  for (; c + LANES - VL < high; c += LANES)
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p++) body(c + p * VL, p);
#pragma GCC unroll 4
  for (int p = 0; p < PARTS - 1; p++)
    if (c + p * VL < high) body(c + p * VL, p);
}

// The natural logarithm of a float, rounded from double: libm's differs between libraries and processors.
//
// x = 2**n (1 + f) with 1 + f near 1, whose logarithm is 2 artanh(f / (2 + f)).
inline float log_of(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? -INF : __builtin_nanf("");
  if (x == INF) return x;
  uint64_t bits;
  double wide = (double)x;
  memcpy(&bits, &wide, sizeof(bits));
  // The mantissa in [sqrt(1/2), sqrt(2)).
  const int64_t exponent = (int64_t)(bits - 0x3fe6a09e667f3bcdu) >> 52;
  bits -= (uint64_t)exponent << 52;
  memcpy(&wide, &bits, sizeof(bits));
  const double ratio = (wide - 1.0) / (wide + 1.0), square = ratio * ratio;
  double series = 0.0;
  for (int k = 15; k >= 1; k -= 2) series = series * square + 1.0 / k;
  return (float)((double)exponent * 0.6931471805599453 + 2.0 * ratio * series);
}

// 2**x. Relative error 2e-7 (DEGREE 5) or 3e-6 (DEGREE 4); exactly 1 for 0 and 0 below -126.5, NaN for NaN. Above 127
// sets differ: infinity or 2**127.
//
// x is split into the nearest integer and a rest, which is exact, whose power is a minimax polynomial.
template <int DEGREE> CH_INLINE vf exp2_of(vf x) {
#if defined(CH_AVX512)
  // The rest of -inf is 0.
  const vf f = (vf)_mm512_reduce_ps((__m512)x, 0x08), whole = x - f;
#else
  // Below -126.5 the exponent bits 0 of -127 make the result 0.
  const vf low = all(-127.0f), high = all(127.0f);
#if defined(CH_AVX2)
  // NaN as the second operand propagates.
  const vf bounded = (vf)_mm256_min_ps((__m256)high, _mm256_max_ps((__m256)low, (__m256)x));
  const vf nearest = (vf)_mm256_round_ps((__m256)bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vi whole = (vi)_mm256_cvtps_epi32((__m256)nearest);
  const vf f = bounded - nearest;
#elif defined(CH_NEON)
  // NaN propagates.
  const vf bounded = (vf)vminq_f32((float32x4_t)high, vmaxq_f32((float32x4_t)low, (float32x4_t)x));
  const vi whole = (vi)vcvtnq_s32_f32((float32x4_t)bounded);
  const vf f = bounded - (vf)vrndnq_f32((float32x4_t)bounded);
#else
  vf bounded = x < low ? low : x;
  bounded = bounded > high ? high : bounded;
  const vf magic = all(12582912.0f), nearest = (bounded + magic) - magic;  // 1.5 * 2**23: adding it rounds
  const vi whole = __builtin_convertvector(nearest, vi);
  const vf f = bounded - nearest;
#endif
#endif
  vf p;
  if constexpr (DEGREE == 5) {
    p = all(1.326472731e-03f);
    p = fused(p, f, all(9.671512991e-03f));
    p = fused(p, f, all(5.550733581e-02f));
    p = fused(p, f, all(2.402224243e-01f));
    p = fused(p, f, all(6.931470037e-01f));
    p = fused(p, f, all(1.0f));
  } else {
    p = all(9.582852945e-03f);
    p = fused(p, f, all(5.590642616e-02f));
    p = fused(p, f, all(2.402409911e-01f));
    p = fused(p, f, all(6.931241751e-01f));
    p = fused(p, f, all(1.0f));
  }
#if defined(CH_AVX512)
  // Also where subnormals are not flushed, 0 as in other sets.
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)whole, (__m512)all(-127.0f), _CMP_NLE_UQ);
  return (vf)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)whole);
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
