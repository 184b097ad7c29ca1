// A page fault costs one to two microseconds: the system stops the thread, finds a page and zeroes it. The C library
// maps large blocks anew for every allocation, so a training step would pay this for every result. This cache keeps the
// pages of freed results for the next ones.
//
// What a typical step frees stays resident; beyond that the system may reclaim pages when it needs memory (MADV_FREE).
#include "memory.h"

#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "glibc_versions.h"
#include "scratch.h"

namespace clearhead {
namespace {

constexpr size_t HUGE_PAGE = size_t(1) << 21;
constexpr size_t PAGE = size_t(1) << 16;
constexpr int MAX_BLOCKS = 512;
// Bytes that stay resident. Each madvise costs ten microseconds and stalls the other threads.
constexpr size_t MAX_RESIDENT_BYTES = size_t(1) << 28;

struct Block {
  void* data;
  size_t bytes;
  bool resident;
};

// Oldest first.
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
Block cached[MAX_BLOCKS];
int num_cached = 0;
size_t cached_bytes = 0;
size_t resident_bytes = 0;
size_t max_bytes = 0;
pthread_once_t started = PTHREAD_ONCE_INIT;

void lock_pool() { pthread_mutex_lock(&lock); }
void unlock_pool() { pthread_mutex_unlock(&lock); }

void start() {
  // A fork while another thread has the lock would leave it locked in the child forever.
  pthread_atfork(lock_pool, unlock_pool, unlock_pool);
  const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
  max_bytes = pages > 0 && size > 0 ? static_cast<size_t>(pages) / 8 * static_cast<size_t>(size) : 0;
}

// Eight sizes between consecutive powers of two, so that lengths that differ a little share blocks.
size_t rounded(size_t bytes) {
  size_t step = PAGE;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

// A mapping that is aligned to a huge page.
void* map(size_t bytes) {
  const size_t mapped_bytes = bytes + HUGE_PAGE;
  if (mapped_bytes < bytes) return nullptr;
  void* mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* first = static_cast<char*>(mapped);
  char* data = first + (HUGE_PAGE - reinterpret_cast<uintptr_t>(first) % HUGE_PAGE) % HUGE_PAGE;
  if (data > first) munmap(first, static_cast<size_t>(data - first));
  if (first + mapped_bytes > data + bytes) munmap(data + bytes, static_cast<size_t>(first + mapped_bytes - (data + bytes)));
  advise_huge_pages(data, bytes);
  return data;
}

// Removes a block; the order of the others is unmodified.
Block removed(int place) {
  const Block removed_block = cached[place];
  for (--num_cached; place < num_cached; ++place) cached[place] = cached[place + 1];
  cached_bytes -= removed_block.bytes;
  if (removed_block.resident) resident_bytes -= removed_block.bytes;
  return removed_block;
}

// Offers the oldest blocks to the system, beyond the resident limit.
void offer_oldest() {
  for (int place = 0; place < num_cached && resident_bytes > MAX_RESIDENT_BYTES; ++place) {
    Block& block = cached[place];
    if (!block.resident) continue;
#if defined(MADV_FREE)
    // A hint: the code does not depend on it.
    madvise(block.data, block.bytes, MADV_FREE);
#endif
    block.resident = false;
    resident_bytes -= block.bytes;
  }
}

void shrink(size_t bytes, int blocks) {
  while (num_cached > 0 && (cached_bytes > bytes || num_cached > blocks)) {
    const Block oldest = removed(0);
    munmap(oldest.data, oldest.bytes);
  }
}

}  // namespace

void* pool_allocate(size_t bytes) {
  if (bytes > SIZE_MAX / 4) return nullptr;
  const size_t wanted = rounded(bytes);
  void* reused = nullptr;
  pthread_once(&started, start);
  lock_pool();
  // The newest block is most likely in the processor's cache.
  for (int place = num_cached - 1; place >= 0 && reused == nullptr; --place)
    if (cached[place].bytes == wanted) reused = removed(place).data;
  unlock_pool();
  return reused != nullptr ? reused : map(wanted);
}

void pool_free(void* data, size_t bytes) {
  const size_t whole = rounded(bytes);
  lock_pool();
  const bool fits = whole <= max_bytes;
  if (fits) {
    shrink(max_bytes - whole, MAX_BLOCKS - 1);
    cached[num_cached++] = Block{data, whole, true};
    cached_bytes += whole, resident_bytes += whole;
    offer_oldest();
  }
  unlock_pool();
  if (!fits) munmap(data, whole);
}

size_t pool_bytes() {
  lock_pool();
  const size_t released = cached_bytes;
  unlock_pool();
  return released;
}

size_t pool_limit() {
  pthread_once(&started, start);
  lock_pool();
  const size_t before = max_bytes;
  unlock_pool();
  return before;
}

size_t set_pool_limit(size_t bytes) {
  pthread_once(&started, start);
  lock_pool();
  const size_t before = max_bytes;
  max_bytes = bytes;
  shrink(bytes, MAX_BLOCKS);
  unlock_pool();
  return before;
}

}  // namespace clearhead
