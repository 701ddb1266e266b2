/* Ends the process when it makes no progress for too long, or after the third signal, whoever holds the interpreter
 * lock. Python prepares what each of the two ends writes.
 *
 * One thread waits for the numbers of signals, which the interpreter's handler writes to a pipe, and for the time limit.
 */
#define _GNU_SOURCE /* pthread_timedjoin_np */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { STALLED, INTERRUPTED, ENDS };
enum { SIGNALS = 3, PERIOD = 500, TAIL = 65536 }; /* PERIOD: milliseconds between two readings of the clock */
#define LATE 1000000000 /* nanoseconds by which a look is late if the whole process was stopped: SIGSTOP, a paused host */
#define SHOW_CURSOR "\x1b[?25h"
#define TOGETHER 200000000 /* nanoseconds within which signals count once, as in utils/signals.py */
#define WRITING 1000000000                      /* nanoseconds that an end may write: a dead disk may never return */

typedef struct {
    int code;
    char *message, *path, *head, *tail; /* the message is for stderr; head, time and tail make the record at `path` */
} End;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static End ends[ENDS];
static int64_t limit, stacks; /* nanoseconds without progress until the end, and until stacks are shown; 0: never */
static int stack_signal;      /* its handler shows the stacks of all threads */
static volatile int64_t *progress;
static int signals, running;

static int64_t now(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void put(int file, const char *text, size_t size)
{
    while (size > 0) {
        ssize_t written = write(file, text, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return;
        text += written, size -= (size_t)written;
    }
}

/* Cuts off a last line without its newline, so that the record begins a line. */
static void cut(int file)
{
    char part[TAIL];
    off_t size = lseek(file, 0, SEEK_END), start = size > TAIL ? size - TAIL : 0;
    ssize_t count = size > 0 ? pread(file, part, (size_t)(size - start), start) : 0;
    while (count > 0 && part[count - 1] != '\n')
        count--;
    if (count > 0 || start == 0)
        if (ftruncate(file, start + (count > 0 ? count : 0)))
            return;
}

static void *write_end(void *given)
{
    const End *end = given;
    for (int file = 1; file <= 2; file++) /* a bar may hide the cursor */
        if (isatty(file))
            put(file, SHOW_CURSOR, strlen(SHOW_CURSOR));
    put(2, end->message, strlen(end->message));
    if (end->path) {
        int file = open(end->path, O_RDWR | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (file >= 0) {
            size_t size = strlen(end->head) + strlen(end->tail) + 64;
            char *line = malloc(size);
            int64_t time = now(CLOCK_REALTIME);
            cut(file);
            if (line) {
                int length = snprintf(line, size, "%s%lld.%06lld%s\n", end->head, (long long)(time / 1000000000),
                                      (long long)(time % 1000000000 / 1000), end->tail);
                put(file, line, (size_t)length);
            }
        }
    }
    return NULL;
}

static void finish(int kind) /* holds the mutex from now on: nothing is prepared any more */
{
    pthread_t writer;
    struct timespec until;
    int64_t time = now(CLOCK_REALTIME) + WRITING;
    until.tv_sec = time / 1000000000, until.tv_nsec = time % 1000000000;
    if (!pthread_create(&writer, NULL, write_end, &ends[kind]))
        pthread_timedjoin_np(writer, NULL, &until);
    _exit(ends[kind].code);
}

static void count_signal(unsigned char number)
{
    static int64_t last; /* when a signal was counted; 0: never */
    int64_t time = now(CLOCK_MONOTONIC);
    if (number != SIGINT && number != SIGTERM && number != SIGHUP)
        return;
    if (last && time - last < TOGETHER)
        return;
    last = time;
    signals++;
}

/* Moves the time of the last progress on by the time for which the process was stopped. */
static void leave_out(int64_t stopped, int64_t time)
{
    int64_t before = *progress, after = before + stopped;
    if (after > time)
        after = time;
    __atomic_compare_exchange_n(progress, &before, after, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); /* else: progress */
}

static void *watch(void *given)
{
    int pipe = (int)(intptr_t)given, shown = 0;
    int64_t looked = now(CLOCK_MONOTONIC);
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    for (;;) {
        struct pollfd wanted = {pipe, POLLIN, 0};
        unsigned char numbers[64];
        if (poll(&wanted, 1, PERIOD) > 0) {
            ssize_t count = read(pipe, numbers, sizeof numbers);
            if (count == 0 || (count < 0 && errno != EINTR && errno != EAGAIN))
                return NULL; /* the other end is closed */
            for (ssize_t i = 0; i < count; i++)
                count_signal(numbers[i]);
        }
        int64_t time = now(CLOCK_MONOTONIC);
        if (time - looked > PERIOD * 1000000LL + LATE)
            leave_out(time - looked - PERIOD * 1000000LL, time);
        looked = time;
        pthread_mutex_lock(&mutex);
        if (signals >= SIGNALS && ends[INTERRUPTED].message)
            finish(INTERRUPTED);
        int64_t idle = time - *progress;
        shown = shown && idle > stacks;
        if (stacks && idle > stacks && !shown) {
            shown = 1;
            kill(getpid(), stack_signal); /* they are written until the next look */
        } else if (limit && ends[STALLED].message && idle > limit)
            finish(STALLED);
        pthread_mutex_unlock(&mutex);
    }
}

static void set(char **field, const char *text)
{
    free(*field);
    *field = text ? strdup(text) : NULL;
}

/* Begins to watch: the numbers of signals from a pipe, and the time of the last progress, in nanoseconds of the
 * monotonic clock. Returns 0, or an error number. Once for a process.
 */
int watchdog_start(int pipe, int64_t *last_progress)
{
    pthread_t thread;
    if (running)
        return EALREADY;
    progress = last_progress;
    int error = pthread_create(&thread, NULL, watch, (void *)(intptr_t)pipe);
    running = !error;
    return error;
}

/* Sets how an end of this kind goes. Without a path it writes no record. */
void watchdog_prepare(int kind, int code, const char *message, const char *path, const char *head, const char *tail)
{
    pthread_mutex_lock(&mutex);
    End *end = &ends[kind];
    end->code = code;
    set(&end->message, message), set(&end->path, path), set(&end->head, head), set(&end->tail, tail);
    pthread_mutex_unlock(&mutex);
}

/* Sets the seconds without progress after which the process is ended, and those after which it gets a signal whose
 * handler shows stacks; 0: never.
 */
void watchdog_limit(double seconds, double until_stacks, int number)
{
    pthread_mutex_lock(&mutex);
    limit = (int64_t)(seconds * 1e9), stacks = (int64_t)(until_stacks * 1e9), stack_signal = number;
    pthread_mutex_unlock(&mutex);
}
