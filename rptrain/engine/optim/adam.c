/* Fused Adam with decoupled weight decay: one pass that reads the gradient, the moments and the master weight
 * and writes the moments and the new parameter. moments.h has the formats of small moments.
 *
 * Every entry takes a Job that the threads of a pool share: each takes the next chunk until none is left. A chunk's
 * result does not depend on who takes it.
 */
#include "moments.h"
#include "../../utils/native.h"

#include <math.h>

#if defined(__GNUC__) && !defined(__clang__)
#define INDEPENDENT _Pragma("GCC ivdep") /* source may be target: the same element, never another one */
#else
#define INDEPENDENT
#endif

enum { CHUNK = 65536, LANES = 512 };

typedef struct {
    int64_t next, count; /* the first chunk that nobody has taken; elements */
    int64_t noise;       /* what element 0 draws its random numbers from; element i from noise + i */
    int64_t groups;      /* buffers in `grads` */
    const void *source, *grad;
    void *target, *remainder, *exp_avg, *exp_avg_sq;
    float *exp_avg_scale, *exp_avg_sq_scale; /* of each block, for codes */
    float *masters;                          /* the master weights of float16 parameters */
    void *grads;                             /* pointers to the buffers that are added up */
    double grad_scale, beta1, beta2, rest1, rest2, decay, step_size, root_scale, eps;
} Job;

/* Sets the bounds of the next chunk; 0 when none is left. */
static int take(Job *job, int64_t *start, int64_t *stop)
{
    *start = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED) * CHUNK;
    *stop = job->count - *start < CHUNK ? job->count : *start + CHUNK;
    return *start < job->count;
}

/* Which of the clones of its functions this machine runs. */
const char *instruction_set(void)
{
#ifdef CLONED
    __builtin_cpu_init();
    if (__builtin_cpu_supports(CLONED_AVX512))
        return "AVX-512";
    if (__builtin_cpu_supports(CLONED_AVX2))
        return "AVX2";
#endif
    return "what the compiler takes for granted";
}

/* The remainder is the signed distance from the parameter, rounded half up, to the master weight's bits. */
static inline float join(uint16_t param, int16_t remainder)
{
    uint32_t bits = ((uint32_t)param << 16) + (uint32_t)(int32_t)remainder;
    return of_bits(bits);
}

static inline void split(float master, uint16_t *param, int16_t *remainder)
{
    uint32_t bits = bits_of(master);
    *param = (uint16_t)((bits + 0x8000u) >> 16);
    *remainder = (int16_t)bits;
}

#define SAME(value) (value)
#define KEEP(value, random) ((void)(random), (value))
#define JOIN(i) join(source[i], remainder[i])
#define SPLIT(i, master) split(master, &target[i], &remainder[i])
#define MASTER(i) masters[i]
#define HALVE(i, master) (masters[i] = (master), target[i] = narrow_half(master))
#define READ(i) source[i]
#define WRITE(i, master) target[i] = (master)

#define ADAM(NAME, REAL, ROOT, PARAM, REMAINDER, GRAD, UPCAST, LOAD, STORE, MOMENT, DECODE, ENCODE)           \
    CLONES void NAME(Job *job)                                                                               \
    {                                                                                                        \
        const PARAM *source = job->source;                                                                   \
        PARAM *target = job->target;                                                                         \
        REMAINDER *remainder = job->remainder;                                                               \
        float *masters = job->masters;                                                                       \
        const GRAD *grad = job->grad;                                                                        \
        MOMENT *exp_avg = job->exp_avg, *exp_avg_sq = job->exp_avg_sq;                                       \
        const REAL grad_scale = (REAL)job->grad_scale, decay = (REAL)job->decay, eps = (REAL)job->eps;       \
        const REAL beta1 = (REAL)job->beta1, rest1 = (REAL)job->rest1, step_size = (REAL)job->step_size;     \
        const REAL beta2 = (REAL)job->beta2, rest2 = (REAL)job->rest2, root_scale = (REAL)job->root_scale;   \
        const uint32_t noise = (uint32_t)job->noise;                                                         \
        (void)source, (void)remainder, (void)masters;                                                        \
        for (int64_t start, stop; take(job, &start, &stop);) {                                               \
            INDEPENDENT                                                                                      \
            for (int64_t i = start; i < stop; i++) {                                                         \
                REAL g = UPCAST(grad[i]) * grad_scale;                                                        \
                REAL m = beta1 * DECODE(exp_avg[i]) + rest1 * g;                                             \
                REAL v = beta2 * DECODE(exp_avg_sq[i]) + rest2 * (g * g);                                    \
                uint32_t random = mix(noise + (uint32_t)i);                                                  \
                exp_avg[i] = ENCODE(m, random & 0xFFFFu);                                                    \
                exp_avg_sq[i] = ENCODE(v, random >> 16);                                                     \
                REAL master = LOAD(i) * decay - step_size * m / (ROOT(v) * root_scale + eps);                \
                STORE(i, master);                                                                            \
            }                                                                                                \
        }                                                                                                    \
    }

