// Packing from tensors into the layouts that the GEMM kernel reads, and back.
//
// Three layouts. *Rows*: [row][ld] operands, steps along the row: A, and for floats also B if its steps are rows.
// *Panels*: the transpose in panels of PW columns, [panel][step][PW]: B for A rows along head_dim. *Paired rows*
// (bfloat16 only): [row / 2][ld] pairs of neighbouring rows: B if its steps are rows. Padding is 0.
#pragma once

#include "gemm_kernel.h"

namespace CH_NS {

struct Float32 {
  typedef float type;
};
struct BFloat16 {
  typedef uint16_t type;
};
struct Float16 {
  typedef uint16_t type;
};
// The integers of quantized rows, without their scales. They are exact in bfloat16.
struct Int8 {
  typedef int8_t type;
};
typedef int8_t vb __attribute__((vector_size(VL)));
// The upper bytes of words as floats.
CH_INLINE vf signed_byte(vu words) { return __builtin_convertvector((vi)words >> 24, vf); }

CH_INLINE float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

CH_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

CH_INLINE float half_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // Subnormal halves are normal floats; no intermediate may be a subnormal float, which the FTZ mode would flush to 0.
  if (rest < 0x400) return bits_to_float(float_to_bits((float)rest * bits_to_float(0x33800000)) | sign);  // 2**-24
  return bits_to_float(sign | ((rest << 13) + 0x38000000));
}

CH_INLINE uint16_t float_to_half(float value) {
  uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal: the addition rounds it
    float shifted = bits_to_float(bits) + 0.5f;
    return (uint16_t)(sign | (float_to_bits(shifted) - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return (uint16_t)(sign | (bits - 0x38000000) >> 13);
}

CH_INLINE uint16_t float_to_bfloat(float value) {
  uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class IO> CH_INLINE float get_one(const typename IO::type* p);
template <> CH_INLINE float get_one<Float32>(const float* p) { return *p; }
template <> CH_INLINE float get_one<BFloat16>(const uint16_t* p) { return bits_to_float((uint32_t)*p << 16); }
template <> CH_INLINE float get_one<Float16>(const uint16_t* p) { return half_to_float(*p); }
template <> CH_INLINE float get_one<Int8>(const int8_t* p) { return (float)*p; }

template <class IO> CH_INLINE void put_one(typename IO::type* p, float x);
template <> CH_INLINE void put_one<Float32>(float* p, float x) { *p = x; }
template <> CH_INLINE void put_one<BFloat16>(uint16_t* p, float x) { *p = float_to_bfloat(x); }
template <> CH_INLINE void put_one<Float16>(uint16_t* p, float x) { *p = float_to_half(x); }

template <class IO> CH_INLINE vf get_vector(const typename IO::type* p) {
  if constexpr (__is_same(typename IO::type, float)) {
    return load(p);
  } else if constexpr (__is_same(IO, Int8)) {
    // GCC 12 converts vectors of bytes one element at a time.
#if defined(CH_AVX512)
    return __builtin_convertvector((vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)), vf);
#elif defined(CH_AVX2)
    return __builtin_convertvector((vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), vf);
#elif defined(CH_NEON)
    uint64_t bytes = 0;
    memcpy(&bytes, p, VL);
    return __builtin_convertvector((vi)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bytes)))), vf);
#else
    vf v;
    for (int i = 0; i < VL; i++) v[i] = get_one<IO>(p + i);
    return v;
#endif
  } else {
#if defined(CH_AVX512)
    __m256i halves = _mm256_loadu_si256((const __m256i*)p);
    if constexpr (__is_same(IO, BFloat16)) return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    return (vf)_mm512_cvtph_ps(halves);
#elif defined(CH_AVX2)
    __m128i halves = _mm_loadu_si128((const __m128i*)p);
    if constexpr (__is_same(IO, BFloat16)) return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
    return (vf)_mm256_cvtph_ps(halves);
#elif defined(CH_NEON)
    if constexpr (__is_same(IO, BFloat16)) return (vf)vshll_n_u16(vld1_u16(p), 16);
    return (vf)vcvt_f32_f16((float16x4_t)vld1_u16(p));
#else
    vf v;
    for (int i = 0; i < VL; i++) v[i] = get_one<IO>(p + i);
    return v;
#endif
  }
}

