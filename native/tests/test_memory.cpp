// Tensors whose memory is kept: their form, what is handed out again, the limit, threads, forks, and bad sizes.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "../src/dlpack.h"
#include "result.h"

namespace test {

namespace {

using clearhead::Managed;
using Sizes = std::vector<int64_t>;

constexpr int64_t MIB = 1 << 20;

Managed* make(int dtype, const Sizes& shape, const Sizes& strides) {
  const int32_t axes = static_cast<int32_t>(shape.size());
  return static_cast<Managed*>(ch_new_tensor(dtype, axes, shape.data(), strides.data()));
}

Managed* bytes(int64_t count) { return make(CH_BFLOAT16, {count / 2}, {1}); }

void drop(Managed* tensor) { tensor->deleter(tensor); }

void form() {
  const Sizes shape = {2, 3, 500, 64}, strides = {500 * 3 * 64, 64, 3 * 64, 1};
  const int bits[] = {32, 16, 16}, codes[] = {2, 4, 2};
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16}) {
    Managed* own = make(dtype, shape, strides);
    check(own != nullptr, "a tensor");
    check(own->tensor.axes == 4 && own->tensor.byte_offset == 0 && own->tensor.device.type == 1, "its form");
    check(own->tensor.type.bits == bits[dtype] && own->tensor.type.code == codes[dtype], "its dtype");
    check(std::memcmp(own->tensor.shape, shape.data(), sizeof(int64_t) * 4) == 0, "its sizes");
    check(std::memcmp(own->tensor.strides, strides.data(), sizeof(int64_t) * 4) == 0, "its strides");
    check(reinterpret_cast<uintptr_t>(own->tensor.data) % (2 * MIB) == 0, "its place");
    std::memset(own->tensor.data, 7, static_cast<size_t>(2 * 3 * 500 * 64 * bits[dtype] / 8));
    drop(own);
  }
}

void again() {
  ch_keep_memory(64 * MIB);
  Managed *one = bytes(6 * MIB), *other = bytes(6 * MIB);
  void *first = one->tensor.data, *second = other->tensor.data;
  check(first != second && ch_kept_memory() == 0, "two tensors at a time");
  drop(one), drop(other);
  check(ch_kept_memory() == 12 * MIB, "two kept");
  Managed* smaller = bytes(3 * MIB);
  check(ch_kept_memory() == 12 * MIB, "another size leaves them alone");
  one = bytes(6 * MIB);
  check(one->tensor.data == second, "the one that was dropped last comes first");
  other = bytes(6 * MIB);
  check(other->tensor.data == first && ch_kept_memory() == 0, "then the other");
  drop(one), drop(other), drop(smaller);
  check(ch_kept_memory() == 15 * MIB, "all three kept");
  one = bytes(6 * MIB - 100);
  check(one->tensor.data == first, "a little less takes the same");
  drop(one);
  check(ch_keep_memory(0) == 64 * MIB && ch_kept_memory() == 0, "a limit of 0 gives all back");
  drop(bytes(2 * MIB));
  check(ch_kept_memory() == 0, "and keeps nothing");
  ch_keep_memory(8 * MIB);
  drop(bytes(2 * MIB));
  check(ch_keep_memory(-5) == 8 * MIB && ch_keep_memory(-1) == 8 * MIB, "asking for the limit changes nothing");
  check(ch_kept_memory() == 2 * MIB, "and gives nothing back");
  ch_keep_memory(0);
}

void limit() {
  ch_keep_memory(10 * MIB);
  std::vector<Managed*> some;
  for (int place = 0; place < 4; ++place) some.push_back(bytes(4 * MIB));
  void* last = some[3]->tensor.data;
  for (Managed* own : some) drop(own);
  check(ch_kept_memory() == 8 * MIB, "what is above the limit goes, the oldest first");
  Managed* own = bytes(4 * MIB);
  check(own->tensor.data == last, "the youngest is there");
  Managed* large = bytes(12 * MIB);
  drop(large);
  check(ch_kept_memory() == 4 * MIB, "what is larger than the limit is not kept, and pushes nothing out");
  drop(own);
  ch_keep_memory(int64_t{1} << 40);
  some.clear();
  for (int place = 0; place < 600; ++place) some.push_back(bytes(MIB / 8));
  for (Managed* one : some) drop(one);
  check(ch_kept_memory() <= 8 * MIB + 512 * MIB / 8 && ch_kept_memory() >= 256 * MIB / 8, "the number kept is bounded");
  ch_keep_memory(0);
}