ADAM(adam_bf16_bf16_f32, float, sqrtf, uint16_t, int16_t, uint16_t, upcast, JOIN, SPLIT, float, SAME, KEEP)
ADAM(adam_bf16_f32_f32, float, sqrtf, uint16_t, int16_t, float, SAME, JOIN, SPLIT, float, SAME, KEEP)
ADAM(adam_f16_f16_f32, float, sqrtf, uint16_t, void, uint16_t, upcast_half, MASTER, HALVE, float, SAME, KEEP)
ADAM(adam_f16_f32_f32, float, sqrtf, uint16_t, void, float, SAME, MASTER, HALVE, float, SAME, KEEP)
ADAM(adam_f32_f32_f32, float, sqrtf, float, void, float, SAME, READ, WRITE, float, SAME, KEEP)
ADAM(adam_f64_f64_f64, double, sqrt, double, void, double, SAME, READ, WRITE, double, SAME, KEEP)
ADAM(adam_bf16_bf16_bf16, float, sqrtf, uint16_t, int16_t, uint16_t, upcast, JOIN, SPLIT, uint16_t, upcast, dithered)
ADAM(adam_bf16_f32_bf16, float, sqrtf, uint16_t, int16_t, float, SAME, JOIN, SPLIT, uint16_t, upcast, dithered)
ADAM(adam_f16_f16_bf16, float, sqrtf, uint16_t, void, uint16_t, upcast_half, MASTER, HALVE, uint16_t, upcast, dithered)
ADAM(adam_f16_f32_bf16, float, sqrtf, uint16_t, void, float, SAME, MASTER, HALVE, uint16_t, upcast, dithered)
ADAM(adam_f32_f32_bf16, float, sqrtf, float, void, float, SAME, READ, WRITE, uint16_t, upcast, dithered)

/* With moments in codes, block by block: their scales are known once all of a block was computed. Several short loops:
 * in a single one, compilers that vectorize run out of registers. */
#define ADAM_CODES(NAME, PARAM, REMAINDER, GRAD, UPCAST, LOAD, STORE)                                         \
    CLONES void NAME(Job *job)                                                                               \
    {                                                                                                        \
        const PARAM *source = job->source;                                                                   \
        PARAM *target = job->target;                                                                         \
        REMAINDER *remainder = job->remainder;                                                               \
        float *masters = job->masters;                                                                       \
        const GRAD *grad = job->grad;                                                                        \
        int8_t *exp_avg = job->exp_avg;                                                                      \
        uint8_t *exp_avg_sq = job->exp_avg_sq;                                                               \
        const float grad_scale = (float)job->grad_scale, decay = (float)job->decay, eps = (float)job->eps;   \
        const float beta1 = (float)job->beta1, rest1 = (float)job->rest1, step_size = (float)job->step_size; \
        const float beta2 = (float)job->beta2, rest2 = (float)job->rest2;                                    \
        const float root_scale = (float)job->root_scale;                                                     \
        (void)source, (void)remainder, (void)masters;                                                        \
        for (int64_t start, stop; take(job, &start, &stop);)                                                 \
            for (int64_t first = start; first < stop; first += BLOCK) {                                      \
                float *m_scale = job->exp_avg_scale + first / BLOCK;                                         \
                float *r_scale = job->exp_avg_sq_scale + first / BLOCK;                                      \
                const float m_unit = *m_scale, r_unit = *r_scale;                                            \
                const uint32_t noise = (uint32_t)(job->noise + first);                                       \
                float ms[BLOCK], roots[BLOCK];                                                               \
                uint32_t m_top = bits_of(LEAST), r_top = bits_of(LEAST);                                     \
                for (int k = 0; k < BLOCK; k++) {                                                            \
                    ms[k] = mean_of(exp_avg[first + k], m_unit);                                             \
                    roots[k] = root_of(exp_avg_sq[first + k], r_unit);                                       \
                }                                                                                            \
                for (int k = 0; k < BLOCK; k++) {                                                            \
                    float g = UPCAST(grad[first + k]) * grad_scale;                                          \
                    ms[k] = beta1 * ms[k] + rest1 * g;                                                       \
                    roots[k] = sqrtf(least(beta2 * (roots[k] * roots[k]) + rest2 * (g * g), MOST));          \
                    m_top = larger(m_top, fabsf(ms[k]));                                                     \
                    r_top = larger(r_top, roots[k]);                                                         \
                }                                                                                            \
                INDEPENDENT                                                                                  \
                for (int k = 0; k < BLOCK; k++) {                                                            \
                    int64_t i = first + k;                                                                   \
                    float master = LOAD(i) * decay - step_size * ms[k] / (roots[k] * root_scale + eps);      \
                    STORE(i, master);                                                                        \
                }                                                                                            \
                const float m_per = M_TOP / of_bits(m_top), r_per = R_TOP / of_bits(r_top);                  \
                *m_scale = of_bits(m_top) / M_TOP;                                                           \
                *r_scale = of_bits(r_top) / R_TOP;                                                           \
                for (int k = 0; k < BLOCK; k++) {                                                            \
                    uint32_t random = mix(noise + (uint32_t)k);                                              \
                    exp_avg[first + k] = mean_code(ms[k] * m_per, random & 0xFFFFu);                         \
                    exp_avg_sq[first + k] = root_code(roots[k] * r_per, random >> 16);                       \
                }                                                                                            \
            }                                                                                                \
    }

