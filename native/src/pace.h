// How fast the processor at hand multiplies, and whether products in pairs pay on it.
#pragma once

#include <time.h>

#include "product.h"

namespace CH_NS {

// The product that all work is made of, with what it reads and writes in the first cache.
template <class M> struct Pace {
  static constexpr int STEPS = 64;
  alignas(64) typename M::number a[MR * STEPS] = {}, b[STEPS * PW] = {};
  alignas(64) float c[MR * PW];

  int64_t nanoseconds_of(int times) {
    timespec start, stop;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < times; i++) {
      product<M, SET>(MR, NV, STEPS, a, STEPS, 1, b, PW, c, PW);
      // Nobody reads what comes out.
      asm volatile("" : : "r"(c) : "memory");
    }
    clock_gettime(CLOCK_MONOTONIC, &stop);
    return (stop.tv_sec - start.tv_sec) * 1000000000 + (stop.tv_nsec - start.tv_nsec);
  }
  static double operations_of(int times) { return 2.0 * MR * PW * STEPS * M::PAIR * times; }
};

// Operations a second of so many threads at once: the best of rounds, each by its slowest thread.
template <class M> double rate_of(int threads) {
  constexpr int ROUNDS = 20;
  constexpr double NANOSECONDS = 1e6;
  double best = 0.0;
  int times = 16;
  for (int round = 0; round < ROUNDS; round++) {
    int64_t slowest = 1;  // at least, for it is divided by
#pragma omp parallel num_threads(threads) reduction(max : slowest)
    {
      Pace<M> own;
      slowest = own.nanoseconds_of(times);
    }
    const double rate = threads * Pace<M>::operations_of(times) / (double)slowest * 1e9;
    if (rate > best) best = rate;
    // Rounds long enough for the clock, and short enough for what else the machine does.
    const double wanted = NANOSECONDS / (double)slowest * times;
    times = wanted < 1.0 ? 1 : wanted > 1e6 ? 1000000 : (int)wanted;
  }
  return best;
}

#if defined(CH_BF16DOT)
// A pair is two numbers, so that it may take twice the time of one. Emerald Rapids, whose matrix units are meant for
// bfloat16, takes four times it, AMD's processors about the same. What is compared is the best of rounds in turn, some 70
// microseconds in all, and far from the limit either way: every process finds the same.
inline bool pairs_pay() {
  constexpr int ROUNDS = 24;
  Pace<Pairs> pairs;
  Pace<Single> single;
  int64_t in_pairs = INT64_MAX, one_by_one = INT64_MAX;
  for (int round = 0; round < ROUNDS; round++) {
    in_pairs = least(in_pairs, pairs.nanoseconds_of(1));
    one_by_one = least(one_by_one, single.nanoseconds_of(1));
  }
  return in_pairs < 2 * one_by_one;
}
#else
inline bool pairs_pay() { return true; }
#endif

}  // namespace CH_NS
