// Whether products in pairs pay on the processor at hand.
#pragma once

#include <time.h>

#include "product.h"

namespace CH_NS {

#if defined(CH_BF16DOT)
// The product that all work is made of, once, in the first cache.
template <class M> int64_t nanoseconds_of_product() {
  constexpr int STEPS = 64;
  static const typename M::number a[MR * STEPS] = {}, b[STEPS * PW] = {};
  float c[MR * PW];
  timespec start, stop;
  clock_gettime(CLOCK_MONOTONIC, &start);
  product<M, SET>(MR, NV, STEPS, a, STEPS, 1, b, PW, c, PW);
  clock_gettime(CLOCK_MONOTONIC, &stop);
  return (stop.tv_sec - start.tv_sec) * 1000000000 + (stop.tv_nsec - start.tv_nsec);
}

// A pair is two numbers, so that it may take twice the time of one. Emerald Rapids, whose matrix units are meant for
// bfloat16, takes four times it, AMD's processors about the same. What is compared is the best of rounds in turn, some 70
// microseconds in all, and far from the limit either way: every process finds the same.
inline bool pairs_pay() {
  constexpr int ROUNDS = 24;
  int64_t pairs = INT64_MAX, single = INT64_MAX;
  for (int round = 0; round < ROUNDS; round++) {
    pairs = least(pairs, nanoseconds_of_product<Pairs>());
    single = least(single, nanoseconds_of_product<Single>());
  }
  return pairs < 2 * single;
}
#else
inline bool pairs_pay() { return true; }
#endif

}  // namespace CH_NS
