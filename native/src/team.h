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

  int64_t workers = 0, round = 0, next = 0, finished = 0, units = 0;
  bool stopped = false;
  void (*unit)(const void* body, int64_t unit) = nullptr;
  const void* body = nullptr;

 public:
  // The team that the calling thread leads; null for none.
  static Team*& led() {
    static __thread Team* team = nullptr;
    return team;
  }

  // Runs the units on all threads; the leader's call.
  void run(int64_t count, void (*of_unit)(const void*, int64_t), const void* of_body) {
    units = count, unit = of_unit, body = of_body, next = 0, finished = 0;
    __atomic_store_n(&round, round + 1, __ATOMIC_RELEASE);
    work();
    wait([&] { return __atomic_load_n(&finished, __ATOMIC_ACQUIRE) == workers; });
  }

  // A worker's call, which returns after the leader's function.
  void serve() {
    for (int64_t done = 0;;) {
      wait([&] { return __atomic_load_n(&round, __ATOMIC_ACQUIRE) != done; });
      done++;
      if (stopped) return;
      work();
      clearhead::trim_scratch();
      __atomic_fetch_add(&finished, 1, __ATOMIC_RELEASE);
    }
  }

  // The leader's call: the function's work is shared with so many workers.
  void lead(int with, void (*function)(void* of), void* of) {
    workers = with;
    led() = this;
    function(of);
    led() = nullptr;
    stopped = true;
    __atomic_store_n(&round, round + 1, __ATOMIC_RELEASE);
  }

 private:
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