ADAM_CODES(adam_bf16_bf16_i8, uint16_t, int16_t, uint16_t, upcast, JOIN, SPLIT)
ADAM_CODES(adam_bf16_f32_i8, uint16_t, int16_t, float, SAME, JOIN, SPLIT)
ADAM_CODES(adam_f16_f16_i8, uint16_t, void, uint16_t, upcast_half, MASTER, HALVE)
ADAM_CODES(adam_f16_f32_i8, uint16_t, void, float, SAME, MASTER, HALVE)
ADAM_CODES(adam_f32_f32_i8, float, void, float, SAME, READ, WRITE)

/* Adds `groups` buffers, element by element, into the first of them as a balanced binary tree: neighbors, then
 * neighbors of the sums, and so on. */
#define ADD(NAME, REAL)                                                                                       \
    static CLONES void NAME(const Job *job, int64_t start, int64_t stop)                                      \
    {                                                                                                        \
        REAL *const *grads = (REAL *const *)job->grads;                                                      \
        for (int64_t stride = 1; stride < job->groups; stride *= 2)                                          \
            for (int64_t group = 0; group + stride < job->groups; group += 2 * stride) {                     \
                REAL *to = grads[group] + start;                                                             \
                const REAL *from = grads[group + stride] + start;                                            \
                INDEPENDENT                                                                                  \
                for (int64_t i = 0; i < stop - start; i++)                                                   \
                    to[i] += from[i];                                                                        \
            }                                                                                                \
    }

/* Adds `grads`, and writes the sums of squares of the result, one a chunk, to `target`: element i of a chunk goes to
 * lane i % LANES; lanes are then added in halves. */
#define SQUARE_SUM(NAME, GRAD, UPCAST, ADDED)                                                                      \
    CLONES void NAME(Job *job)                                                                               \
    {                                                                                                        \
        double *sums = job->target;                                                                          \
        for (int64_t start, stop; take(job, &start, &stop);) {                                               \
            ADDED(job, start, stop);                                                                         \
            double lanes[LANES] = {0};                                                                       \
            const GRAD *row = (const GRAD *)job->grad + start;                                               \
            int64_t left = stop - start;                                                                     \
            for (; left >= LANES; left -= LANES, row += LANES)                                               \
                for (int lane = 0; lane < LANES; lane++)                                                     \
                    lanes[lane] += (double)UPCAST(row[lane]) * (double)UPCAST(row[lane]);                      \
            for (int lane = 0; lane < left; lane++)                                                          \
                lanes[lane] += (double)UPCAST(row[lane]) * (double)UPCAST(row[lane]);                          \
            for (int half = LANES / 2; half > 0; half /= 2)                                                  \
                for (int lane = 0; lane < half; lane++)                                                      \
                    lanes[lane] += lanes[lane + half];                                                       \
            sums[start / CHUNK] = lanes[0];                                                                  \
        }                                                                                                    \
    }

#define NOT_ADDED(job, start, stop) ((void)0)

ADD(add_f32, float)
ADD(add_f64, double)
SQUARE_SUM(square_sum_bf16, uint16_t, upcast, NOT_ADDED)
SQUARE_SUM(square_sum_f16, uint16_t, upcast_half, NOT_ADDED)
SQUARE_SUM(square_sum_f32, float, SAME, add_f32)
SQUARE_SUM(square_sum_f64, double, SAME, add_f64)
