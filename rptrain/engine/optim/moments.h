/* Adam's moments in 16 and in 8 bits: rounded at random, so that each keeps its mean. moments.py says why, and has the
 * same operations in numpy.
 */
#ifndef RPTRAIN_MOMENTS_H
#define RPTRAIN_MOMENTS_H

#include "../../utils/native.h"

#include <math.h>

enum { BLOCK = 128 }; /* elements that share the scales of their codes */

#define M_TOP 16129.0f /* 127 squared: the largest first moment of a block, over its scale */
#define R_TOP 65025.0f /* 255 squared: the largest root of a second moment */
#define LEAST 1e-20f   /* that a block's largest is taken for: its scale and the inverse of it are normal numbers */
#define MOST 1e38f     /* that a second moment is taken for */

/* 32 random bits of a counter, by the last steps of MurmurHash3: the lower half is for exp_avg, the upper for
 * exp_avg_sq. */
static inline uint32_t mix(uint32_t counter)
{
    counter = (counter ^ (counter >> 16)) * 0x85EBCA6Bu;
    counter = (counter ^ (counter >> 13)) * 0xC2B2AE35u;
    return counter ^ (counter >> 16);
}

/* A bfloat16 below or above the value. Here and below `random` has 16 bits. */
static inline uint16_t dithered(float value, uint32_t random)
{
    return (uint16_t)((bits_of(value) + random) >> 16);
}

/* A number between 0 and 1, neither of them. */
static inline float share(uint32_t random)
{
    return ((float)(int32_t)random + 0.5f) * (1.0f / 65536);
}

static inline float mean_of(int8_t code, float scale)
{
    float c = code;
    return c * fabsf(c) * scale;
}

static inline float root_of(uint8_t code, float scale)
{
    float c = code;
    return c * c * scale;
}

static inline int32_t below(float root, int32_t most)
{
    int32_t low = (int32_t)root;
    return low < most ? low : most;
}

/* The code whose square is below or above |value|, a first moment over its block's scale. */
static inline int8_t mean_code(float value, uint32_t random)
{
    float size = fabsf(value);
    int32_t code = below(sqrtf(size), 126);
    float low = (float)code;
    code += share(random) * (2 * low + 1) < size - low * low;
    return (int8_t)(value < 0 ? -code : code);
}

/* The code whose square is below or above the root of a second moment over its block's scale: with such chances that
 * the mean of the moment itself stays. Code 0 is for 0 alone, as it is a divisor. */
static inline uint8_t root_code(float root, uint32_t random)
{
    int32_t code = below(sqrtf(root), 254);
    code = code > 1 ? code : 1;
    float low = (float)code * (float)code, high = (float)(code + 1) * (float)(code + 1);
    code += share(random) * (high * high - low * low) < root * root - low * low;
    return (uint8_t)(root > 0 ? code : 0);
}

static inline float least(float value, float most)
{
    return value < most ? value : most;
}

/* The larger of the bits of numbers that are not negative; compared as integers, as compilers vectorize that. */
static inline uint32_t larger(uint32_t top, float value)
{
    uint32_t bits = bits_of(value);
    return bits > top ? bits : top;
}

#endif
