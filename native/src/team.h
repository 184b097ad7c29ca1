// Threads that stay awake while an operator runs: to wake one for each of its parts takes longer than many a part.
#pragma once

#include <sched.h>
#include <stdint.h>

#include "amx_tile.h"
#include "scratch.h"

namespace CH_NS {

// Workers look for work of the thread that leads them, which looks for the end of theirs.
class Team {
  // Looks before a thread offers its processor to others: some 100 us.
  static constexpr int LOOKS = 4096;

  // In the lower bits of `signal`: how many workers a round needs, and the end of the last one. One number, so that a worker
  // that was not needed, and comes late, knows which round it has read of.
  static constexpr int64_t ROUND = 1 << 16, END = ROUND - 1;

  int64_t workers = 0, joined = 0, signal = 0, next = 0, finished = 0, units = 0;
  void (*unit)(const void* body, int64_t unit) = nullptr;
  const void* body = nullptr;

 public:
  // The team that the calling thread leads; null for none.
  static Team*& led() {
    static __thread Team* team = nullptr;
    return team;
  }

  // Runs the units on as many threads; the leader's call.
  void run(int threads, int64_t count, void (*of_unit)(const void*, int64_t), const void* of_body) {
    const int64_t needed = minimum(workers, (int64_t)threads - 1);
    units = count, unit = of_unit, body = of_body, next = 0, finished = 0;
    begin(needed);
    work();
    wait([&] { return __atomic_load_n(&finished, __ATOMIC_ACQUIRE) == needed; });
  }

  // A worker's call, which returns after the leader's function.
  void serve() {
    const int64_t place = __atomic_fetch_add(&joined, 1, __ATOMIC_RELAXED);
    for (int64_t last = 0, now = 0;; last = now) {
      wait([&] { return (now = __atomic_load_n(&signal, __ATOMIC_ACQUIRE)) != last; });
      if (now % ROUND == END) return;
      if (place >= now % ROUND) continue;
      work();
      clearhead::trim_scratch();
      __atomic_fetch_add(&finished, 1, __ATOMIC_RELEASE);
    }
  }

  // The leader's call: the function's work is shared with so many workers.
  void lead(int with, void (*function)(void* of), void* of) {
    workers = minimum((int64_t)with, END - 1);
    led() = this;
    function(of);
    led() = nullptr;
    begin(END);
  }

 private:
  void begin(int64_t needed) {
    __atomic_store_n(&signal, (signal / ROUND + 1) * ROUND + needed, __ATOMIC_RELEASE);
  }

  void work() {
    const TileScope scope;
    for (;;) {
      const int64_t mine = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (mine >= units) return;
      unit(body, mine);
    }
  }

  template <class Ready> static void wait(const Ready& ready) {
    for (int looks = 0; !ready(); looks++) {
      if (looks >= LOOKS) {
        sched_yield();
        continue;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("isb");
#endif
    }
  }
};

}  // namespace CH_NS
