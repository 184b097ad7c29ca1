#include "scratch.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "glibc_versions.h"

namespace clearhead {
namespace {

struct Buffer {
  void* data;
  size_t bytes;
};

struct Buffers {
  Buffer of[SLOTS];
};

constexpr size_t HUGE_PAGE = size_t(1) << 21;
constexpr size_t MAX_CACHED_BYTES = size_t(3) << 24;

pthread_key_t key;
bool has_key = false;
pthread_once_t started = PTHREAD_ONCE_INIT;

void release(void* pointer) {
  Buffers* mine = static_cast<Buffers*>(pointer);
  for (Buffer& buffer : mine->of) free(buffer.data);
  free(mine);
}

// A pthread key with a destructor: thread_local would need the C++ runtime.
void make_key() { has_key = pthread_key_create(&key, release) == 0; }

Buffers* buffers() {
  pthread_once(&started, make_key);
  // All keys are taken by others.
  if (!has_key) return nullptr;
  Buffers* mine = static_cast<Buffers*>(pthread_getspecific(key));
  if (mine == nullptr) {
    mine = static_cast<Buffers*>(calloc(1, sizeof(Buffers)));
    if (mine != nullptr && pthread_setspecific(key, mine) != 0) {
      free(mine);
      mine = nullptr;
    }
  }
  return mine;
}

}  // namespace

void advise_huge_pages(void* data, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / HUGE_PAGE * HUGE_PAGE;
  // A hint: the code does not depend on it.
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

void* scratch(Slot slot, size_t bytes) {
  Buffers* mine = buffers();
  if (mine == nullptr) return nullptr;
  Buffer& buffer = mine->of[slot];
  // A request for 0 bytes (a row without keys) allocates too: null means that there is no memory.
  if (buffer.data == nullptr || buffer.bytes < bytes) {
    free(buffer.data);
    // Some slack, so that lengths that grow by one do not reallocate each time.
    size_t wanted = ((bytes + bytes / 8) / 4096 + 1) * 4096;
    buffer.data = nullptr;
    buffer.bytes = 0;
    const bool large = wanted >= 2 * HUGE_PAGE;
    if (posix_memalign(&buffer.data, large ? HUGE_PAGE : 64, wanted) != 0) return buffer.data = nullptr;
    if (large) advise_huge_pages(buffer.data, wanted);
    buffer.bytes = wanted;
  }
  return buffer.data;
}

void trim_scratch() {
  Buffers* mine = buffers();
  if (mine == nullptr) return;
  for (Buffer& buffer : mine->of) {
    if (buffer.bytes > MAX_CACHED_BYTES) {
      free(buffer.data);
      buffer = Buffer{nullptr, 0};
    }
  }
}

}  // namespace clearhead