#if !defined(CH_BF16DOT)
// Rounded to bfloat16, as `float_to_bfloat`.
CH_INLINE vh rounded(vf x) {
  const vu bits = (vu)x, nearest = bits + 0x7fff + (bits >> 16 & 1);
#if defined(CH_AVX512)
  // GCC 12 takes twice the instructions for the lines below.
  static const uint16_t upper_halves[32] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
  const __m512i all_bits = _mm512_mask_or_epi32((__m512i)nearest, is_nan, (__m512i)bits, _mm512_set1_epi32(0x400000));
  return (vh)_mm512_castsi512_si256(_mm512_permutexvar_epi16(_mm512_loadu_si512(upper_halves), all_bits));
#else
  const vu is_nan = (vu)((bits & 0x7fffffff) > 0x7f800000);
  return __builtin_convertvector(((is_nan & (bits | 0x400000)) | (~is_nan & nearest)) >> 16, vh);
#endif
}
#endif

template <class IO> CH_INLINE void put_vector(typename IO::type* p, vf x) {
  if constexpr (__is_same(typename IO::type, float)) {
    store(p, x);
  } else if constexpr (__is_same(IO, BFloat16)) {
    put_halves(p, rounded(x));
  } else {
#if defined(CH_AVX512)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(CH_AVX2)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(CH_NEON)
    put_halves(p, (vh)vcvt_f16_f32((float32x4_t)x));
#else
    for (int i = 0; i < VL; i++) put_one<IO>(p + i, x[i]);
#endif
  }
}

// `count` elements of a row as floats; zeros up to `ld`.
template <class IO> CH_INLINE void get_row(const typename IO::type* from, int count, float* to, int ld) {
  int c = 0;
  for (; c + VL <= count; c += VL) store(to + c, get_vector<IO>(from + c));
  for (; c < count; c++) to[c] = get_one<IO>(from + c);
  for (; c < ld; c++) to[c] = 0.0f;
}

template <class IO> CH_INLINE void put_row(typename IO::type* to, int count, const float* from, float factor) {
  int c = 0;
  for (; c + VL <= count; c += VL) put_vector<IO>(to + c, load(from + c) * all(factor));
  if (c >= count) return;
  // The remainder uses the same instructions: bf16 rounding flushes subnormals.
  float padded[VL] = {};
  typename IO::type rounded[VL];
  for (int i = 0; i < count - c; i++) padded[i] = from[c + i] * factor;
  put_vector<IO>(rounded, load(padded));
  for (int i = 0; i < count - c; i++) to[c + i] = rounded[i];
}

#if defined(CH_BF16DOT)
// Two vectors of int8 integers as the operands of bf16 dot-product instructions. The lower half of such a float is 0.
CH_INLINE vu paired_integers(vf one, vf other) { return (vu)one >> 16 | (vu)other; }

// A vector of pairs from a row of int8 integers with `count` left, zero-padded.
CH_INLINE vu get_pairs(const int8_t* from, int count) {
  uint16_t padded[VL] = {};
  if (count < 2 * VL) memcpy(padded, from, (size_t)maximum(0, count));
  const vh halves = get_halves(count < 2 * VL ? padded : (const uint16_t*)from);
#if defined(CH_AVX512)
  const vu two = (vu)_mm512_cvtepu16_epi32((__m256i)halves);
#else
  const vu two = (vu)vmovl_u16((uint16x4_t)halves);
#endif
  return paired_integers(signed_byte(two << 24), signed_byte(two << 16));
}
#endif

// A row as operands of M: floats, or bfloat16 unconverted; whole vectors, zero-padded.
template <class M, class IO>
CH_INLINE void get_operands(const typename IO::type* from, int count, typename M::operand* to, int ld) {
  if constexpr (M::PACK == 1) {
    get_row<IO>(from, count, to, ld);
  } else {
#if defined(CH_BF16DOT)
    // A call to memcpy costs more than most rows.
    for (int c = 0; c < ld; c += VL) *(vu_any*)(to + c) = get_pairs(from + 2 * c, count - 2 * c);
#endif
  }
}

// Operands of M in a row of A with `dim` elements.
template <class M> CH_INLINE int row_operands(int dim) { return (int)round_up(dim, VL * M::PACK) / M::PACK; }

