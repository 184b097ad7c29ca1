// The library as a whole: its instruction sets and which of them this processor has, forks, error messages. The calls
// are in *_entry.cpp.
#include <pthread.h>
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#ifndef HWCAP2_BF16  // headers older than Linux 5.7
#define HWCAP2_BF16 (1 << 14)
#endif
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "checks.h"
#include "isa.h"
#include "scratch.h"

// The build defines CH_WITH_<SET> for each set that it compiles, as the name of the function below that tests the
// processor.
#define CH_DECLARE_QUANTIZED(set)                             \
  namespace set {                                             \
  extern const clearhead::QuantizedKernels quantized_kernels; \
  }
#define CH_DECLARE(set)                    \
  CH_DECLARE_QUANTIZED(set)                \
  namespace set {                          \
  extern const clearhead::Kernels kernels; \
  }
#ifdef CH_WITH_AMX
CH_DECLARE(amx)
#endif
#ifdef CH_WITH_AVX512BF16
CH_DECLARE(avx512bf16)
#endif
#ifdef CH_WITH_AVX512VNNI
CH_DECLARE_QUANTIZED(avx512vnni)
#endif
#ifdef CH_WITH_AVX512
CH_DECLARE(avx512)
#endif
#ifdef CH_WITH_AVXVNNI
CH_DECLARE_QUANTIZED(avxvnni)
#endif
#ifdef CH_WITH_AVX2
CH_DECLARE(avx2)
#endif
#ifdef CH_WITH_NEONBF16
CH_DECLARE(neonbf16)
#endif
#ifdef CH_WITH_NEONDOT
CH_DECLARE_QUANTIZED(neondot)
#endif
#ifdef CH_WITH_NEON
CH_DECLARE(neon)
#endif
CH_DECLARE(baseline)

namespace clearhead {
namespace {

// ---- instruction sets -------------------------------------------------------------------------------------

// The table of the choice. Nothing is measured, so every process on a machine computes the same bits.
struct Set {
  const char* name;
  bool (*usable)();
  const Kernels* kernels;
  const QuantizedKernels* quantized;
  int32_t slow_on = CH_OTHER_VENDOR;  // the vendor whose processors run the next set faster, if there is one
};

#if defined(__x86_64__)
// The compiler's check includes that the operating system saves the registers.
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("f16c");
}
[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
[[maybe_unused]] bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
[[maybe_unused]] bool has_avx512bf16() { return has_avx512vnni() && __builtin_cpu_supports("avx512bf16"); }
// Not every compiler knows the name of AVX-VNNI.
[[maybe_unused]] bool has_avxvnni() {
  unsigned eax, ebx, ecx, edx;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & 1u << 4) != 0;
}

// Asks the operating system for tile registers, which a process has only with its permission; it is kept by all threads
// and by child processes.
bool permits_amx() {
#if defined(__linux__)
  constexpr int TILE_DATA = 18;  // the state component: Intel 64, volume 1, section 13.5.14
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, TILE_DATA) == 0;
#else
  return false;
#endif
}

[[maybe_unused]] bool has_amx() {
  static int answer = -1;
  if (const int earlier = __atomic_load_n(&answer, __ATOMIC_RELAXED); earlier >= 0) return earlier == 1;
  unsigned eax, ebx, ecx, edx;
  // CPUID's bits for AMX-BF16 and AMX-TILE, and XCR0's for the configuration and the data of tiles.
  constexpr unsigned AMX = 1u << 22 | 1u << 24, OSXSAVE = 1u << 27, TILE_STATE = 3u << 17;
  bool usable = has_avx512bf16() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & AMX) == AMX &&
                __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & OSXSAVE) != 0;
  if (usable) {
    asm("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    usable = (eax & TILE_STATE) == TILE_STATE && permits_amx();
  }
  __atomic_store_n(&answer, usable ? 1 : 0, __ATOMIC_RELAXED);
  return usable;
}
#endif
#if defined(__aarch64__)
#if defined(__APPLE__)
bool has_feature(const char* name) {
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname(name, &has, &size, nullptr, 0) == 0 && has != 0;
}
#endif
[[maybe_unused]] bool has_neon() { return true; }  // part of the architecture
[[maybe_unused]] bool has_neondot() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__APPLE__)
  return has_feature("hw.optional.arm.FEAT_DotProd");
#else
  return false;
#endif
}
[[maybe_unused]] bool has_neonbf16() {
#if defined(__linux__)
  const unsigned long halves = HWCAP_FPHP | HWCAP_ASIMDHP;
  return has_neondot() && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0 && (getauxval(AT_HWCAP) & halves) == halves;
#elif defined(__APPLE__)
  return has_neondot() && has_feature("hw.optional.arm.FEAT_BF16") && has_feature("hw.optional.arm.FEAT_FP16");
#else
  return false;
#endif
}
#endif
bool always() { return true; }

