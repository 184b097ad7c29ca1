// The kernels for one instruction set: compiled once for each, with CH_NS as its namespace.
//
// Nothing from the C++ library is used here: the linker could choose the copy of a template that was compiled for a
// wider instruction set than the processor has.
#include "activation.h"
#include "append.h"
#include "backward.h"
#include "forward.h"
#include "linear.h"
#include "norm.h"
#include "peak_throughput.h"
#include "projection.h"
#include "rotation.h"

// Of the OpenMP that torch has loaded.
extern "C" int omp_get_num_threads(void);

namespace CH_NS {
namespace {

int run_forward(const ch_attention* call) {
  const Task w(*call);
  switch (w.dtype) {
    case CH_FLOAT32: return w.quantized ? Forward<Fp32Fma, Float32, Int8>(w).run() : Forward<Fp32Fma, Float32>(w).run();
    case CH_BFLOAT16: return w.quantized ? Forward<Bf16Gemm, BFloat16, Int8>(w).run() : Forward<Bf16Gemm, BFloat16>(w).run();
    default: return w.quantized ? Forward<Fp32Fma, Float16, Int8>(w).run() : Forward<Fp32Fma, Float16>(w).run();
  }
}

int run_backward(const ch_attention* call) {
  const Task w(*call);
  switch (w.dtype) {
    case CH_FLOAT32: return Backward<Fp32Fma, Float32>(w).run();
    case CH_BFLOAT16: return Backward<Bf16Gemm, BFloat16>(w).run();
    default: return Backward<Fp32Fma, Float16>(w).run();
  }
}

// `use` of the GEMMs of a dtype.
template <class Use> auto with_projection(int dtype, const Use& use) {
  switch (dtype) {
    case CH_FLOAT32: return use.template operator()<Projection<Fp32Fma, Float32>>();
    case CH_BFLOAT16: return use.template operator()<Projection<Bf16Gemm, BFloat16>>();
    default: return use.template operator()<Projection<Fp32Fma, Float16>>();
  }
}

int run_projection(const ch_projection* w) {
  return with_projection(w->dtype, [&]<class GEMM>() { return GEMM(*w).run(); });
}

int run_pack(const ch_projection* w) {
  return with_projection(w->dtype, [&]<class GEMM>() { return GEMM(*w).pack_right(); });
}

int run_unpack(const ch_projection* w) {
  return with_projection(w->dtype, [&]<class GEMM>() { return GEMM(*w).unpack_right(); });
}

int64_t panel_columns(int dtype) {
  return with_projection(dtype, []<class GEMM>() { return GEMM::panel_columns(); });
}

int64_t panel_bytes(int dtype, int64_t steps, int64_t columns) {
  return with_projection(dtype, [&]<class GEMM>() { return GEMM::panel_bytes(steps, columns); });
}

// Work is one of the elementwise kernels.
template <template <class> class Work, class Description> int run_each(const Description* w) {
  switch (w->dtype) {
    case CH_FLOAT32: return Work<Float32>(*w).run();
    case CH_BFLOAT16: return Work<BFloat16>(*w).run();
    default: return Work<Float16>(*w).run();
  }
}

double rate(int dtype, int threads) {
  return dtype == CH_BFLOAT16 ? rate_of<Bf16Gemm>(threads) : rate_of<Fp32Fma>(threads);
}

void in_team(int threads, void (*function)(void* of), void* of) {
  if (threads < 2 || clearhead::Team::led() != nullptr || clearhead::after_fork()) return function(of);
  clearhead::Team team;
#pragma omp parallel num_threads(threads)
  {
    bool leads = false;
#pragma omp master
    leads = true;
    if (leads) team.lead(omp_get_num_threads() - 1, function, of);
    else team.serve();
  }
}

void share(int threads, int64_t units, void (*body)(void* of, int64_t unit), void* of) {
  parallel(clearhead::after_fork() ? 1 : threads, units, [&](int64_t unit) { body(of, unit); });
}

template <class Pass> int run_linear(const ch_linear* w) { return Pass(*w).run(); }

}  // namespace

extern const clearhead::Kernels kernels = {rate, in_team, share, run_forward, run_backward, run_linear<LinearForward>,
                                           run_linear<LinearBackward>, run_projection, run_pack, run_unpack,
                                           panel_bytes, panel_columns, run_each<Dropping>,
                                           run_each<NormForward>, run_each<NormBackward>,
                                           run_each<Appending>, run_each<Rotating>};

}  // namespace CH_NS
