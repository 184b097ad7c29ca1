// GEMV: dot products of a few rows with the rows of a matrix in place. Each element of the matrix is used once, so
// packing would cost more than the multiplication.
#pragma once

#include "pack.h"

namespace CH_NS {

// Strided rows defeat the hardware prefetcher, so the loop prefetches. Prefetching in address order and into L2 lets
// the hardware prefetcher continue: with four rows in turn, or into L1, which has few line fill buffers, a core reads
// half as much (measured: 9 and 17 GB/s, rows of 512 bytes).
constexpr int64_t PREFETCH_BYTES = 12 << 10;  // distance from the current read
// The same for lines that are prefetched one by one while others are read.
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
      for (int64_t byte = 0; byte < bytes; byte += LINE_BYTES) prefetch_line(row + byte);
    else
      for (int64_t byte = 0; byte < bytes; byte += LINE_BYTES) prefetch_line<3>(row + byte);
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
template <class M, int ROWS, int AT>
CH_INLINE void add_dots(vf sum[ROWS][4], const typename M::operand* a, int64_t a_row,
                        const typename M::right* const keys[4], int x) {
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    vf b[AT];
    if constexpr (AT == 2) M::get_two(keys[k] + x * VL, b[0], b[1]);
    else b[0] = M::get(keys[k] + x * VL);
    if (AT == 1 && ROWS > 1) hold(b[0]);
#pragma GCC unroll 2
    for (int v = 0; v < AT; v++)
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sum[r][k] = M::madd(sum[r][k], M::row(a + r * a_row + (x + v) * VL), b[v]);
  }
}

// What `add_four` prefetches: so many others, or the continuation of the keys that it reads.
constexpr int OWN_STREAMS = -1;

// Adds dot products of ROWS rows with four keys over vectors [from, to), and prefetches meanwhile. Rows of A have the
// element order that M reads keys in.
template <class M, int ROWS, int PREFETCHED>
CH_INLINE void add_four(vf sum[ROWS][4], const typename M::operand* a, int64_t a_row,
                        const typename M::right* const keys[4], int from, int to,
                        [[maybe_unused]] const typename M::right* const* others) {
  constexpr int AT = M::LOAD_VECTORS, LINE = maximum(1, (int)(LINE_BYTES / (VL * sizeof(typename M::right))));  // vectors
  int x = from;
  for (; x + AT <= to; x += AT) {
    if constexpr (PREFETCHED == OWN_STREAMS) prefetch_streams<AT * VL>(keys, x * VL);
    if (AT == LINE || x % LINE == 0)
#pragma GCC unroll 4
      for (int k = 0; k < PREFETCHED; k++) prefetch_line(others[k] + x * VL);
    add_dots<M, ROWS, AT>(sum, a, a_row, keys, x);
  }
  if (AT == 2 && x < to) add_dots<M, ROWS, 1>(sum, a, a_row, keys, x);
}

// Rows whose dot products with four keys fit in registers, with integers and with M.
#if defined(CH_AVX512) || defined(CH_NEON)
constexpr int DOT_ROWS = 4;
template <class M> constexpr int dot_rows() { return 4; }
#else
constexpr int DOT_ROWS = 2;
template <class M> constexpr int dot_rows() { return M::LOAD_VECTORS == 1 ? 3 : 2; }
#endif
constexpr int MAX_DOT_ROWS = 24;
// Bytes of a key that all rows are multiplied by before the next ones: four keys' stay in the first cache, and what the
// hardware prefetches meanwhile is a large part of the next ones (measured on AVX2, eight rows of float32 from memory: 1.1 to
// 1.2 times as fast as whole keys). Of keys in memory fewer, as what is prefetched is read soon (measured with AVX-512, eight
// rows: 1.1 to 1.3 times as fast; from caches they would take 1.2 to 1.5 times as long, as sums are stored more often).
constexpr int DOT_BYTES = 2048, FAR_DOT_BYTES = 512;

// Calls `body` with the number of rows, at most ROWS, as a constant.
template <int ROWS, class Body> CH_INLINE void for_rows(int rows, const Body& body) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return for_rows<ROWS - 1>(rows, body);
  body.template operator()<ROWS>();
}

// Vectors of a key, and the part of them that rows take turns over.
struct KeyPart {
  int from, to, vectors;
  bool first() const { return from == 0; }
  bool last() const { return to == vectors; }
};

// Dot products of ROWS rows with a part of four keys. Sums wait in `total` for the next part; after the last one their
// lanes are added up, to `scores`. Not inlined: the caller's constants would take registers that sums need.
template <class M, int ROWS, int PREFETCHED>
__attribute__((noinline)) void dot_part(const typename M::operand* a, int64_t a_row,
                                        const typename M::right* const keys[4], const typename M::right* const* others,
                                        const KeyPart& part, vf total[][4], float scores[][4]) {
  vf sum[ROWS][4] = {};
  if (!part.first())
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) sum[r][k] = total[r][k];
  add_four<M, ROWS, PREFETCHED>(sum, a, a_row, keys, part.from, part.to, others);
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++) {
    if (part.last()) {
      horizontal_sums(sum[r], scores[r]);
      continue;
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) total[r][k] = sum[r][k];
  }
}

