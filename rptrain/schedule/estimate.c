/* The recurrence of estimate.py over the slots of some steps, in the same order of operations and to the same bits. */

typedef struct {
    double time, span, hop, ready; /* of a stage: a micro-batch; from the first end to the last; handing over; update */
    double down, last, sums, read; /* of its gradients */
    double summation;              /* of its gradients over all processes */
    double moves;                  /* 1 if its gradients take time, otherwise 0 */
    double sums_up;                /* 1 if it is summed over all processes, otherwise 0 */
} Stage;

static double later(double a, double b)
{
    return b > a ? b : a;
}

/* `work` has room for 3 n + (groups + 1) stages + steps + 2 numbers and begins with zeros; at the end, its first n are
   when each device is free. `ends` gets the end of each step. */
void schedule_steps(long n, long rounds, long groups, long lag, long steps, long stages, const Stage *of,
                    double updates, double summation, double *work, double *ends)
{
    double *free = work, *gone = free + n, *freed = gone + n, *arrived = freed + n;
    double *left = arrived + stages, *optimizer = left + groups * stages;
    const double infinity = __builtin_inf();
    long device = 0;
    double end = 0.0;
    optimizer[0] = 0.0;
    optimizer[1] = -updates;
    for (long step = 0; step < steps; step++) {
        double version = lag == 0 || step > 1 ? optimizer[step] : -infinity;
        for (long r = 0; r < rounds; r++) {
            double *of_group = left + (r % groups) * stages;
            double first = end = 0.0;
            for (long s = 0; s < stages; s++) {
                const Stage *stage = of + s;
                double start = free[device];
                if (stage->moves) {
                    start = later(start, freed[device]);
                    if (r >= groups)
                        start = later(start, of_group[s]) + stage->sums;
                }
                start = later(start, first + stage->hop);
                start = later(start, version + stage->ready);
                first = start + stage->time;
                end = end + stage->hop + stage->time;
                end = later(end, first + stage->span);
                if (stage->moves) {
                    freed[device] = gone[device];
                    double read = step ? optimizer[step + 1] + stage->read : 0.0;
                    of_group[s] = gone[device] = later(later(end, gone[device]) + stage->down, read + stage->last);
                    arrived[s] = gone[device];
                } else
                    arrived[s] = end;
                free[device] = end;
                device = device + 1 < n ? device + 1 : 0;
            }
        }
        double summed = optimizer[step + 1] + updates;
        if (summation)
            for (long s = 0; s < stages; s++)
                if (of[s].sums_up)
                    summed = later(summed, arrived[s]) + of[s].summation;
        double idle = end;
        if (lag == 0) {
            idle = summation ? summed : 0.0;
            for (long d = 0; d < n; d++)
                idle = later(later(idle, free[d]), gone[d]);
        }
        ends[step] = idle;
        double done = later(idle, summed);
        for (long d = 0; d < n; d++)
            done = later(done, gone[d]);
        optimizer[step + 2] = done;
    }
}
