/* Fused Adam with decoupled weight decay: one pass that reads the gradient, the moments and the master weight
 * and writes the moments and the new parameter.
 *
 * Every entry takes a Job that the threads of a pool share: each takes the next chunk until none is left. A chunk's
 * result does not depend on who takes it.
 */
#include "native.h"

#include <math.h>

#if defined(__GNUC__) && !defined(__clang__)
#define INDEPENDENT _Pragma("GCC ivdep") /* source may be target: the same element, never another one */
#else
#define INDEPENDENT
#endif

enum { CHUNK = 65536, LANES = 512 };

typedef struct {
    int64_t next, count; /* the first chunk that nobody has taken; elements */
    const void *source, *grad;
    void *target, *remainder, *exp_avg, *exp_avg_sq;
    double grad_scale, beta1, beta2, rest1, rest2, decay, step_size, root_scale, eps;
} Job;

/* Sets the bounds of the next chunk; 0 when none is left. */
static int take(Job *job, int64_t *start, int64_t *stop)
{
    *start = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED) * CHUNK;
    *stop = job->count - *start < CHUNK ? job->count : *start + CHUNK;
    return *start < job->count;
}

/* The remainder is the signed distance from the parameter, rounded half up, to the master weight's bits. */
static inline float join(uint16_t param, int16_t remainder)
{
    uint32_t bits = ((uint32_t)param << 16) + (uint32_t)(int32_t)remainder;
    float master;
    memcpy(&master, &bits, sizeof master);
    return master;
}

static inline void split(float master, uint16_t *param, int16_t *remainder)
{
    uint32_t bits;
    memcpy(&bits, &master, sizeof bits);
    *param = (uint16_t)((bits + 0x8000u) >> 16);
    *remainder = (int16_t)bits;
}

#define SAME(value) (value)
#define JOIN(i) join(source[i], remainder[i])
#define SPLIT(i, master) split(master, &target[i], &remainder[i])
#define READ(i) source[i]
#define WRITE(i, master) target[i] = (master)

#define ADAM(NAME, REAL, ROOT, PARAM, REMAINDER, GRAD, WIDEN, LOAD, STORE)                                   \
    CLONES void NAME(Job *job)                                                                               \
    {                                                                                                        \
        const PARAM *source = job->source;                                                                   \
        PARAM *target = job->target;                                                                         \
        REMAINDER *remainder = job->remainder;                                                               \
        const GRAD *grad = job->grad;                                                                        \
        REAL *exp_avg = job->exp_avg, *exp_avg_sq = job->exp_avg_sq;                                         \
        const REAL grad_scale = (REAL)job->grad_scale, decay = (REAL)job->decay, eps = (REAL)job->eps;       \
        const REAL beta1 = (REAL)job->beta1, rest1 = (REAL)job->rest1, step_size = (REAL)job->step_size;     \
        const REAL beta2 = (REAL)job->beta2, rest2 = (REAL)job->rest2, root_scale = (REAL)job->root_scale;   \
        (void)remainder;                                                                                     \
        for (int64_t start, stop; take(job, &start, &stop);) {                                               \
            INDEPENDENT                                                                                      \
            for (int64_t i = start; i < stop; i++) {                                                         \
                REAL g = WIDEN(grad[i]) * grad_scale;                                                        \
                REAL m = beta1 * exp_avg[i] + rest1 * g;                                                     \
                REAL v = beta2 * exp_avg_sq[i] + rest2 * (g * g);                                            \
                exp_avg[i] = m;                                                                              \
                exp_avg_sq[i] = v;                                                                           \
                REAL master = LOAD(i) * decay - step_size * m / (ROOT(v) * root_scale + eps);                \
                STORE(i, master);                                                                            \
            }                                                                                                \
        }                                                                                                    \
    }

ADAM(adam_bf16_bf16, float, sqrtf, uint16_t, int16_t, uint16_t, widen, JOIN, SPLIT)
ADAM(adam_bf16_f32, float, sqrtf, uint16_t, int16_t, float, SAME, JOIN, SPLIT)
ADAM(adam_f32_f32, float, sqrtf, float, void, float, SAME, READ, WRITE)
ADAM(adam_f64_f64, double, sqrt, double, void, double, SAME, READ, WRITE)

/* Sums of squares of `grad`, one a chunk, into `target`: element i of a chunk goes to lane i % LANES; lanes
 * are then added in halves. */
#define SQUARE_SUM(NAME, GRAD, WIDEN)                                                                        \
    CLONES void NAME(Job *job)                                                                               \
    {                                                                                                        \
        double *sums = job->target;                                                                          \
        for (int64_t start, stop; take(job, &start, &stop);) {                                               \
            double lanes[LANES] = {0};                                                                       \
            const GRAD *row = (const GRAD *)job->grad + start;                                               \
            int64_t left = stop - start;                                                                     \
            for (; left >= LANES; left -= LANES, row += LANES)                                               \
                for (int lane = 0; lane < LANES; lane++)                                                     \
                    lanes[lane] += (double)WIDEN(row[lane]) * (double)WIDEN(row[lane]);                      \
            for (int lane = 0; lane < left; lane++)                                                          \
                lanes[lane] += (double)WIDEN(row[lane]) * (double)WIDEN(row[lane]);                          \
            for (int half = LANES / 2; half > 0; half /= 2)                                                  \
                for (int lane = 0; lane < half; lane++)                                                      \
                    lanes[lane] += lanes[lane + half];                                                       \
            sums[start / CHUNK] = lanes[0];                                                                  \
        }                                                                                                    \
    }

SQUARE_SUM(square_sum_bf16, uint16_t, widen)
SQUARE_SUM(square_sum_f32, float, SAME)
SQUARE_SUM(square_sum_f64, double, SAME)

/* The yardstick: the traffic of adam_bf16_bf16 with next to no arithmetic. The buffers' contents are lost. */
CLONES void traffic_bf16_bf16(Job *job)
{
    const uint16_t *source = job->source, *grad = job->grad;
    uint16_t *target = job->target, *remainder = job->remainder;
    uint32_t *exp_avg = job->exp_avg, *exp_avg_sq = job->exp_avg_sq;
    for (int64_t start, stop; take(job, &start, &stop);) {
        INDEPENDENT
        for (int64_t i = start; i < stop; i++) {
            target[i] = source[i] ^ grad[i];
            remainder[i] = remainder[i] ^ 1;
            exp_avg[i] = exp_avg[i] ^ 1;
            exp_avg_sq[i] = exp_avg_sq[i] ^ 1;
        }
    }
}
