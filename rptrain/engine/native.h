/* What the files of native code share. They are loaded with ctypes, without Python headers, and compiled without
 * contraction to fused multiply-add, so that every clone and the fallback in torch compute the same bits.
 */
#ifndef RPTRAIN_NATIVE_H
#define RPTRAIN_NATIVE_H

#include <stdint.h>
#include <string.h>

#if defined(CLONES) /* given on the command line */
#elif defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#if __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define CLONES
#endif

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The float32 of a bfloat16. */
static inline float widen(uint16_t value)
{
    return of_bits((uint32_t)value << 16);
}

#endif