// A vector of words. Within lanes of 128 bits: interleaves words of two vectors, of the lower halves or the upper
// halves; then pairs of words.
#if defined(CH_AVX512)
typedef __m512i Words;
CH_INLINE Words load_words(const uint32_t* from) { return _mm512_loadu_si512(from); }
CH_INLINE void store_words(uint32_t* to, Words words) { _mm512_storeu_si512(to, words); }
CH_INLINE void interleave(Words a, Words b, Words* to) {
  to[0] = _mm512_unpacklo_epi32(a, b);
  to[1] = _mm512_unpackhi_epi32(a, b);
}
CH_INLINE void interleave_pairs(Words a, Words b, Words* to) {
  to[0] = _mm512_unpacklo_epi64(a, b);
  to[1] = _mm512_unpackhi_epi64(a, b);
}
#elif defined(CH_NEON)
typedef uint32x4_t Words;
// Words of two 16-bit numbers may start at an odd one.
CH_INLINE Words load_words(const uint32_t* from) { return vreinterpretq_u32_u8(vld1q_u8((const uint8_t*)from)); }
CH_INLINE void store_words(uint32_t* to, Words words) { vst1q_u32(to, words); }
CH_INLINE void interleave(Words a, Words b, Words* to) {
  to[0] = vzip1q_u32(a, b);
  to[1] = vzip2q_u32(a, b);
}
CH_INLINE void interleave_pairs(Words a, Words b, Words* to) {
  to[0] = (Words)vzip1q_u64((uint64x2_t)a, (uint64x2_t)b);
  to[1] = (Words)vzip2q_u64((uint64x2_t)a, (uint64x2_t)b);
}
#elif defined(CH_AVX2)
typedef __m256 Words;
CH_INLINE Words load_words(const uint32_t* from) { return _mm256_loadu_ps((const float*)from); }
CH_INLINE void store_words(uint32_t* to, Words words) { _mm256_storeu_ps((float*)to, words); }
CH_INLINE void interleave(Words a, Words b, Words* to) {
  to[0] = _mm256_unpacklo_ps(a, b);
  to[1] = _mm256_unpackhi_ps(a, b);
}
CH_INLINE void interleave_pairs(Words a, Words b, Words* to) {
  to[0] = _mm256_shuffle_ps(a, b, 0x44);
  to[1] = _mm256_shuffle_ps(a, b, 0xee);
}
#else
typedef vu Words;
CH_INLINE Words load_words(const uint32_t* from) { return *(const vu_any*)from; }
CH_INLINE void store_words(uint32_t* to, Words words) { *(vu_any*)to = words; }
#endif

#if defined(CH_AVX512) || defined(CH_AVX2) || defined(CH_NEON)
// Transposes VL vectors in 4 x 4 blocks, one per 128-bit lane.
CH_INLINE void transpose_lanes(Words* r) {
  Words t[VL];
#pragma GCC unroll 8
  for (int i = 0; i < VL; i += 2) interleave(r[i], r[i + 1], t + i);
#pragma GCC unroll 4
  for (int i = 0; i < VL; i += 4) {
    interleave_pairs(t[i], t[i + 2], r + i);
    interleave_pairs(t[i + 1], t[i + 3], r + i + 2);
  }
}
#endif

// Transposes VL vectors of VL words in registers.
CH_INLINE void transpose_words(Words* r) {
#if defined(CH_AVX512)
  Words t[16];
  transpose_lanes(r);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
#elif defined(CH_AVX2)
  transpose_lanes(r);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const Words lower = r[i], upper = r[i + 4];
    r[i] = _mm256_permute2f128_ps(lower, upper, 0x20);
    r[i + 4] = _mm256_permute2f128_ps(lower, upper, 0x31);
  }
#elif defined(CH_NEON)
  transpose_lanes(r);
#else
  Words t[VL];
  for (int c = 0; c < VL; c++)
    for (int i = 0; i < VL; i++) t[c][i] = r[i][c];
  for (int i = 0; i < VL; i++) r[i] = t[i];
#endif
}

// Transposes VL x VL words. Rows from `rows` on are not read and count as 0.
CH_INLINE void transpose_block(const uint32_t* from, int64_t ld, uint32_t* to, int64_t to_ld, int rows = VL) {
  Words r[VL];
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++) r[i] = i < rows ? load_words(from + i * ld) : Words{};
  transpose_words(r);
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++) store_words(to + i * to_ld, r[i]);
}