const Set sets[] = {
#ifdef CH_WITH_AMX
    {"amx", CH_WITH_AMX, &amx::kernels, &amx::quantized_kernels},
#endif
#ifdef CH_WITH_AVX512BF16
    // Intel's processors multiply bfloat16 by VDPBF16PS at half the rate of float32 (docs/adr/0004-choices-by-table.md).
    // Hypervisors hide AMX and change the model number, so the row names the vendor.
    {"avx512bf16", CH_WITH_AVX512BF16, &avx512bf16::kernels, &avx512bf16::quantized_kernels, CH_INTEL},
#endif
#ifdef CH_WITH_AVX512VNNI
    {"avx512vnni", CH_WITH_AVX512VNNI, &avx512::kernels, &avx512vnni::quantized_kernels},
#endif
#ifdef CH_WITH_AVX512
    {"avx512", CH_WITH_AVX512, &avx512::kernels, &avx512::quantized_kernels},
#endif
#ifdef CH_WITH_AVXVNNI
    {"avxvnni", CH_WITH_AVXVNNI, &avx2::kernels, &avxvnni::quantized_kernels},
#endif
#ifdef CH_WITH_AVX2
    {"avx2", CH_WITH_AVX2, &avx2::kernels, &avx2::quantized_kernels},
#endif
#ifdef CH_WITH_NEONBF16
    {"neonbf16", CH_WITH_NEONBF16, &neonbf16::kernels, &neonbf16::quantized_kernels},
#endif
#ifdef CH_WITH_NEONDOT
    {"neondot", CH_WITH_NEONDOT, &neon::kernels, &neondot::quantized_kernels},
#endif
#ifdef CH_WITH_NEON
    {"neon", CH_WITH_NEON, &neon::kernels, &neon::quantized_kernels},
#endif
    {"baseline", always, &baseline::kernels, &baseline::quantized_kernels},
};
constexpr int num_sets = sizeof(sets) / sizeof(sets[0]);

int32_t vendor() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel") ? CH_INTEL : CH_OTHER_VENDOR;
#else
  return CH_OTHER_VENDOR;
#endif
}

// By its index, -1 for the best; null if this processor lacks it.
const Set* set_of(int isa) {
  const int index = isa == -1 ? ch_isa_best() : isa;
  return ch_isa_usable(index) ? &sets[index] : nullptr;
}

// ---- forks ------------------------------------------------------------------------------------------------

bool forked = false;

void set_forked() { forked = true; }

__attribute__((constructor)) void register_fork_handler() { pthread_atfork(nullptr, nullptr, set_forked); }

}  // namespace

bool after_fork() noexcept { return forked; }

const Kernels* kernels_of(int isa) {
  const Set* set = set_of(isa);
  return set == nullptr ? nullptr : set->kernels;
}

const QuantizedKernels* quantized_kernels_of(int isa) {
  const Set* set = set_of(isa);
  return set == nullptr ? nullptr : set->quantized;
}

}  // namespace clearhead

extern "C" {

int ch_abi(void) { return CH_ABI; }

void ch_in_team(int32_t isa, int32_t threads, void (*function)(void* of), void* of) {
  const clearhead::Kernels* kernels = clearhead::kernels_of(isa);
  if (kernels == nullptr || threads > clearhead::max_threads) return function(of);
  kernels->in_team(threads, function, of);
}

void ch_share(int32_t isa, int32_t threads, int64_t units, void (*body)(void* of, int64_t unit), void* of) {
  const clearhead::Kernels* kernels = clearhead::kernels_of(isa);
  if (kernels == nullptr || threads > clearhead::max_threads) threads = 1, kernels = clearhead::kernels_of(-1);
  kernels->share(threads, units, body, of);
}

const char* ch_isa_name(int index) {
  return index >= 0 && index < clearhead::num_sets ? clearhead::sets[index].name : nullptr;
}

int ch_isa_usable(int index) {
  return index >= 0 && index < clearhead::num_sets && clearhead::sets[index].usable() ? 1 : 0;
}

int ch_isa_for(int32_t vendor) {
  for (int index = 0; index < clearhead::num_sets; ++index) {
    const clearhead::Set& set = clearhead::sets[index];
    const bool slow = vendor != CH_OTHER_VENDOR && set.slow_on == vendor;
    if (set.usable() && !slow) return index;
  }
  return clearhead::num_sets - 1;
}

int ch_isa_best(void) { return ch_isa_for(clearhead::vendor()); }

double ch_product_rate(int32_t dtype, int32_t isa, int32_t threads) {
  const clearhead::Kernels* kernels = clearhead::kernels_of(isa);
  if (kernels == nullptr || dtype < 0 || dtype > CH_FLOAT16 || threads < 1 || threads > clearhead::max_threads) return 0.0;
  return kernels->rate(dtype, clearhead::after_fork() ? 1 : threads);
}

const char* ch_message(int code) {
  switch (code) {
    case CH_OK: return "done";
    case CH_BAD_SIZE: return "the description is not of this library's version";
    case CH_BAD_SHAPE: return "a count is negative, too large, or does not divide";
    case CH_BAD_DTYPE: return "no such dtype";
    case CH_BAD_POINTER: return "a required tensor is null or not aligned to its elements";
    case CH_BAD_STRIDE: return "a stride is negative or too large, or rows that are written overlap";
    case CH_BAD_MASK: return "the intervals, bounds or tables of the mask do not fit the call";
    case CH_BAD_RULE: return "no such score rule, or its parameters do not fit the call";
    case CH_BAD_OPTION: return "scale, dropout or threads are out of range";
    case CH_BAD_ISA: return "the processor lacks the requested instruction set";
    case CH_NO_MEMORY: return "out of memory for workspaces; the results are invalid";
    case CH_NOT_FINITE: return "NaN or infinity in query, key, value or a gradient, with a mask; no gradient was written";
    case CH_BAD_STATISTIC: return "a statistic's size or count does not fit the call";
    case CH_BAD_PAGES: return "a page table, length or start of queries is out of range, or pages do not go with the call";
    default: return "no such code";
  }
}

}  // extern "C"
