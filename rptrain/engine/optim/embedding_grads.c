/* Gradient rows of the embedding, summed by token in a wide type, and the sums added to the table's gradient.
 *
 * Every entry takes a Job that the threads of a pool share: each takes the next part until none is left. Each element
 * is summed by one thread in token order, so that results do not depend on who takes what.
 */
#include "../../utils/native.h"

enum { LINE = 64, AHEAD = 2048 }; /* bytes of a cache line; bytes of sums and gradient that are fetched ahead */

typedef struct {
    int64_t next, part;             /* the first part that nobody has taken; columns (add) or rows of one */
    int64_t count, columns, stride; /* tokens (add) or rows; columns; elements between rows of the sums */
    const int64_t *index;           /* of each token its row of the sums (add), of each row where it is added to */
    const int64_t *source;          /* of each row that of the sums (merge, apply) */
    const void *gradient;
    void *sums, *table;
} Job;

/* Sets the bounds of the next part of `count`; 0 when none is left. */
static int take(Job *job, int64_t count, int64_t *start, int64_t *stop)
{
    *start = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED) * job->part;
    *stop = count - *start < job->part ? count : *start + job->part;
    return *start < count;
}

/* To the nearest, ties to even. */
static inline uint16_t narrow(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value != value ? 0x7FC0u : rounded);
}

#define SAME(value) (value)

static inline void fetch(const void *start, int64_t nbytes)
{
    for (int64_t i = 0; i < nbytes; i += LINE)
        __builtin_prefetch((const char *)start + i);
}

/* sums[index[t]] += gradient[t] for each token t in order. A part is columns, as one token may be most tokens;
 * the rows come from anywhere in memory, so those of the tokens to come are fetched ahead. */
#define ADD(NAME, REAL, GRAD, UPCAST)                                                                         \
    CLONES void NAME(Job *job)                                                                               \
    {                                                                                                        \
        const int64_t *index = job->index, count = job->count, columns = job->columns, stride = job->stride; \
        for (int64_t start, stop; take(job, columns, &start, &stop);) {                                      \
            const int64_t width = stop - start, sums_size = width * sizeof(REAL);                            \
            const int64_t size = width * sizeof(GRAD), ahead = 1 + AHEAD / (sums_size + size);               \
            const GRAD *gradient = (const GRAD *)job->gradient + start;                                      \
            REAL *sums = (REAL *)job->sums + start;                                                          \
            for (int64_t t = 0; t < count; t++) {                                                            \
                if (t + ahead < count) {                                                                     \
                    fetch(sums + index[t + ahead] * stride, sums_size);                                      \
                    fetch(gradient + (t + ahead) * columns, size);                                           \
                }                                                                                            \
                const GRAD *restrict from = gradient + t * columns;                                          \
                REAL *restrict to = sums + index[t] * stride;                                                \
                for (int64_t i = 0; i < width; i++)                                                          \
                    to[i] += UPCAST(from[i]);                                                                 \
            }                                                                                                \
        }                                                                                                    \
    }

ADD(rows_add_bf16, float, uint16_t, upcast)
ADD(rows_add_f16, float, uint16_t, upcast_half)
ADD(rows_add_f32, float, float, SAME)
ADD(rows_add_f64, double, double, SAME)

/* sums[index[r]] += sums[source[r]] for each row r; a part is rows, which differ. */
#define MERGE(NAME, REAL)                                                                                     \
    CLONES void NAME(Job *job)                                                                               \
    {                                                                                                        \
        for (int64_t start, stop; take(job, job->count, &start, &stop);)                                     \
            for (int64_t r = start; r < stop; r++) {                                                         \
                const REAL *restrict from = (const REAL *)job->sums + job->source[r] * job->stride;          \
                REAL *restrict to = (REAL *)job->sums + job->index[r] * job->stride;                         \
                for (int64_t i = 0; i < job->columns; i++)                                                   \
                    to[i] += from[i];                                                                         \
            }                                                                                                \
    }

MERGE(rows_merge_f32, float)
MERGE(rows_merge_f64, double)

/* table[index[r]] = table[index[r]] + sums[source[r]], rounded once, for each row r; a part is rows, which differ. */
#define APPLY(NAME, REAL, TABLE, UPCAST, NARROW)                                                              \
    CLONES void NAME(Job *job)                                                                               \
    {                                                                                                        \
        const int64_t columns = job->columns;                                                                \
        for (int64_t start, stop; take(job, job->count, &start, &stop);)                                     \
            for (int64_t r = start; r < stop; r++) {                                                         \
                const REAL *restrict from = (const REAL *)job->sums + job->source[r] * job->stride;                  \
                TABLE *restrict to = (TABLE *)job->table + job->index[r] * columns;                          \
                for (int64_t i = 0; i < columns; i++)                                                        \
                    to[i] = NARROW(UPCAST(to[i]) + from[i]);                                                  \
            }                                                                                                \
    }

APPLY(rows_apply_bf16, float, uint16_t, upcast, narrow)
APPLY(rows_apply_f16, float, uint16_t, upcast_half, narrow_half)
APPLY(rows_apply_f32, float, float, SAME, SAME)
APPLY(rows_apply_f64, double, double, SAME, SAME)

/* table[index[r]] = 0 for each row r of `stride` bytes. */
void rows_clear(Job *job)
{
    for (int64_t start, stop; take(job, job->count, &start, &stop);)
        for (int64_t r = start; r < stop; r++)
            memset((char *)job->table + job->index[r] * job->stride, 0, (size_t)job->stride);
}