// Whether a word holds two steps that are separate operands: bfloat16 that is widened. The first is the lower half.
template <class M, class IO> constexpr bool two_steps_a_word() {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  return M::PACK == 1 && __is_same(IO, BFloat16);
#else
  return false;
#endif
}
CH_INLINE vf first_step(Words words) { return (vf)((vu)words << 16); }
CH_INLINE vf second_step(Words words) { return (vf)((vu)words & 0xffff0000u); }

// Whether rows can be read in place as operands of M.
template <class M, class IO> CH_INLINE bool readable_in_place(const typename IO::type* from, int64_t stride) {
  if constexpr (__is_same(IO, Int8)) return false;
  if constexpr (M::PACK == 2) return stride % 2 == 0 && (uintptr_t)from % 4 == 0;
  return __is_same(typename IO::type, typename M::operand);
}

// VL rows of 2 VL bfloat16 as a panel of floats. Rows from `rows` on count as 0.
CH_INLINE void widen_block(const uint16_t* from, int64_t ld, float* to, int rows) {
  Words words[VL];
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++) words[i] = i < rows ? load_words((const uint32_t*)(from + i * ld)) : Words{};
  transpose_words(words);
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++) {
    store(to + 2 * i * PW, first_step(words[i]));
    store(to + (2 * i + 1) * PW, second_step(words[i]));
  }
}

// `count` rows of a tensor as columns of panels, from column `first` on. `staged` has VL rows. Writes whole vectors of
// columns, zero-padded.
template <class M, class IO>
void pack_panels(const typename IO::type* from, int64_t stride, int count, int dim, typename M::operand* to,
                 typename M::operand* staged, int first = 0) {
  constexpr bool WIDENS = two_steps_a_word<M, IO>();
  const int operands = row_operands<M>(dim), width = WIDENS ? 2 * VL : VL * M::PACK;
  const bool in_place = WIDENS || readable_in_place<M, IO>(from, stride);
  for (int column = first / VL * VL; column < first + count; column += VL) {
    const int skipped = maximum(first - column, 0), rows = minimum(VL, first + count - column) - skipped;
    const typename IO::type* block = from + (column + skipped - first) * stride;
    typename M::operand* panel = to + (int64_t)(column / PW) * operands * PW + column % PW;
    // Whole vectors are transposed from the tensor; the remainder of a row is copied and padded first.
    const int read = in_place && skipped == 0 ? dim / width * width : 0, done = read / M::PACK, rest = operands - done;
    for (int c = 0; WIDENS && c < done; c += 2 * VL) {
      if constexpr (WIDENS) {
        if (rows == VL) widen_block(block + c, stride, panel + (int64_t)c * PW, VL);
        else widen_block(block + c, stride, panel + (int64_t)c * PW, rows);
      }
    }
    for (int c = 0; !WIDENS && c < done; c += VL) {
      const uint32_t* words = (const uint32_t*)(block + (int64_t)c * M::PACK);
      uint32_t* transposed = (uint32_t*)panel + (int64_t)c * PW;
      if (rows == VL) transpose_block(words, stride / M::PACK, transposed, PW);
      else transpose_block(words, stride / M::PACK, transposed, PW, rows);
    }
    if (skipped > 0) memset(staged, 0, (size_t)(skipped * rest) * sizeof(*staged));
    for (int r = 0; r < rows && rest > 0; r++)
      get_operands<M, IO>(block + r * stride + read, dim - read, staged + (skipped + r) * rest, rest);
    for (int c = 0; c < rest; c += VL)
      transpose_block((const uint32_t*)staged + c, rest, (uint32_t*)panel + (int64_t)(done + c) * PW, PW, skipped + rows);
  }
}

#if defined(CH_BF16DOT)
// Two rows, or one and zeros, interleaved as pairs.
CH_INLINE void pair_row(const uint16_t* one, const uint16_t* other, int count, uint32_t* to, int ld) {
  int c = 0;
  for (; c + VL <= count; c += VL)
    *(vu_any*)(to + c) = paired(get_halves(one + c), other != nullptr ? get_halves(other + c) : (vh){});
  for (; c < count; c++) to[c] = one[c] | (other != nullptr ? (uint32_t)other[c] << 16 : 0);
  for (; c < ld; c++) to[c] = 0;
}
#endif

