// The cache of freed results: alignment, reuse, the limit, threads and forks.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "../src/memory.h"
#include "result.h"

namespace test {

namespace {

constexpr int64_t MIB = 1 << 20;

struct Memory {
  void* data;
  size_t size;
};

Memory bytes(int64_t count) { return {clearhead::pool_allocate(static_cast<size_t>(count)), static_cast<size_t>(count)}; }

void drop(const Memory& memory) { clearhead::pool_free(memory.data, memory.size); }

void form() {
  for (int64_t size : {int64_t{1}, 3 * MIB, 40 * MIB + 5}) {
    const Memory block = bytes(size);
    check(block.data != nullptr && reinterpret_cast<uintptr_t>(block.data) % (2 * MIB) == 0, "a block aligned to a huge page");
    std::memset(block.data, 7, block.size);
    drop(block);
  }
}

void reuse() {
  ch_keep_memory(64 * MIB);
  Memory one = bytes(6 * MIB), other = bytes(6 * MIB);
  void *first = one.data, *second = other.data;
  check(first != second && ch_kept_memory() == 0, "two live blocks differ");
  drop(one), drop(other);
  check(ch_kept_memory() == 12 * MIB, "two blocks cached");
  Memory smaller = bytes(3 * MIB);
  check(ch_kept_memory() == 12 * MIB, "another size does not use them");
  one = bytes(6 * MIB);
  check(one.data == second, "the block freed last is reused first");
  other = bytes(6 * MIB);
  check(other.data == first && ch_kept_memory() == 0, "then the other block");
  drop(one), drop(other), drop(smaller);
  check(ch_kept_memory() == 15 * MIB, "three blocks cached");
  one = bytes(6 * MIB - 100);
  check(one.data == first, "a slightly smaller size shares the block");
  drop(one);
  check(ch_keep_memory(0) == 64 * MIB && ch_kept_memory() == 0, "a limit of 0 releases everything");
  drop(bytes(2 * MIB));
  check(ch_kept_memory() == 0, "a limit of 0 caches nothing");
  ch_keep_memory(8 * MIB);
  drop(bytes(2 * MIB));
  check(ch_keep_memory(-5) == 8 * MIB && ch_keep_memory(-1) == 8 * MIB, "a negative limit only returns the limit");
  check(ch_kept_memory() == 2 * MIB, "a negative limit releases nothing");
  ch_keep_memory(0);
}

void limit() {
  ch_keep_memory(10 * MIB);
  std::vector<Memory> some;
  for (int place = 0; place < 4; ++place) some.push_back(bytes(4 * MIB));
  void* last = some[3].data;
  for (const Memory& block : some) drop(block);
  check(ch_kept_memory() == 8 * MIB, "the oldest blocks above the limit are released");
  Memory block = bytes(4 * MIB);
  check(block.data == last, "the newest block is cached");
  Memory large = bytes(12 * MIB);
  drop(large);
  check(ch_kept_memory() == 4 * MIB, "a block above the limit is not cached and evicts nothing");
  drop(block);
  ch_keep_memory(int64_t{1} << 40);
  some.clear();
  for (int place = 0; place < 600; ++place) some.push_back(bytes(MIB / 8));
  for (const Memory& one : some) drop(one);
  check(ch_kept_memory() <= 8 * MIB + 512 * MIB / 8 && ch_kept_memory() >= 256 * MIB / 8, "the number of cached blocks is bounded");
  ch_keep_memory(0);
}

// Every thread writes its own value and reads it back.
void threads() {
  ch_keep_memory(32 * MIB);
  std::vector<std::thread> some;
  for (int number = 1; number <= 8; ++number)
    some.emplace_back([number] {
      for (int round = 0; round < 50; ++round) {
        const int64_t size = (1 + (number + round) % 3) * MIB;
        Memory block = bytes(size);
        unsigned char* data = static_cast<unsigned char*>(block.data);
        std::memset(data, number, static_cast<size_t>(size));
        std::this_thread::yield();
        for (int64_t at = 0; at < size; at += 4096)
          if (data[at] != number) return fail("two threads received the same block");
        drop(block);
      }
    });
  for (std::thread& one : some) one.join();
  check(ch_kept_memory() <= 32 * MIB, "the limit holds with several threads");
}

void forks() {
  std::thread busy([] {
    for (int round = 0; round < 2000; ++round) drop(bytes(MIB));
  });
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // ends a deadlock
      drop(bytes(MIB));
      _exit(ch_kept_memory() > 0 ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    check(status == 0, "a child forked while another thread allocates");
  }
  busy.join();
}

// If all pthread keys of the process are taken, no thread caches a workspace, and no other key's memory is used.
void no_pthread_keys_left() {
  const pid_t child = fork();
  if (child == 0) {
    pthread_key_t key;
    while (pthread_key_create(&key, nullptr) == 0) continue;
    float one[4] = {1, 1, 1, 1}, output[4] = {};
    ch_attention work{};
    work.size = sizeof(work), work.abi = CH_ABI, work.isa = -1, work.threads = 1, work.dtype = CH_FLOAT32;
    work.batch = work.heads = work.kv_heads = work.q_len = work.k_len = 1, work.head_dim = work.value_dim = 4;
    work.scale = 1, work.before = work.after = INT64_MAX;
    work.query = work.key = work.value = {one, 0, 0, 4}, work.output = {output, 0, 0, 4};
    _exit(ch_forward(&work) == CH_NO_MEMORY ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  check(status == 0, "a process without free pthread keys");
}

}  // namespace
}  // namespace test

int main() {
  test::check(ch_keep_memory(0) > 0, "the initial limit is positive");
  test::no_pthread_keys_left();
  test::form();
  test::reuse();
  test::limit();
  test::threads();
  test::forks();
  std::printf("cache of freed results: %d failed\n", test::failures);
  return test::failures == 0 ? 0 : 1;
}