// Dot products of rows of A, at most MAX_DOT_ROWS, with four keys of `vectors` vectors, to [row][key]. Rows that do not fit
// in registers take turns over each part of the keys, and each turn prefetches its share of what comes DOT_BYTES later, at
// most of the `following` keys (measured, eight rows from memory: 1.1 to 1.25 times as fast). One turn prefetches if
// `streams`, where keys are contiguous.
template <class M>
CH_INLINE void dot_four(int rows, const typename M::operand* a, int64_t a_row, const typename M::right* const keys[4],
                        const typename M::right* const following[4], int vectors, bool far, bool streams,
                        float scores[][4]) {
  constexpr int ROWS = dot_rows<M>(), BYTES = VL * (int)sizeof(typename M::right);
  static_assert(FAR_DOT_BYTES / BYTES % M::LOAD_VECTORS == 0);
  const int turns = (rows + ROWS - 1) / ROWS, at_once = (rows + turns - 1) / turns, share = turns < 4 ? 2 : 1;
  const int step = turns == 1 ? maximum(vectors, 1) : (far ? FAR_DOT_BYTES : DOT_BYTES) / BYTES;
  const int later = minimum(DOT_BYTES / BYTES, vectors);
  vf total[MAX_DOT_ROWS][4];
  for (int x = 0; x == 0 || x < vectors; x += step) {
    const KeyPart part = {x, minimum(x + step, vectors), vectors};
    const typename M::right* others[4];
    for (int k = 0; k < 4 && turns > 1; k++)
      others[k] = x + later < vectors ? keys[k] + later * VL : following[k] + (later - vectors) * VL;
    for (int r = 0, next = 0; r < rows; r += at_once, next += share)
      for_rows<ROWS>(minimum(at_once, rows - r), [&]<int SOME>() CH_INLINED {
        const bool prefetches = turns > 1 ? next < 4 : streams && STREAM_BYTES > 0;
        const auto run = !prefetches  ? dot_part<M, SOME, 0>
                         : turns == 1 ? dot_part<M, SOME, OWN_STREAMS>
                         : share == 2 ? dot_part<M, SOME, 2>
                                      : dot_part<M, SOME, 1>;
        run(a + r * a_row, a_row, keys, prefetches && turns > 1 ? others + next : nullptr, part, total + r, scores + r);
      });
  }
}

// The dot product of a row of A with one key.
template <class M> CH_INLINE float dot_one(const typename M::operand* a, const typename M::right* key, int vectors) {
  vf sum = (vf){};
  int x = 0;
  if constexpr (M::LOAD_VECTORS == 2)
    for (; x + 2 <= vectors; x += 2) {
      vf even, odd;
      M::get_two(key + x * VL, even, odd);
      sum = M::madd(sum, M::row(a + x * VL), even);
      sum = M::madd(sum, M::row(a + (x + 1) * VL), odd);
    }
  for (; x < vectors; x++) sum = M::madd(sum, M::row(a + x * VL), M::get(key + x * VL));
  return sum_of(sum);
}

// Scores of `rows` rows of A, in that order, with keys [0, count), of which `key_at` gives the place.
//
// The four keys that are read together are a quarter of all keys apart, so that each begins a stream of memory: a core
// reads several streams faster than one (measured on Zen 3, one row by weights in memory: 1.1 to 1.4 times as fast as
// neighbours whose successors are prefetched). Of keys that are not contiguous, each stream prefetches the one that is
// `distance` after the one that is read, into L2 if they are `far`, in memory.
template <class M, class KeyAt>
void gemv_dot(int rows, const typename M::operand* a, int64_t a_row, const KeyAt& key_at, int count, int vectors,
              float* scores, int64_t ld, int distance = 0, bool far = false) {
  const int quarter = count / 4;
  for (int c = 0; c < quarter; c++) {
    const typename M::right *keys[4], *following[4];
    for (int k = 0; k < 4; k++) {
      keys[k] = key_at(k * quarter + c), following[k] = key_at(minimum(k * quarter + c + 1, count - 1));
      if (distance > 0 && c + distance < quarter)
        prefetch_rows(key_at(k * quarter + c + distance), 1, 0, vectors * VL * (int64_t)sizeof(typename M::right), far);
    }
    float sums[MAX_DOT_ROWS][4];
    dot_four<M>(rows, a, a_row, keys, following, vectors, far, distance == 0, sums);
    for (int r = 0; r < rows; r++)
      for (int k = 0; k < 4; k++) scores[r * ld + k * quarter + c] = sums[r][k];
  }
  for (int c = 4 * quarter; c < count; c++)
    for (int r = 0; r < rows; r++) scores[r * ld + c] = dot_one<M>(a + r * a_row, key_at(c), vectors);
}

}  // namespace CH_NS
