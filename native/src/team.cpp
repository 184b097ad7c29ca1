#include "team.h"

#include <sched.h>

#include "scratch.h"

namespace clearhead {
namespace {

// Looks before a thread offers its processor to others: some 100 us.
constexpr int LOOKS = 4096;

// In the lower bits of `signal`: how many workers a round needs, and the end of the last one. One number, so that a worker
// that was not needed, and comes late, knows which round it has read of.
constexpr int64_t ROUND = 1 << 16, END = ROUND - 1;

__thread Team* team_of_thread = nullptr;

template <class Ready> void wait(const Ready& ready) {
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

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace

Team* Team::led() { return team_of_thread; }

void Team::run(int threads, int64_t count, void (*of_share)(Team& team, const void* body), const void* of_body) {
  const int64_t needed = smaller(workers, (int64_t)threads - 1);
  units = count, share = of_share, body = of_body, next = 0, finished = 0;
  begin(needed);
  share(*this, body);
  wait([&] { return __atomic_load_n(&finished, __ATOMIC_ACQUIRE) == needed; });
}

int64_t Team::take() {
  const int64_t mine = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
  return mine < units ? mine : -1;
}

void Team::serve() {
  const int64_t place = __atomic_fetch_add(&joined, 1, __ATOMIC_RELAXED);
  for (int64_t last = 0, now = 0;; last = now) {
    wait([&] { return (now = __atomic_load_n(&signal, __ATOMIC_ACQUIRE)) != last; });
    if (now % ROUND == END) return;
    if (place >= now % ROUND) continue;
    share(*this, body);
    trim_scratch();
    __atomic_fetch_add(&finished, 1, __ATOMIC_RELEASE);
  }
}

void Team::lead(int with, void (*function)(void* of), void* of) {
  workers = smaller(with, END - 1);
  team_of_thread = this;
  function(of);
  team_of_thread = nullptr;
  begin(END);
}

void Team::begin(int64_t needed) {
  __atomic_store_n(&signal, (signal / ROUND + 1) * ROUND + needed, __ATOMIC_RELEASE);
}

}  // namespace clearhead
