// The main function of a test program. `program` runs everything, `program 38` case 38 alone, `program 10 5` five cases
// from 10 on, `program 0 0` everything but the cases, and `program <test>` the test of that name.
#pragma once

#include <dirent.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>

#include "result.h"

namespace test {

// A test besides the cases; it counts what it tried.
struct Named {
  const char* name;
  std::function<int()> run;

  Named(const char* name, int (*run)()) : name(name), run(run) {}
  Named(const char* name, void (*run)()) : name(name), run([run] { return run(), 1; }) {}
};

struct Program {
  const char* name;
  uint64_t first, count;  // of the cases
  void (*one_case)(uint64_t number);
  std::vector<Named> tests;
};

inline int threads_of_process() {
  int count = 0;
  if (DIR* tasks = opendir("/proc/self/task")) {
    while (const dirent* task = readdir(tasks)) count += task->d_name[0] != '.';
    closedir(tasks);
  }
  return count;
}

// Runs on a thread and waits until its OpenMP workers have ended, as GNU's do with the thread that started them. The
// leak checker then also sees that a thread's end frees its workspaces. A worker that is alive at the check can be
// missed: AddressSanitizer keeps every joined thread's id, takes a worker to which the system gave that id again for the
// ended thread, and reports what only this worker points to.
template <class Body> void run_without_workers_left(const Body& body) {
  on_new_thread(body);
  // Other runtimes' workers live on, and an emulator has threads of its own.
  for (int wait = 0; wait < 5000 && threads_of_process() > 1; ++wait) usleep(1000);
}

// Returns the process's exit code.
inline int run_program(const Program& program, int arguments, char** argument) {
  const bool named = arguments > 1 && (argument[1][0] < '0' || argument[1][0] > '9');
  uint64_t first = program.first, count = named ? 0 : program.count;
  if (arguments > 1 && !named) {
    first = std::strtoull(argument[1], nullptr, 10);
    count = arguments > 2 ? std::strtoull(argument[2], nullptr, 10) : 1;
  }
  int tried = 0, others = 0;
  run_without_workers_left([&] {
    for (uint64_t number = first; number < first + count; ++number) program.one_case(number);
    if (arguments > 1 && count > 0) return;
    for (const Named& test : program.tests)
      if (!named || std::strcmp(test.name, argument[1]) == 0) ++tried, others += test.run();
  });
  if (named && tried == 0) {
    std::fprintf(stderr, "%s has no such test; it has", program.name);
    for (const Named& test : program.tests) std::fprintf(stderr, " %s", test.name);
    std::fprintf(stderr, "\n");
    return 2;
  }
  std::printf("%s, %llu cases and %d others on", program.name, static_cast<unsigned long long>(count), others);
  for (int index : usable_sets()) std::printf(" %s", ch_isa_name(index));
  std::printf(": %d failed; the largest error used %.2f of its bound\n", failures, largest_ratio);
  return failures == 0 ? 0 : 1;
}

}  // namespace test
