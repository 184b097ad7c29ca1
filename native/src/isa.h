// The instruction sets that kernels.cpp and quantized_kernels.cpp are compiled for, and the table of kernels that each exports.
#ifndef CLEARHEAD_ISA_H
#define CLEARHEAD_ISA_H

#include "clearhead_native.h"

namespace clearhead {

// The kernels of one instruction set but those of quantised linear layers. Descriptions have passed every check of the
// entry points.
struct Kernels {
  double (*rate)(int dtype, int threads);  // peak throughput of its GEMM, operations per second
  // Calls a function whose work, on this set, a team of threads shares.
  void (*in_team)(int threads, void (*function)(void* of), void* of);
  // Shares units of work among threads.
  void (*share)(int threads, int64_t units, void (*body)(void* of, int64_t unit), void* of);
  int (*forward)(const ch_attention* work);
  int (*backward)(const ch_attention* work);
  int (*linear_forward)(const ch_linear* work);
  int (*linear_backward)(const ch_linear* work);
  int (*project)(const ch_projection* work);
  int (*pack)(const ch_projection* work);
  int (*unpack)(const ch_projection* work);
  int64_t (*panel_bytes)(int dtype, int64_t steps, int64_t columns);
  int64_t (*panel_columns)(int dtype);
  int (*drop)(const ch_dropout* work);
  int (*norm)(const ch_norm* work);
  int (*norm_backward)(const ch_norm* work);
  int (*append)(const ch_append* work);
  int (*rotate)(const ch_rotation* work);
};
// Those of quantised linear layers.
struct QuantizedKernels {
  int (*multiply)(const ch_quantized* layers, int count);
  int (*pack)(const ch_quantized* work);
  int64_t (*panel_bytes)(int64_t steps, int64_t columns);
};

// The kernels of a set by its index, -1 for the best; null if this processor lacks it.
const Kernels* kernels_of(int isa);
const QuantizedKernels* quantized_kernels_of(int isa);

// True in a process that was forked from one in which this library was loaded: the threads of the OpenMP pool do not
// survive the fork, and GNU's runtime would wait for them forever.
bool after_fork() noexcept;

}  // namespace clearhead

// Inside kernels.cpp and quantized_kernels.cpp the build defines CH_NS, the name of the set.
#ifdef CH_NS
namespace CH_NS {
using clearhead::Kernels;
extern const Kernels kernels;
extern const clearhead::QuantizedKernels quantized_kernels;
}  // namespace CH_NS
#endif

#endif
