// The GEMM micro-kernel of all kernels: a few rows of A times a panel of B, accumulated in registers.
//
// C[MR x NV*VL] = (or +=) sum over steps of A[row][step] * B[step][column]. A is read one operand at a time and
// broadcast, so its strides are free: a transposed A costs nothing. B is a panel, with `ldb` operands from step to
// step. 6 rows of 4 vectors are 24 sums in flight, which covers two FMA units of latency four and leaves registers for
// a step of B. An operand is a float, or with CH_BF16DOT a pair of bfloat16 along the steps for the bf16 dot-product
// instructions.
#pragma once

#include "pairs.h"

namespace CH_NS {

#if defined(CH_AVX512) || defined(CH_NEON)
constexpr int NV = 4;  // vectors of a panel, for sets with 32 registers
#else
constexpr int NV = 2;
#endif
constexpr int MR = 6;  // rows at a time
constexpr int PW = NV * VL;  // columns of a panel

// Multiply-add of float32 operands: lane by lane, or with one operand broadcast.
struct Single {
  typedef float number;
  typedef float right;
  static constexpr int PAIR = 1, AT_ONCE = 1;
  static CH_INLINE Spread spread(const float* a) { return spread_number(a); }
  static CH_INLINE vf get(const float* b) { return load(b); }
  static CH_INLINE vf row(const float* a) { return load(a); }
  static CH_INLINE vf madd(vf sum, vf a, vf b) { return sum + a * b; }
  static CH_INLINE vf madd_spread(vf sum, Spread a, vf b) { return madd_number(sum, a, b); }
};

#if defined(CH_BF16DOT)
struct Pairs {
  typedef uint32_t number;
  typedef uint32_t right;
  static constexpr int PAIR = 2, AT_ONCE = 1;
  static CH_INLINE Spread spread(const uint32_t* a) { return spread_pair(a); }
  static CH_INLINE vf get(const uint32_t* b) { return (vf)*(const vu_any*)b; }
  static CH_INLINE vf row(const uint32_t* a) { return get(a); }
  static CH_INLINE vf madd(vf sum, vf a, vf b) { return add_products(sum, a, b); }
  static CH_INLINE vf madd_spread(vf sum, Spread a, vf b) { return add_products_of_one(sum, a, b); }
};
#endif

// ROWS x VECS sums, each passed to `leave(row, vector, sum)`.
template <class M, int ROWS, int VECS, class Leave>
CH_INLINE void sums_of(int64_t steps, const typename M::number* __restrict a, int64_t a_row, int64_t a_step,
                       const typename M::right* __restrict b, int64_t ldb, const Leave& leave) {
  vf sum[ROWS][VECS];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) sum[r][v] = (vf){};
  for (int64_t s = 0; s < steps; s++) {
    vf bv[VECS];
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) {
      if constexpr (M::AT_ONCE == 2)
        if (v / 2 * 2 + 1 < VECS) {
          if (v % 2 == 0) M::get_two(b + v * VL, bv[v], bv[v + 1]);
          continue;
        }
      bv[v] = M::get(b + v * VL);
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
      const Spread av = M::spread(a + r * a_row);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) sum[r][v] = M::madd_spread(sum[r][v], av, bv[v]);
    }
    a += a_step;
    b += ldb;
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++) {
    if constexpr (M::AT_ONCE == 2)
#pragma GCC unroll 2
      for (int v = 0; v + 1 < VECS; v += 2) M::put_in_order(sum[r][v], sum[r][v + 1]);
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) leave(r, v, sum[r][v]);
  }
}

// How the sums are combined with C.
enum Into { SET, ADD, SCALE_ADD };

template <class M, int ROWS, int VECS, Into INTO>
CH_INLINE void block(int64_t steps, const typename M::number* __restrict a, int64_t a_row, int64_t a_step,
                     const typename M::right* __restrict b, int64_t ldb, float* __restrict c, int64_t ldc,
                     const float* __restrict factor) {
  sums_of<M, ROWS, VECS>(steps, a, a_row, a_step, b, ldb, [&](int r, int v, vf sum) CH_INLINED {
    // C is added at the end: added at the start it would lengthen the chain of roundings.
    float* at = c + r * ldc + v * VL;
    if constexpr (INTO == ADD) sum += load(at);
    if constexpr (INTO == SCALE_ADD) sum += load(at) * all(factor[r]);
    store(at, sum);
  });
}

template <class M, int VECS, Into INTO>
__attribute__((noinline)) void rows_block(int rows, int64_t steps, const typename M::number* a, int64_t a_row,
                                          int64_t a_step, const typename M::right* b, int64_t ldb, float* c,
                                          int64_t ldc, const float* factor) {
  switch (rows) {
    case 6: return block<M, 6, VECS, INTO>(steps, a, a_row, a_step, b, ldb, c, ldc, factor);
    case 5: return block<M, 5, VECS, INTO>(steps, a, a_row, a_step, b, ldb, c, ldc, factor);
    case 4: return block<M, 4, VECS, INTO>(steps, a, a_row, a_step, b, ldb, c, ldc, factor);
    case 3: return block<M, 3, VECS, INTO>(steps, a, a_row, a_step, b, ldb, c, ldc, factor);
    case 2: return block<M, 2, VECS, INTO>(steps, a, a_row, a_step, b, ldb, c, ldc, factor);
    default: return block<M, 1, VECS, INTO>(steps, a, a_row, a_step, b, ldb, c, ldc, factor);
  }
}

// At most MR rows and NV vectors of columns.
template <class M, Into INTO>
CH_INLINE void product(int rows, int vecs, int64_t steps, const typename M::number* a, int64_t a_row, int64_t a_step,
                       const typename M::right* b, int64_t ldb, float* c, int64_t ldc,
                       const float* factor = nullptr) {
  if constexpr (NV == 4) {
    if (vecs == 4) return rows_block<M, 4, INTO>(rows, steps, a, a_row, a_step, b, ldb, c, ldc, factor);
    if (vecs == 3) return rows_block<M, 3, INTO>(rows, steps, a, a_row, a_step, b, ldb, c, ldc, factor);
  }
  if (vecs == 2) return rows_block<M, 2, INTO>(rows, steps, a, a_row, a_step, b, ldb, c, ldc, factor);
  return rows_block<M, 1, INTO>(rows, steps, a, a_row, a_step, b, ldb, c, ldc, factor);
}

}  // namespace CH_NS
