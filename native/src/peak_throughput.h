// The peak throughput of the GEMM kernel on this processor. It is reported and influences no choice.
#pragma once

#include <time.h>

#include "gemm_kernel.h"

namespace CH_NS {

// The GEMM kernel with operands and sums in L1.
template <class M> struct PeakLoop {
  static constexpr int STEPS = 64;
  alignas(64) typename M::operand a[M::HEIGHT * STEPS] = {}, b[STEPS * PW] = {};
  alignas(64) float c[M::HEIGHT * PW];

  int64_t nanoseconds_of(int times) {
    timespec start, stop;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < times; i++) {
      gemm<M, SET>(M::HEIGHT, NV, STEPS, a, STEPS, 1, b, PW, c, PW);
      // Keep the compiler from dropping the loop, whose sums are unused.
      asm volatile("" : : "r"(c) : "memory");
    }
    clock_gettime(CLOCK_MONOTONIC, &stop);
    return (stop.tv_sec - start.tv_sec) * 1000000000 + (stop.tv_nsec - start.tv_nsec);
  }
  static double operations_of(int times) { return 2.0 * M::HEIGHT * PW * STEPS * M::PACK * times; }
};

// Operations per second of `threads` threads: the best of several rounds, each timed by its slowest thread.
template <class M> double rate_of(int threads) {
  constexpr int ROUNDS = 20;
  constexpr double NANOSECONDS = 1e6;
  double best = 0.0;
  int times = 16;
  for (int round = 0; round < ROUNDS; round++) {
    int64_t slowest = 1;  // at least 1: it is a divisor
#pragma omp parallel num_threads(threads) reduction(max : slowest)
    {
      const TileScope scope;
      PeakLoop<M> loop;
      slowest = loop.nanoseconds_of(times);
    }
    const double rate = threads * PeakLoop<M>::operations_of(times) / (double)slowest * 1e9;
    if (rate > best) best = rate;
    // Rounds are long against the clock's resolution, and short enough to escape other load.
    const double wanted = NANOSECONDS / (double)slowest * times;
    times = wanted < 1.0 ? 1 : wanted > 1e6 ? 1000000 : (int)wanted;
  }
  return best;
}

}  // namespace CH_NS
