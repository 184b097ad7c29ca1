// The kernels of quantised linear layers for one instruction set: compiled once for each, beside kernels.cpp.
#if defined(CH_VNNI) || defined(CH_DOTPROD)
#include "integer_inputs.h"
#elif defined(CH_AVX2)
#include "short_inputs.h"
#endif
#include "quantized_gemv.h"
#include "quantized_rows.h"

namespace CH_NS {
namespace {

// How few rows of 16-bit elements by a weight of integers are multiplied.
#if defined(CH_VNNI) || defined(CH_DOTPROD)
template <class IO, class Codes> using HalfInputs = IntegerInputs<IO, Codes>;
#elif defined(CH_AVX2)
template <class IO, class Codes> using HalfInputs = ShortInputs<IO, Codes>;
#else
template <class IO, class Codes> using HalfInputs = FloatInputs<IO, Codes>;
#endif

template <class M, class IO, class Codes, bool DEQUANTIZES> int run_weight_only(const ch_quantized& w) {
  if constexpr (!__is_same(IO, Float32)) {
    typedef QuantizedGemv<IO, HalfInputs<IO, Codes>> OfHalves;
    if (OfHalves::takes(w)) return OfHalves(w).run();
  }
  typedef QuantizedGemv<IO, FloatInputs<IO, Codes>> OfFloats;
  if (OfFloats::takes(w)) return OfFloats(w).run();
  return WeightOnly<M, IO, Codes, DEQUANTIZES>(w).run();
}

template <class M, class IO> int run(const ch_quantized* layers, int count) {
  const ch_quantized& w = layers[0];
  if (w.rounding != CH_ROUND_NONE) return multiply_rounded<IO>(layers, count);
  if (w.bits == 4) return run_weight_only<M, IO, Codes4, true>(w);
  const bool dequantizes = w.offset != nullptr || w.group != w.steps;
  return dequantizes ? run_weight_only<M, IO, Codes8, true>(w) : run_weight_only<M, IO, Codes8, false>(w);
}

int multiply(const ch_quantized* layers, int count) {
  switch (layers->dtype) {
    case CH_FLOAT32: return run<Fp32Fma, Float32>(layers, count);
    case CH_BFLOAT16: return run<Bf16Gemm, BFloat16>(layers, count);
    default: return run<Fp32Fma, Float16>(layers, count);
  }
}

// Panels are the same for all dtypes of x.
int pack(const ch_quantized* work) { return RoundedLayer<Float32>(*work, RoundedRows<Float32>(*work)).pack(); }

}  // namespace

const clearhead::QuantizedKernels quantized_kernels = {multiply, pack, RoundedLayer<Float32>::panel_bytes};

}  // namespace CH_NS
