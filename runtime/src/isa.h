// The ISA levels of kernels and which of them this CPU has. Plain C, since the C loader shares it.
#pragma once

#include <cpuid.h>
#include <stdint.h>
#include <string.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define ATSC_NUM_ISA_LEVELS 5

// Levels of kernels, as codegen/cpu.py ISA_LEVELS. A CPU may have a level without every lower one.
static const char* const atsc_isa_names[ATSC_NUM_ISA_LEVELS] = {
    "avx2",        // x86-64-v3
    "avxvnni",     // and AVX-VNNI
    "avx512",      // x86-64-v4
    "avx512vnni",  // and AVX-512 VNNI
    "amx",         // and AMX-INT8
};

static inline int atsc_has_all(uint32_t value, uint32_t bits) { return (value & bits) == bits; }

// Asks Linux for the state of AMX's tiles, which a process has only if it wants it; once is enough.
static inline int atsc_may_use_tiles(void) {
#if defined(__linux__)
  const long request_permission = 0x1023, tile_data = 18;  // asm/prctl.h ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return 0;
#endif
}

// Bit i is set if the CPU and the operating system support level i.
static inline uint32_t atsc_cpu_isa_levels(void) {
  uint32_t a, b, c, d, b7 = 0, b71, c7 = 0, d7 = 0, a71 = 0, c81 = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const uint32_t fma = 1u << 12, movbe = 1u << 22, osxsave = 1u << 27, avx = 1u << 28;
  const uint32_t f16c = 1u << 29;
  if (!atsc_has_all(c, fma | movbe | osxsave | avx | f16c)) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return 0;
  if (a >= 1) __get_cpuid_count(7, 1, &a71, &b71, &c, &d);
  __get_cpuid(0x80000001u, &a, &b, &c81, &d);
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const uint32_t bmi1 = 1u << 3, avx2 = 1u << 5, bmi2 = 1u << 8, lzcnt = 1u << 5;
  if (!atsc_has_all(low, 0x6) || !atsc_has_all(b7, bmi1 | avx2 | bmi2)) return 0;
  if (!atsc_has_all(c81, lzcnt)) return 0;
  uint32_t levels = 1u;
  if (a71 & (1u << 4)) levels |= 1u << 1;
  const uint32_t avx512 = (1u << 16) | (1u << 17) | (1u << 28) | (1u << 30) | (1u << 31);
  if (atsc_has_all(low, 0xe6) && atsc_has_all(b7, avx512)) {
    levels |= 1u << 2;
    if (c7 & (1u << 11)) levels |= 1u << 3;
    const uint32_t amx_tile = 1u << 24, amx_int8 = 1u << 25, tile_state = 0x60000;
    const int has_amx = atsc_has_all(d7, amx_tile | amx_int8) && atsc_has_all(low, tile_state);
    if ((levels & 1u << 3) && has_amx && atsc_may_use_tiles()) levels |= 1u << 4;
  }
  return levels;
}

// Whether this machine is of an x86-64 micro-architecture level, as plan.json names it; -1 if the
// name is not known.
static inline int atsc_cpu_has_psabi_level(const char* name) {
  uint32_t a, b, c = 0, d;
  const uint32_t v2 = 1u | (1u << 9) | (1u << 13) | (1u << 19) | (1u << 20) | (1u << 23);
  if (strcmp(name, "x86-64") == 0) return 1;
  if (strcmp(name, "x86-64-v2") == 0) return __get_cpuid(1, &a, &b, &c, &d) && atsc_has_all(c, v2);
  if (strcmp(name, "x86-64-v3") == 0) return (int)(atsc_cpu_isa_levels() & 1u);
  if (strcmp(name, "x86-64-v4") == 0) return (int)(atsc_cpu_isa_levels() >> 2 & 1u);
  return -1;
}
