/* Weights to FP8 (e4m3) by rows, with the same bits as reference/fp8.py: codes, and a scale for each row. */
#include "../rptrain/utils/native.h"

#define SIZE_BITS 0x7FFFFFFFu /* of a float32: all but the sign */
#define INFINITE 0x7F800000u
#define LEAST 0x3C800000u  /* the bits of 2^-6: below it a code is denormal, in steps of 2^-9 */
#define STEPS 16384.0f     /* 2^14: a float32 next to it has steps of 2^-9 */
#define LEAST_SCALE 0x1p-126f /* so that its inverse is finite */
#define BIAS 960u          /* of the exponents, 127 - 7, in units of codes */
#define MOST_CODE 126u     /* 448, also of larger values */
#define NAN_CODE 127u

/* The scale of a row from the bits of its largest size, which becomes the code 448. */
static inline float scale_of(uint32_t largest)
{
    const float scale = of_bits(largest) / 448.0f;
    return largest >= INFINITE ? 1.0f : scale > LEAST_SCALE ? scale : LEAST_SCALE;
}

/* The nearest code, ties to even, of a value that is divided by the scale whose inverse is `factor`. */
static inline uint32_t code_of(float value, float factor)
{
    const uint32_t bits = bits_of(value * factor), size = bits & SIZE_BITS;
    const uint32_t rounded = ((size + 0x7FFFFu + ((size >> 20) & 1u)) >> 20) - BIAS;
    const uint32_t normal = rounded < MOST_CODE ? rounded : MOST_CODE;
    const uint32_t denormal = bits_of(of_bits(size < LEAST ? size : 0u) + STEPS) - bits_of(STEPS);
    const uint32_t code = (size < LEAST ? denormal : normal) | (bits >> 24 & 0x80u);
    return size >= INFINITE ? NAN_CODE : code;
}

#define SAME(value) (value)

#define ENTRY(NAME, REAL, UPCAST)                                                                   \
    CLONES void NAME(const REAL *w, int64_t rows, int64_t columns, uint8_t *codes, float *scales)   \
    {                                                                                               \
        for (int64_t row = 0; row < rows; row++, w += columns, codes += columns) {                  \
            uint32_t largest = 0; /* NaN counts as the largest */                                   \
            for (int64_t i = 0; i < columns; i++) {                                                 \
                const uint32_t size = bits_of(UPCAST(w[i])) & SIZE_BITS;                            \
                largest = size > largest ? size : largest;                                          \
            }                                                                                       \
            const float scale = scale_of(largest), factor = 1.0f / scale;                           \
            for (int64_t i = 0; i < columns; i++)                                                   \
                codes[i] = (uint8_t)code_of(UPCAST(w[i]), factor);                                  \
            scales[row] = scale;                                                                    \
        }                                                                                           \
    }

ENTRY(fp8_rows_bf16, uint16_t, upcast)
ENTRY(fp8_rows_f16, uint16_t, upcast_half)
ENTRY(fp8_rows_f32, float, SAME)