// Every thread writes its own number and finds it again.
void threads() {
  ch_keep_memory(32 * MIB);
  std::vector<std::thread> some;
  for (int number = 1; number <= 8; ++number)
    some.emplace_back([number] {
      for (int round = 0; round < 50; ++round) {
        const int64_t size = (1 + (number + round) % 3) * MIB;
        Managed* own = bytes(size);
        unsigned char* data = static_cast<unsigned char*>(own->tensor.data);
        std::memset(data, number, static_cast<size_t>(size));
        std::this_thread::yield();
        for (int64_t at = 0; at < size; at += 4096)
          if (data[at] != number) return fail("a tensor that two threads had");
        drop(own);
      }
    });
  for (std::thread& one : some) one.join();
  check(ch_kept_memory() <= 32 * MIB, "the limit holds among threads");
}

void forks() {
  std::thread busy([] {
    for (int round = 0; round < 2000; ++round) drop(bytes(MIB));
  });
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a lock that nobody gives back ends here
      drop(bytes(MIB));
      _exit(ch_kept_memory() > 0 ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    check(status == 0, "a child forked while another thread makes tensors");
  }
  busy.join();
}

// Where all of a process's keys are others', nothing is kept for a thread, and nobody else's memory is taken for it.
void without_keys() {
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
  check(status == 0, "a process that has no key left for a thread's memory");
}

int bad() {
  constexpr int64_t far = INT64_MAX / 2;
  struct Case {
    const char* what;
    int dtype;
    Sizes shape, strides;
  };
  const std::vector<Case> all = {
      {"dtype", 3, {4}, {1}},
      {"negative dtype", -1, {4}, {1}},
      {"no axes", 0, {}, {}},
      {"six axes", 0, {1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1}},
      {"no rows", 0, {0, 4}, {4, 1}},
      {"negative rows", 0, {-1, 4}, {4, 1}},
      {"lowest rows", 0, {INT64_MIN, 4}, {4, 1}},
      {"huge rows", 0, {far, 4}, {4, 1}},
      {"negative stride", 0, {2, 4}, {-4, 1}},
      {"lowest stride", 0, {2, 4}, {INT64_MIN, 1}},
      {"huge stride", 0, {2, 4}, {far, 1}},
      {"a product past what there is", 0, {int64_t{1} << 40, int64_t{1} << 40}, {int64_t{1} << 40, 1}},
      {"a sum past what there is", 0, {2, 2, 2}, {int64_t{1} << 48, int64_t{1} << 48, 1}},
      {"a sum past what an integer holds", 0, {2, 32768, 32768, 2}, Sizes(4, int64_t{1} << 48)},
      {"more than the machine addresses", 0, {int64_t{1} << 47}, {1}},
  };
  for (const Case& one : all)
    check(make(one.dtype, one.shape, one.strides) == nullptr, std::string("a tensor with a bad ") + one.what);
  const int64_t four = 4;
  check(ch_new_tensor(0, 1, nullptr, &four) == nullptr, "a tensor without sizes");
  check(ch_new_tensor(0, 1, &four, nullptr) == nullptr, "a tensor without strides");
  return static_cast<int>(all.size()) + 2;
}

}  // namespace
}  // namespace test

int main() {
  test::check(ch_keep_memory(0) > 0, "some memory is kept until a limit is set");
  test::without_keys();
  test::form();
  test::again();
  test::limit();
  test::threads();
  test::forks();
  const int bad = test::bad();
  std::printf("memory kept for results, and %d bad sizes: %d failed\n", bad, test::failures);
  return test::failures == 0 ? 0 : 1;
}
