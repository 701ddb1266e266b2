/* Weights to codes and scales of the formats of quant.py, with the same bits as its operations in torch.
 *
 * An entry takes any number of weights; the last block may be shorter. A block becomes float32 in a buffer first, so
 * that what follows is the same for all types and is vectorized over a block.
 */
#include "../rptrain/utils/native.h"

enum { NF4_BLOCK = 64, MXFP4_BLOCK = 32, INT8_BLOCK = 128, NO_NUMBER = 255 };

#define SIZE_BITS 0x7FFFFFFFu /* of a float32: all but the sign */
#define INFINITE 0x7F800000u
#define WHOLE 12582912.0f /* 1.5 * 2^23: what is added to it loses its fraction, ties to even */

/* The bits of the largest size of a block; NaN counts as the largest. */
#define LARGEST(LENGTH, X, FOUND)                    \
    uint32_t FOUND = 0;                              \
    for (int i = 0; i < (LENGTH); i++) {             \
        uint32_t size = bits_of((X)[i]) & SIZE_BITS; \
        FOUND = size > FOUND ? size : FOUND;         \
    }

static const float NF4_MIDDLES[15] = {
    -0x1.b239bp-1f, -0x1.38a4ep-1f, -0x1.d709p-2f, -0x1.5bd4ecp-2f, -0x1.e079d8p-3f,
    -0x1.1a7178p-3f, -0x1.74f0e2p-5f, 0x1.45f5fep-5f, 0x1.ec90c4p-4f, 0x1.a0cfcp-3f,
    0x1.2b05a8p-2f, 0x1.8ea7f2p-2f, 0x1.00da08p-1f, 0x1.491b5ep-1f, 0x1.b913b4p-1f,
};

static inline void nf4_block(const float *x, uint8_t *codes, float *scale)
{
    LARGEST(NF4_BLOCK, x, largest)
    *scale = of_bits(largest);
    const float inverse = largest ? 1.0f / *scale : 0.0f;
    int32_t rank[NF4_BLOCK];
    for (int i = 0; i < NF4_BLOCK; i++) {
        const float y = x[i] * inverse;
        int32_t above = 0;
        for (int k = 0; k < 15; k++)
            above += y > NF4_MIDDLES[k];
        rank[i] = above;
    }
    for (int i = 0; i < NF4_BLOCK / 2; i++)
        codes[i] = (uint8_t)(rank[2 * i] << 4 | rank[2 * i + 1]);
}

/* OCP Microscaling Formats 1.0, section 6.3: 4 <= the largest code < 8; nearest, ties to even, saturating. */
static inline void mxfp4_block(const float *x, uint8_t *codes, uint8_t *scale)
{
    LARGEST(MXFP4_BLOCK, x, largest)
    const int field = (int)(largest >> 23), exponent = largest == 0 ? 124 : field < 2 ? 0 : field - 2;
    *scale = (uint8_t)(largest >= INFINITE ? NO_NUMBER : exponent);
    const float factor = of_bits((uint32_t)(254 - exponent) << 23);
    int32_t code[MXFP4_BLOCK];
    for (int i = 0; i < MXFP4_BLOCK; i++) {
        const uint32_t bits = bits_of(x[i] * factor);
        const float y = of_bits(bits & SIZE_BITS);
        code[i] = (y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) + (y >= 3.5f) + (y > 5.0f);
        code[i] |= (int32_t)(bits >> 28 & 8);
    }
    for (int i = 0; i < MXFP4_BLOCK / 2; i++)
        codes[i] = (uint8_t)(code[2 * i + 1] << 4 | code[2 * i]);
}

static inline void int8_block(const float *x, uint8_t *codes, float *scale)
{
    LARGEST(INT8_BLOCK, x, largest)
    *scale = of_bits(largest) / 127.0f;
    const float divisor = *scale == 0 ? 1.0f : *scale;
    for (int i = 0; i < INT8_BLOCK; i++) {
        float y = x[i] / divisor;
        y = y > 127.0f ? 127.0f : y;
        y = y < -127.0f ? -127.0f : y;
        codes[i] = (uint8_t)bits_of(y + WHOLE);
    }
}

#define SAME(value) (value)

#define ENTRY(NAME, FORMAT, LENGTH, BYTES, SCALE, REAL, UPCAST)                       \
    CLONES void NAME(const REAL *w, int64_t count, uint8_t *codes, SCALE *scales)    \
    {                                                                                \
        for (; count > 0; count -= LENGTH, w += LENGTH, codes += BYTES, scales++) {  \
            const int whole = count >= LENGTH, there = whole ? LENGTH : (int)count;  \
            float x[LENGTH];                                                         \
            uint8_t own[BYTES];                                                      \
            if (whole)                                                               \
                for (int i = 0; i < LENGTH; i++)                                     \
                    x[i] = UPCAST(w[i]);                                              \
            else                                                                     \
                for (int i = 0; i < LENGTH; i++)                                     \
                    x[i] = i < there ? UPCAST(w[i]) : 0.0f;                           \
            FORMAT##_block(x, own, scales);                                          \
            memcpy(codes, own, (size_t)(there * BYTES + LENGTH - 1) / LENGTH);       \
        }                                                                            \
    }

#define FORMAT(NAME, LENGTH, BYTES, SCALE)                                         \
    ENTRY(quantize_##NAME##_bf16, NAME, LENGTH, BYTES, SCALE, uint16_t, upcast)     \
    ENTRY(quantize_##NAME##_f16, NAME, LENGTH, BYTES, SCALE, uint16_t, upcast_half) \
    ENTRY(quantize_##NAME##_f32, NAME, LENGTH, BYTES, SCALE, float, SAME)

FORMAT(nf4, NF4_BLOCK, NF4_BLOCK / 2, float)
FORMAT(mxfp4, MXFP4_BLOCK, MXFP4_BLOCK / 2, uint8_t)
FORMAT(int8, INT8_BLOCK, INT8_BLOCK, float)
