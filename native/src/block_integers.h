// Rows of x as integers in blocks of steps, for dot products with a weight of integers.
//
// Each block has a scale of its own, a power of two, so that the largest element takes 14 bits and a sign: an element down to
// 2^-6 of it, in bfloat16, is exact, and smaller ones are rounded to 2^-14 of it. A row with NaN or infinity has NaN in its
// output.
#pragma once

#include "quantized_gemv.h"
#include "quantized_rows.h"

namespace CH_NS {

// The float whose bits have this exponent alone.
inline float power_of_two(int exponent) {
  const uint32_t bits = (uint32_t)(exponent + 127) << 23;
  float power;
  memcpy(&power, &bits, sizeof(power));
  return power;
}

// What an integer of a block stands for, and its inverse. NaN where the block has NaN or infinity.
struct BlockUnit {
  static constexpr int BITS_OF_LARGEST = 14;
  float unit, inverse;

  BlockUnit(const float* value, int64_t count) {
    vf most = {}, zero = {};
    for (int64_t s = 0; s < count; s += VL) {
      const vf x = load(value + s);
      most = vmax(most, absolute(x)), zero += x * (vf){};
    }
    const float largest = maximum(max_of(most), 0x1p-100f);
    uint32_t bits;
    memcpy(&bits, &largest, sizeof(bits));
    const int exponent = (int)(bits >> 23) - 127;  // the largest is at least 2^exponent, and less than twice that
    unit = power_of_two(exponent + 1 - BITS_OF_LARGEST) + sum_of(zero);
    inverse = power_of_two(BITS_OF_LARGEST - 1 - exponent);
  }

  // The integers of a vector, and the values that they stand for in its place.
  vi take(float* value) const {
    const vf whole = nearest(load(value) * inverse);
    store(value, whole * unit);
    return __builtin_convertvector(whole, vi);
  }
};

// By what the lanes of a block's sums are scaled: one scale, or those of the groups within the block.
class BlockFactors {
  const int64_t groups;
  vi group_of_lane;

#if defined(CH_AVX2)
  template <int COUNT> static CH_INLINE __m128 first_four(const float* from) {
    return COUNT == 2 ? _mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)from)) : _mm_loadu_ps(from);
  }
#endif

 public:
  const int64_t within;  // groups of a block that has several, or 1
  const int64_t span;  // steps, whole blocks, that have the same scales

  static bool takes(const ch_quantized& w, int64_t block) {
    return w.group == w.steps || w.group % block == 0 || ((w.group == block / 2 || w.group == block / 4) && w.group >= 8);
  }

  BlockFactors(const ch_quantized& w, int64_t block)
      : groups(w.steps / w.group), group_of_lane{}, within(groups == 1 ? 1 : maximum((int64_t)1, block / w.group)),
        span(round_up(w.group, block)) {
    for (int64_t i = 0; i < VL; i++) group_of_lane[i] = (int32_t)(i * block / VL / w.group);
  }

  // Of a row's scales, from that of group g on.
  CH_INLINE vf at(const float* scale, [[maybe_unused]] int64_t g) const {
    if (within == 1) return all(scale[g]);
#if defined(CH_AVX512)
    const vf some = load_first(scale + g, minimum(within, groups - g));
    return (vf)_mm512_permutexvar_ps((__m512i)group_of_lane, (__m512)some);
#elif defined(CH_AVX2)
    const vf some = load_first(scale + g, minimum(within, groups - g));
    return (vf)_mm256_permutevar8x32_ps((__m256)some, (__m256i)group_of_lane);
#else
    vf factor;
    for (int i = 0; i < VL; i++) factor[i] = scale[minimum(g + group_of_lane[i], groups - 1)];
    return factor;
#endif
  }

#if defined(CH_AVX2)
  // The same for a block of which all GROUPS groups exist; the first one's scale is that at `scale`.
  template <int GROUPS> CH_INLINE vf of_all(const float* scale) const {
    if (GROUPS == 1) return all(*scale);
    return (vf)_mm256_permutevar8x32_ps(_mm256_castps128_ps256(first_four<GROUPS>(scale)), (__m256i)group_of_lane);
  }
#endif

  // The group with which the span after that of group g begins, or so many spans after it.
  int64_t after(int64_t g, int64_t spans = 1) const { return g + spans * within; }

  // How many of the groups of a block exist, of which g is the first.
  int64_t count(int64_t g) const { return minimum(within, groups - g); }
};

}  // namespace CH_NS
