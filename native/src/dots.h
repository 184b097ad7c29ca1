// Products of a few rows with keys as they lie in a tensor, for work that reads each key once: packing would cost
// more than the products do.
#pragma once

#include "pack.h"

namespace CH_NS {

// Rows ahead of the one in use that are asked for: memory answers late, and a strided cache hides the pattern.
constexpr int AHEAD = 24;

// The sums of four vectors.
CH_INLINE void four_sums(const vf v[4], float* to) {
#if defined(CH_AVX512)
  __m128 quarter[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[i]), _mm512_extractf32x8_ps((__m512)v[i], 1));
    quarter[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  _MM_TRANSPOSE4_PS(quarter[0], quarter[1], quarter[2], quarter[3]);
  __m128 sums = _mm_add_ps(_mm_add_ps(quarter[0], quarter[1]), _mm_add_ps(quarter[2], quarter[3]));
  _mm_storeu_ps(to, sums);
#else
  for (int i = 0; i < 4; i++) to[i] = sum_of(v[i]);
#endif
}

// Scores of ROWS rows of A with keys [0, count): `vectors` vectors of numbers each, `key_row` numbers apart.
template <class M, int ROWS>
CH_INLINE void dot_rows(const typename M::number* a, int64_t a_row, const typename M::number* key, int64_t key_row,
                        int count, int vectors, float* scores, int64_t ld) {
  int c = 0;
  for (; c + 4 <= count; c += 4) {
    const typename M::number* line = key + c * key_row;
    vf sum[ROWS][4];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) sum[r][k] = (vf){};
    for (int x = 0; x < vectors; x++) {
      vf b[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        __builtin_prefetch(line + (k + AHEAD) * key_row + x * VL);
        b[k] = M::get(line + k * key_row + x * VL);
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        vf q = M::get(a + r * a_row + x * VL);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) sum[r][k] = M::madd(sum[r][k], q, b[k]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) four_sums(sum[r], scores + r * ld + c);
  }
  for (; c < count; c++)
    for (int r = 0; r < ROWS; r++) {
      vf sum = (vf){};
      for (int x = 0; x < vectors; x++)
        sum = M::madd(sum, M::get(a + r * a_row + x * VL), M::get(key + c * key_row + x * VL));
      scores[r * ld + c] = sum_of(sum);
    }
}

template <class M>
void dots(int rows, const typename M::number* a, int64_t a_row, const typename M::number* key, int64_t key_row,
          int count, int vectors, float* scores, int64_t ld) {
  while (rows >= 4) {
    dot_rows<M, 4>(a, a_row, key, key_row, count, vectors, scores, ld);
    a += 4 * a_row, scores += 4 * ld, rows -= 4;
  }
  if (rows == 3) dot_rows<M, 3>(a, a_row, key, key_row, count, vectors, scores, ld);
  if (rows == 2) dot_rows<M, 2>(a, a_row, key, key_row, count, vectors, scores, ld);
  if (rows == 1) dot_rows<M, 1>(a, a_row, key, key_row, count, vectors, scores, ld);
}

}  // namespace CH_NS
