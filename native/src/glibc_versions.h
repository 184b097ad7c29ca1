// Asks for the first versions of the functions that glibc 2.34 moved from libpthread into libc and gave new versions.
// A library that is built on a newer system then loads wherever torch's own wheels do (glibc 2.28).
#pragma once

#include <features.h>

#if defined(__GLIBC__) && defined(__x86_64__)
#define CH_FIRST_VERSION "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define CH_FIRST_VERSION "GLIBC_2.17"
#endif

#ifdef CH_FIRST_VERSION
__asm__(".symver pthread_once, pthread_once@" CH_FIRST_VERSION);
__asm__(".symver pthread_key_create, pthread_key_create@" CH_FIRST_VERSION);
__asm__(".symver pthread_getspecific, pthread_getspecific@" CH_FIRST_VERSION);
__asm__(".symver pthread_setspecific, pthread_setspecific@" CH_FIRST_VERSION);
#endif
