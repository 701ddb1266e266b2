/* Preloaded, refuses what some kernels and file systems do, the latter for paths that contain $REFUSED. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int refused(int descriptor) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strstr(path, getenv("REFUSED")) != NULL;
}

static int refuse(int code) {
    errno = code;
    return -1;
}

int fsync(int descriptor) {
    struct stat found;
    if (refused(descriptor) && fstat(descriptor, &found) == 0 && S_ISDIR(found.st_mode)) return refuse(EINVAL);
    return NEXT(fsync)(descriptor);
}

int flock(int descriptor, int operation) {
    return refused(descriptor) ? refuse(ENOLCK) : ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(descriptor, operation);
}

int chmod(const char *path, mode_t mode) {
    return strstr(path, getenv("REFUSED")) ? refuse(EPERM) : NEXT(chmod)(path, mode);
}

int madvise(void *address, size_t length, int advice) {
    return refuse(EINVAL);
}

void *mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset) {
    if (descriptor >= 0 && refused(descriptor)) {
        errno = ENODEV;
        return MAP_FAILED;
    }
    return NEXT(mmap)(address, length, protection, flags, descriptor, offset);
}

void *mmap64(void *address, size_t length, int protection, int flags, int descriptor, off_t offset)
    __attribute__((alias("mmap")));