#if defined(CH_BF16DOT)
// The same with int8 integers; either row may be null.
CH_INLINE void pair_row(const int8_t* one, const int8_t* other, int count, uint32_t* to, int ld) {
  const auto vector = [](const int8_t* row, int c) CH_INLINED { return row != nullptr ? get_vector<Int8>(row + c) : (vf){}; };
  const auto integer = [](const int8_t* row, int c) CH_INLINED { return row != nullptr ? float_to_bits((float)row[c]) : 0; };
  int c = 0;
  for (; c + VL <= count; c += VL) *(vu_any*)(to + c) = paired_integers(vector(one, c), vector(other, c));
  for (; c < count; c++) to[c] = integer(one, c) >> 16 | integer(other, c);
  for (; c < ld; c++) to[c] = 0;
}
#endif

// Panels of rows of `dim` columns as B of a GEMM along rows: contiguous panels of `ld` columns, at most PW, each with
// capacity for `steps` steps. Widths are as equal as possible: a panel of one vector has only six sums in flight and
// waits for latency.
struct Panels {
  int count, ld;
  int64_t size;

  CH_INLINE Panels(int64_t dim, int64_t steps) {
    const int64_t all_vectors = (dim + VL - 1) / VL;
    count = (int)((all_vectors + NV - 1) / NV);
    ld = (int)((all_vectors + maximum(count, 1) - 1) / maximum(count, 1)) * VL;
    size = steps * ld;
  }
  CH_INLINE int64_t operands() const { return count * size; }
  // Vectors of columns in a panel.
  CH_INLINE int vectors(int panel, int64_t dim) const {
    return (int)minimum((int64_t)ld, round_up(dim, VL) - (int64_t)panel * ld) / VL;
  }
};

// Packs `count` rows from row `first` of the panels on.
template <class M, class IO>
void pack_rows(const typename IO::type* from, int64_t stride, int count, int dim, typename M::operand* to,
               const Panels& panels, int first = 0) {
  for (int p = 0; p < panels.count; p++) {
    int columns = minimum(panels.ld, dim - p * panels.ld);
    typename M::operand* out = to + p * panels.size + (int64_t)(first / M::PACK) * panels.ld;
    const typename IO::type* in = from + p * panels.ld;
    if constexpr (M::PACK == 1) {
      for (int r = 0; r < count; r++) get_row<IO>(in + r * stride, columns, out + (int64_t)r * panels.ld, panels.ld);
    } else {
      int r = first % 2;
      if (r > 0) {
        // The first row is the second of a pair.
        if constexpr (__is_same(IO, Int8)) pair_row(nullptr, in, columns, out, panels.ld);
        else
          for (int c = 0; c < panels.ld; c++) out[c] = c < columns ? (uint32_t)in[c] << 16 : 0;
        out += panels.ld;
      }
      for (; r < count; r += 2, out += panels.ld)
        pair_row(in + r * stride, r + 1 < count ? in + (r + 1) * stride : nullptr, columns, out, panels.ld);
    }
  }
}

// Zeros the rest of the blocks of steps in which packed rows [first, end) start and end: 0 * NaN is NaN.
template <class M> void pad_blocks(typename M::operand* to, const Panels& panels, int first, int end) {
  const int start = first / M::PACK, stop = (end + M::PACK - 1) / M::PACK;
  const auto clear = [&](int from, int until) {
    for (int p = 0; p < panels.count && until > from; p++)
      memset(to + p * panels.size + from * panels.ld, 0, (size_t)((until - from) * panels.ld) * sizeof(*to));
  };
  clear(start / M::BLOCK * M::BLOCK, start);
  clear(stop, (int)round_up(stop, M::BLOCK));
}

// B rows of a GEMM along `count` rows.
template <class M> CH_INLINE int64_t row_steps(int64_t count) { return (count + M::PACK - 1) / M::PACK; }

// Whether `count` rows have no NaN or infinity. Contiguous rows are checked as one.
template <class IO> bool all_finite(const typename IO::type* from, int64_t stride, int64_t count, int64_t dim) {
  if (stride == dim) dim *= count, count = minimum((int64_t)1, count);
  vf zero = (vf){};
  float rest = 0.0f;
  for (int64_t r = 0; r < count; r++) {
    const typename IO::type* row = from + r * stride;
    int64_t c = 0;
    for (; c + VL <= dim; c += VL) zero += get_vector<IO>(row + c) * (vf){};
    for (; c < dim; c++) rest += get_one<IO>(row + c) * 0.0f;
  }
  return sum_of(zero) + rest == 0.0f;
}

}  // namespace CH_NS
