// Threads that stay awake while an operator runs: to wake one for each of its parts takes longer than many a part.
#pragma once

#include <stdint.h>

namespace clearhead {

// Workers look for work of the thread that leads them, which looks for the end of theirs.
class Team {
  int64_t workers = 0, joined = 0, signal = 0, next = 0, finished = 0, units = 0;
  void (*share)(Team& team, const void* body) = nullptr;
  const void* body = nullptr;

 public:
  // The team that the calling thread leads; null for none.
  static Team* led();

  // Runs `of_share`, which takes units until there are none, on as many threads; the leader's call.
  void run(int threads, int64_t count, void (*of_share)(Team& team, const void* body), const void* of_body);

  // A unit that no other thread has; negative when all are taken.
  int64_t take();

  // A worker's call, which returns after the leader's function.
  void serve();

  // The leader's call: the function's work is shared with so many workers.
  void lead(int with, void (*function)(void* of), void* of);

 private:
  void begin(int64_t needed);
};

}  // namespace clearhead
