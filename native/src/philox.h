// Which weights dropout keeps: Philox4x32-10 (Salmon et al. 2011, section 3.3), a function of the place alone.
//
// The counter is (k_pos / 4, q_pos, head, batch), the key is the seed; word k_pos % 4 decides. So forward and
// backward, every tile and every number of threads see the same mask.
#pragma once

#include "vector.h"

namespace CH_NS {

struct Dropout {
  uint32_t threshold;  // a weight is kept where its word is at least this
  uint32_t key[2];
  float factor;  // on what is kept
  bool on;
};

// High and low words of a * b for each lane.
CH_INLINE void wide_product(vu a, uint32_t b, vu& high, vu& low) {
#if defined(CH_AVX512)
  __m512i factor = _mm512_set1_epi32((int)b);
  __m512i even = _mm512_mul_epu32((__m512i)a, factor);
  __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
  low = (vu)_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
  high = (vu)_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
#elif defined(CH_AVX2)
  __m256i factor = _mm256_set1_epi32((int)b);
  __m256i even = _mm256_mul_epu32((__m256i)a, factor);
  __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
  low = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  high = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#else
  for (int i = 0; i < VL; i++) {
    uint64_t product = (uint64_t)a[i] * b;
    low[i] = (uint32_t)product;
    high[i] = (uint32_t)(product >> 32);
  }
#endif
}

CH_INLINE void philox(vu counter[4], uint32_t key0, uint32_t key1) {
#pragma GCC unroll 10
  for (int round = 0; round < 10; round++) {
    vu high0, low0, high1, low1;
    wide_product(counter[0], 0xD2511F53u, high0, low0);
    wide_product(counter[2], 0xCD9E8D57u, high1, low1);
    counter[0] = high1 ^ counter[1] ^ (key0 - (vu){});
    counter[1] = low1;
    counter[2] = high0 ^ counter[3] ^ (key1 - (vu){});
    counter[3] = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// Sets to 0 the weights that are dropped: keys [first, first + count) of one row. Beyond them nothing is touched.
CH_INLINE void drop(const Dropout& d, uint32_t batch, uint32_t head, uint32_t q_pos, int64_t first, int64_t count,
                    float* weights) {
  // Counters have 4 keys each, and lie VL together.
  const int64_t skipped = first % (4 * VL), end = skipped + count;
  vu lanes;
  for (int i = 0; i < VL; i++) lanes[i] = (uint32_t)i;
  weights -= skipped;
  for (int64_t k = 0; k < end; k += 4 * VL) {
    vu words[4] = {lanes + (uint32_t)((first - skipped + k) / 4), q_pos - (vu){}, head - (vu){}, batch - (vu){}};
    philox(words, d.key[0], d.key[1]);
#if defined(CH_AVX512)
    __m512i least_word = _mm512_set1_epi32((int)d.threshold);
    uint64_t keep = 0;
    keep |= _pdep_u64(_mm512_cmpge_epu32_mask((__m512i)words[0], least_word), 0x1111111111111111ull);
    keep |= _pdep_u64(_mm512_cmpge_epu32_mask((__m512i)words[1], least_word), 0x2222222222222222ull);
    keep |= _pdep_u64(_mm512_cmpge_epu32_mask((__m512i)words[2], least_word), 0x4444444444444444ull);
    keep |= _pdep_u64(_mm512_cmpge_epu32_mask((__m512i)words[3], least_word), 0x8888888888888888ull);
    if (k < skipped) keep |= (1ull << (skipped - k)) - 1;
    if (end - k < 64) keep |= ~0ull << (end - k);
    // What is kept stays; the rest is overwritten with 0.
    for (int v = 0; v < 4 && k + v * VL < end; v++)
      _mm512_mask_storeu_ps(weights + k + v * VL, (__mmask16)(~keep >> (16 * v)), _mm512_setzero_ps());
#else
    for (int lane = 0; lane < VL; lane++)
      for (int word = 0; word < 4; word++) {
        int64_t place = k + 4 * lane + word;
        if (place >= skipped && place < end && words[word][lane] < d.threshold) weights[place] = 0.0f;
      }
#endif
  }
}

}  // namespace CH_NS
