/* Writes the numbers of signals to a pipe, without the interpreter: it runs no handlers while it ends. */
#include <errno.h>
#include <signal.h>
#include <unistd.h>

static volatile int pipe_end;

static void forward(int number)
{
    unsigned char byte = (unsigned char)number;
    int before = errno;
    ssize_t written = write(pipe_end, &byte, 1); /* fails if the pipe is full of signals */
    (void)written;
    errno = before;
}

/* Writes this signal's number to the pipe from now on. All signals share one pipe. Returns 0, or an error number. */
int signals_forward(int number, int pipe)
{
    struct sigaction action = {.sa_handler = forward, .sa_flags = SA_RESTART};
    sigfillset(&action.sa_mask);
    pipe_end = pipe;
    return sigaction(number, &action, NULL) ? errno : 0;
}
