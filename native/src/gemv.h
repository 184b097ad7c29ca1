// GEMV: dot products of a few rows with the rows of a matrix in place. Each element of the matrix is used once, so
// packing would cost more than the multiplication.
#pragma once

#include "pack.h"

namespace CH_NS {

// Strided rows defeat the hardware prefetcher, so the loop prefetches. Prefetching in address order and into L2 lets
// the hardware prefetcher continue: with four rows in turn, or into L1, which has few line fill buffers, a core reads
// half as much (measured: 9 and 17 GB/s, rows of 512 bytes).
constexpr int64_t PREFETCH_BYTES = 12 << 10;  // distance from the current read
// The same for contiguous rows, prefetched line by line while others are read. A distance a third larger gains nothing
// (measured, one row by weights of 0.2 to 67 MB in memory: 1.1 to 2.0 times as fast as four rows in turn, least with
// long rows).
constexpr int64_t STREAM_PREFETCH_BYTES = 24 << 10;

// Prefetch distance in rows of `bytes`, a multiple of `granularity`.
CH_INLINE int64_t prefetch_distance(int64_t bytes, int64_t granularity) {
  return maximum(granularity, PREFETCH_BYTES / maximum(bytes, (int64_t)1) / granularity * granularity);
}

// Prefetches `rows` rows of `bytes`, `stride` bytes apart; into L2 if they are `far`, in memory.
CH_INLINE void prefetch_rows(const void* from, int64_t rows, int64_t stride, int64_t bytes, bool far) {
  for (int64_t r = 0; r < rows; r++) {
    const char* row = (const char*)from + r * stride;
    if (far)
      for (int64_t byte = 0; byte < bytes; byte += 64) prefetch_line(row + byte);
    else
      for (int64_t byte = 0; byte < bytes; byte += 64) prefetch_line<3>(row + byte);
  }
}

// Floats times 16-bit rows in place. Two vectors of bfloat16 are the halves of one vector of 32-bit words: one
// instruction each, instead of two for widening in order. The even elements come first, then the odd ones.
template <class IO> struct Widened {
  typedef float operand;
  typedef typename IO::type right;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  static constexpr int PACK = 1, LOAD_VECTORS = __is_same(IO, BFloat16) ? 2 : 1, HEIGHT = MR, BLOCK = 1;
#else
  static constexpr int PACK = 1, LOAD_VECTORS = 1, HEIGHT = MR, BLOCK = 1;
#endif
  static CH_INLINE void get_two(const right* b, vf& even, vf& odd) {
    const vu words = *(const vu_any*)b;
    even = (vf)(words << 16);
    odd = (vf)(words & 0xffff0000u);
  }
  static CH_INLINE void put_in_order(vf& even, vf& odd) { interleave(even, odd); }
  // Reorders a row of A for `get_two`: every two vectors are deinterleaved.
  static void deinterleave(float* row, int vectors) {
    for (float* two = row; LOAD_VECTORS == 2 && two + 2 * VL <= row + vectors * VL; two += 2 * VL) {
      float odd[VL];
      for (int i = 0; i < VL; i++) odd[i] = two[2 * i + 1];
      for (int i = 0; i < VL; i++) two[i] = two[2 * i];
      memcpy(two + VL, odd, sizeof(odd));
    }
  }
  static CH_INLINE Broadcast broadcast(const float* a) { return broadcast_float(a); }
  static CH_INLINE vf get(const right* b) { return get_vector<IO>(b); }
  static CH_INLINE vf row(const float* a) { return load(a); }
  static CH_INLINE vf madd(vf sum, vf a, vf b) { return fused(a, b, sum); }
  static CH_INLINE vf madd_broadcast(vf sum, Broadcast a, vf b) { return madd_float(sum, a, b); }
};

// The sums of four vectors.
CH_INLINE void horizontal_sums(const vf v[4], float* to) {
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
#elif defined(CH_AVX2)
  const __m256 pairs = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]), others = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
  const __m256 halves = _mm256_hadd_ps(pairs, others);
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
#elif defined(CH_NEON)
  const float32x4_t pairs = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
  vst1q_f32(to, vpaddq_f32(pairs, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3])));
#else
  for (int i = 0; i < 4; i++) to[i] = sum_of(v[i]);
#endif
}

// Adds dot products of ROWS rows with four keys over AT vectors, from vector x on.
template <class M, int ROWS, int AT, int LINES>
CH_INLINE void add_dots(vf sum[ROWS][4], const typename M::operand* a, int64_t a_row, const typename M::right* key,
                        int64_t key_row, int x, const char* next) {
  constexpr int LINE = maximum(1, 64 / (int)(VL * sizeof(typename M::right)));  // vectors per cache line
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    if (k < LINES && x % LINE == 0) prefetch_line(next + (x / LINE * LINES + k) * 64);
    vf b[AT];
    if constexpr (AT == 2) M::get_two(key + k * key_row + x * VL, b[0], b[1]);
    else b[0] = M::get(key + k * key_row + x * VL);
#pragma GCC unroll 2
    for (int v = 0; v < AT; v++)
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sum[r][k] = M::madd(sum[r][k], M::row(a + r * a_row + (x + v) * VL), b[v]);
  }
}

