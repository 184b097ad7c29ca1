// Dot products of a few rows with keys in place, in the order of the micro-kernel: lanes are keys, and every sum runs
// along the steps. Keys are transposed in registers, four words at a time, and used at once.
#pragma once

#include "gemv.h"

namespace CH_NS {

// Most rows, and keys in vectors per pass: one sum of a row waits for latency.
constexpr int COLUMN_DOT_ROWS = 4;
#if defined(CH_AVX512) || defined(CH_NEON)
constexpr int COLUMN_DOT_VECTORS = 2;
#else
constexpr int COLUMN_DOT_VECTORS = 1;
#endif

// The same of int8 keys for one or two rows: each word of a key is four products of one sum, which wait for each other.
constexpr int COLUMN_DOT_VECTORS_INT8 = 4;

// Lines of rows in address order, prefetched a few at a time.
struct LinePrefetch {
  const char *at, *end;
  int64_t bytes, stride;

  LinePrefetch(const void* first, int64_t row_bytes, int64_t row_stride)
      : at((const char*)first), end((const char*)first + row_bytes), bytes(row_bytes), stride(row_stride) {}
  CH_INLINE void step(int lines) {
    for (int line = 0; line < lines; line++) {
      prefetch_line(at);
      at += LINE_BYTES;
      if (at < end) continue;
      at = end - bytes + stride;
      end += stride;
    }
  }
};

#if defined(CH_AVX512) || defined(CH_AVX2) || defined(CH_NEON)
constexpr bool HAS_COLUMN_DOT = true;

// Four words of VL rows, `stride` bytes apart: to[i] has word i of each. Lanes of 128 bits are filled from memory, which
// leaves half of a whole transposition's shuffles.
CH_INLINE void transpose_four(const char* from, int64_t stride, Words* to) {
  Words r[4], t[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const char* row = from + i * stride;
#if defined(CH_AVX512)
    r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)row));
    r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i*)(row + 4 * stride)), 1);
    r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i*)(row + 8 * stride)), 2);
    r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i*)(row + 12 * stride)), 3);
#elif defined(CH_AVX2)
    r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float*)row)),
                                _mm_loadu_ps((const float*)(row + 4 * stride)), 1);
#else
    r[i] = vreinterpretq_u32_u8(vld1q_u8((const uint8_t*)row));
#endif
  }
  interleave(r[0], r[1], t);
  interleave(r[2], r[3], t + 2);
  interleave_pairs(t[0], t[2], to);
  interleave_pairs(t[1], t[3], to + 2);
}

// The lower and the upper halves of words as floats.
template <class IO> CH_INLINE void split_words(Words words, vf& lower, vf& upper) {
  if constexpr (__is_same(IO, BFloat16)) {
    lower = (vf)((vu)words << 16);
    upper = (vf)((vu)words & 0xffff0000u);
  } else {
#if defined(CH_AVX512)
    static const uint16_t order[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                       1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    const __m512i halves = _mm512_permutexvar_epi16(_mm512_loadu_si512(order), words);
    lower = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    upper = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
#elif defined(CH_AVX2)
    const __m256i both = (__m256i)words, low = _mm256_and_si256(both, _mm256_set1_epi32(0xffff));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, _mm256_srli_epi32(both, 16)), 0xd8);
    lower = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    upper = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#else
    lower = (vf)vcvt_f32_f16((float16x4_t)vmovn_u32(words));
    upper = (vf)vcvt_f32_f16((float16x4_t)vshrn_n_u32(words, 16));
#endif
  }
}

// Operands in a word of a key.
template <class M, class IO> constexpr int operands_a_word() {
  if (__is_same(IO, Int8)) return 4 / M::PACK;
  return sizeof(typename IO::type) == sizeof(typename M::operand) || M::PACK == 2 ? 1 : 2;
}

// The same with a word of four int8 integers of each key.
template <class M, int ROWS> CH_INLINE void add_integers(vf* sum, const typename M::operand* a, int64_t a_row, Words words) {
  const vu four = (vu)words;
  const vf integer[4] = {signed_byte(four << 24), signed_byte(four << 16), signed_byte(four << 8), signed_byte(four)};
#pragma GCC unroll 4
  for (int o = 0; o < 4 / M::PACK; o++) {
    vf operand = integer[o];
    if constexpr (M::PACK == 2) operand = (vf)((vu)integer[2 * o] >> 16 | (vu)integer[2 * o + 1]);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sum[r] = M::madd_broadcast(sum[r], M::broadcast(a + r * a_row + o), operand);
  }
}

// Adds the products with one word of each key: one operand, or two that are widened.
template <class M, class IO, int ROWS>
CH_INLINE void add_words(vf* sum, const typename M::operand* a, int64_t a_row, Words words) {
  if constexpr (__is_same(IO, Int8)) {
    add_integers<M, ROWS>(sum, a, a_row, words);
  } else if constexpr (operands_a_word<M, IO>() == 1) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sum[r] = M::madd_broadcast(sum[r], M::broadcast(a + r * a_row), (vf)words);
  } else {
    vf lower, upper;
    split_words<IO>(words, lower, upper);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sum[r] = M::madd_broadcast(sum[r], M::broadcast(a + r * a_row), lower);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sum[r] = M::madd_broadcast(sum[r], M::broadcast(a + r * a_row + 1), upper);
  }
}

// Dot products of ROWS rows of A with VECTORS vectors of keys, `words` words each; a vector's keys are `stride` bytes
// apart.
template <class M, class IO, int ROWS, int VECTORS>
CH_INLINE void dot_columns(const typename M::operand* a, int64_t a_row, const void* const* keys, int64_t stride, int words,
                           float* scores, int64_t ld, LinePrefetch next) {
  constexpr int OPERANDS = operands_a_word<M, IO>();
  vf sum[VECTORS][ROWS];
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) sum[v][r] = (vf){};
  for (int x = 0; x < words; x += 4) {
    next.step(VECTORS * VL / 4);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      Words step[4];
      transpose_four((const char*)keys[v] + 4 * x, stride, step);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) add_words<M, IO, ROWS>(sum[v], a + (x + i) * OPERANDS, a_row, step[i]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) store(scores + r * ld + v * VL, sum[v][r]);
}

template <class M, class IO, int VECTORS>
__attribute__((noinline)) void column_dot(int rows, const typename M::operand* a, int64_t a_row, const void* const* keys,
                                          int64_t stride, int words, float* scores, int64_t ld, LinePrefetch next) {
  switch (rows) {
    case 4: return dot_columns<M, IO, 4, VECTORS>(a, a_row, keys, stride, words, scores, ld, next);
    case 3: return dot_columns<M, IO, 3, VECTORS>(a, a_row, keys, stride, words, scores, ld, next);
    case 2: return dot_columns<M, IO, 2, VECTORS>(a, a_row, keys, stride, words, scores, ld, next);
    default: return dot_columns<M, IO, 1, VECTORS>(a, a_row, keys, stride, words, scores, ld, next);
  }
}
#else
constexpr bool HAS_COLUMN_DOT = false;

template <class M, class IO, int VECTORS>
void column_dot(int, const typename M::operand*, int64_t, const void* const*, int64_t, int, float*, int64_t, LinePrefetch) {}
#endif

}  // namespace CH_NS
