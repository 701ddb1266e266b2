/* What the files of native code share. They are loaded with ctypes, without Python headers, and compiled without
 * contraction to fused multiply-add, so that every clone and the fallback in torch compute the same bits.
 */
#ifndef RPTRAIN_NATIVE_H
#define RPTRAIN_NATIVE_H

#include <stdint.h>
#include <string.h>

#if defined(CLONES) /* given on the command line */
#elif defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#define CLONED
#if __GNUC__ >= 12
#define CLONED_AVX512 "x86-64-v4"
#define CLONED_AVX2 "x86-64-v3"
#define CLONES __attribute__((target_clones("arch=" CLONED_AVX512, "arch=" CLONED_AVX2, "default")))
#else
#define CLONED_AVX512 "avx512f"
#define CLONED_AVX2 "avx2"
#define CLONES __attribute__((target_clones(CLONED_AVX512, CLONED_AVX2, "default")))
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
static inline float upcast(uint16_t value)
{
    return of_bits((uint32_t)value << 16);
}

#define HALF_LEAST 0x38800000u /* the bits of 2^-14: below it a float16 is denormal, in steps of 2^-24 */
#define HALF_MOST 0x477FF000u  /* of 65520: from here on the nearest float16 is infinite */

/* The float32 of a float16. Where it is denormal, its bits are counted from 2^-14 on, which is then taken off. */
static inline float upcast_half(uint16_t value)
{
    uint32_t bits = (uint32_t)(value & 0x7FFFu) << 13, exponent = bits >> 23;
    uint32_t normal = bits + (exponent == 31 ? 0x70000000u : 0x38000000u);
    uint32_t denormal = bits_of(of_bits(bits + HALF_LEAST) - of_bits(HALF_LEAST));
    return of_bits((exponent ? normal : denormal) | (uint32_t)(value & 0x8000u) << 16);
}

/* The nearest float16, ties to even. Next to 1/2 a float32 has the steps of a denormal float16. */
static inline uint16_t narrow_half(float value)
{
    uint32_t bits = bits_of(value), size = bits & 0x7FFFFFFFu;
    uint32_t normal = (size + 0xFFFu + ((size >> 13) & 1u) - 0x38000000u) >> 13;
    uint32_t denormal = bits_of(of_bits(size < HALF_LEAST ? size : 0u) + 0.5f) - bits_of(0.5f);
    uint32_t half = size < HALF_LEAST ? denormal : normal;
    half = size >= HALF_MOST ? 0x7C00u : half;
    half = size > 0x7F800000u ? 0x7E00u : half;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

#endif
