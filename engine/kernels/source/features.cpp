// What this CPU and its system can run; compiled for the baseline, as nothing else may be called before it is known.

#if defined(__x86_64__)
#include <cpuid.h>

#include <cerrno>
#include <cstdint>

#include "permission.h"

extern "C" __attribute__((visibility("default"))) int baton_cpu_has(int feature);
extern "C" __attribute__((visibility("default"))) int baton_tiles_refused();

namespace {

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}

bool has_avx512() {  // x86-64-v4
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

uint32_t leaf7(uint32_t subleaf, int output) {
    uint32_t words[4] = {};
    if (!__get_cpuid_count(7, subleaf, &words[0], &words[1], &words[2], &words[3])) return 0;
    return words[output];
}

bool has_avx512_bf16() { return has_avx512() && leaf7(1, 0) >> 5 & 1; }

bool has_tiles() {  // and bfloat16 in them, and a system that keeps them
    if (!has_avx512_bf16() || (leaf7(0, 3) >> 22 & 5) != 5) return false;
    uint32_t low, high;
    asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low >> 17 & 3) == 3;
}

int ask() {
#if defined(__linux__)
    return ask_for_tiles();
#else
    return ENOSYS;
#endif
}

}  // namespace

extern "C" int baton_cpu_has(int feature) {
    __builtin_cpu_init();
    switch (feature) {
        case 0: return has_avx2();
        case 1: return has_avx512();
        case 2: return has_avx512_bf16();
        case 3: return has_tiles() && ask() == 0;
        default: return 0;
    }
}

// Why the system does not let this process use the tiles that the CPU has, as an errno; 0 if it does, or if there are none.
extern "C" int baton_tiles_refused() {
    __builtin_cpu_init();
    return has_tiles() ? ask() : 0;
}

#else

#if defined(__linux__)
#include <sys/auxv.h>
#endif

extern "C" __attribute__((visibility("default"))) int baton_cpu_has(int feature);
extern "C" __attribute__((visibility("default"))) int baton_tiles_refused();

namespace {

// NEON on a core of Arm's version 8.1 or later. The libraries are compiled for 8.2, so atomic instructions stand in them
// that a Cortex-A72 lacks.
bool has_neon() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) >> 8 & 1;  // HWCAP_ATOMICS
#else
    return true;  // all of Apple's have them
#endif
}

bool has_neon_bf16() {
#if defined(__linux__)
    return getauxval(AT_HWCAP2) >> 14 & 1;  // HWCAP2_BF16, which old headers lack
#else
    return false;
#endif
}

}  // namespace

extern "C" int baton_cpu_has(int feature) {
    switch (feature) {
        case 4: return has_neon();
        case 5: return has_neon_bf16();
        default: return 0;
    }
}

extern "C" int baton_tiles_refused() { return 0; }

#endif