// Dot products of ROWS rows of A with four keys: `vectors` vectors of elements each, stride `key_row`. For every four
// lines that are read, LINES lines from `next` on are prefetched. Rows of A have the element order that M reads keys in.
template <class M, int ROWS, int LINES>
CH_INLINE void dot_four(const typename M::operand* a, int64_t a_row, const typename M::right* key, int64_t key_row,
                        int vectors, float* scores, int64_t ld, const char* next) {
  vf sum[ROWS][4];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) sum[r][k] = (vf){};
  int x = 0;
  for (; x + M::LOAD_VECTORS <= vectors; x += M::LOAD_VECTORS)
    add_dots<M, ROWS, M::LOAD_VECTORS, LINES>(sum, a, a_row, key, key_row, x, next);
  if (M::LOAD_VECTORS == 2 && x < vectors) add_dots<M, ROWS, 1, LINES>(sum, a, a_row, key, key_row, x, next);
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) horizontal_sums(sum[r], scores + r * ld);
}

// Rows whose dot products with four keys fit in registers.
#if defined(CH_AVX512) || defined(CH_NEON)
constexpr int DOT_ROWS = 4;
#else
constexpr int DOT_ROWS = 2;
#endif

// The same for at most DOT_ROWS rows.
template <class M, int LINES>
CH_INLINE void dot_rows(int rows, const typename M::operand* a, int64_t a_row, const typename M::right* key,
                        int64_t key_row, int vectors, float* scores, int64_t ld, const char* next) {
  if constexpr (DOT_ROWS == 4)
    if (rows == 4) return dot_four<M, 4, LINES>(a, a_row, key, key_row, vectors, scores, ld, next);
  if constexpr (DOT_ROWS >= 3)
    if (rows == 3) return dot_four<M, 3, LINES>(a, a_row, key, key_row, vectors, scores, ld, next);
  if (rows == 2) return dot_four<M, 2, LINES>(a, a_row, key, key_row, vectors, scores, ld, next);
  return dot_four<M, 1, LINES>(a, a_row, key, key_row, vectors, scores, ld, next);
}

// The same for any number of rows, in passes over the four keys. As many bytes as the keys have are prefetched from
// `next` on, LINES rows of them in each pass: all of them in the first would fill the queues of the caches, and leave
// the memory idle in the others.
template <class M, int LINES>
CH_INLINE void dot_passes(int rows, const typename M::operand* a, int64_t a_row, const typename M::right* key,
                          int64_t key_row, int vectors, float* scores, int64_t ld, const char* next) {
  for (int r = 0, row = 0; r < rows; r += DOT_ROWS, row += LINES) {
    const int some = minimum(rows - r, DOT_ROWS);
    if (row < 4)
      dot_rows<M, LINES>(some, a + r * a_row, a_row, key, key_row, vectors, scores + r * ld, ld,
                         next + row * vectors * VL * (int64_t)sizeof(typename M::right));
    else dot_rows<M, 0>(some, a + r * a_row, a_row, key, key_row, vectors, scores + r * ld, ld, nullptr);
  }
}

// Scores of `rows` rows of A, in that order, with keys [0, count). `upcoming`: the rows that are read after these, prefetched
// meanwhile; null: those that follow in memory.
template <class M>
void gemv_dot(int rows, const typename M::operand* a, int64_t a_row, const typename M::right* key, int64_t key_row,
              int count, int vectors, float* scores, int64_t ld, bool far, const typename M::right* upcoming = nullptr) {
  const int64_t size = (int64_t)sizeof(typename M::right), bytes = vectors * VL * size;
  const int64_t rows_prefetched = prefetch_distance(bytes, 4);
  int c = 0;
  for (; c + 4 <= count; c += 4) {
    const typename M::right* four = key + c * key_row;
    if (key_row * size == bytes) {
      const char* next = upcoming != nullptr ? (const char*)(upcoming + c * key_row) : (const char*)four + STREAM_PREFETCH_BYTES;
      if (rows <= DOT_ROWS) dot_rows<M, 4>(rows, a, a_row, four, key_row, vectors, scores + c, ld, next);
      else if (rows <= 2 * DOT_ROWS) dot_passes<M, 2>(rows, a, a_row, four, key_row, vectors, scores + c, ld, next);
      else dot_passes<M, 1>(rows, a, a_row, four, key_row, vectors, scores + c, ld, next);
    } else {
      const int64_t remaining = upcoming != nullptr ? 4 : minimum((int64_t)4, count - c - rows_prefetched);
      const typename M::right* next = upcoming != nullptr ? upcoming + c * key_row : four + rows_prefetched * key_row;
      prefetch_rows(next, remaining, key_row * size, bytes, far);
      if (rows <= DOT_ROWS) dot_rows<M, 0>(rows, a, a_row, four, key_row, vectors, scores + c, ld, nullptr);
      else dot_passes<M, 0>(rows, a, a_row, four, key_row, vectors, scores + c, ld, nullptr);
    }
  }
  for (; c < count; c++)
    for (int r = 0; r < rows; r++) {
      vf sum = (vf){};
      int x = 0;
      if constexpr (M::LOAD_VECTORS == 2)
        for (; x + 2 <= vectors; x += 2) {
          vf even, odd;
          M::get_two(key + c * key_row + x * VL, even, odd);
          sum = M::madd(sum, M::row(a + r * a_row + x * VL), even);
          sum = M::madd(sum, M::row(a + r * a_row + (x + 1) * VL), odd);
        }
      for (; x < vectors; x++)
        sum = M::madd(sum, M::row(a + r * a_row + x * VL), M::get(key + c * key_row + x * VL));
      scores[r * ld + c] = sum_of(sum);
    }
}

}  // namespace CH_NS
