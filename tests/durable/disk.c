/* A disk that fails on demand, for one process and the journal's files alone: preloaded, it stands between SQLite and libc.
   The page that DISK names says how; see disk.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { WELL, FULL, READ_ONLY, SLOW, TORN };

struct page {
    long mode, pid, hits, delay_ms;
};

static struct page *page(void) {
    static struct page *found;
    if (!found) {
        const char *path = getenv("DISK");
        int fd = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDWR) : -1;
        if (fd < 0)
            _exit(99);
        found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
    }
    return found;
}

static int ours(const char *path) { return strstr(path, "journal.db") != NULL; }

static int watched(int fd) {
    char name[64], path[512];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(name, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return ours(path);
}

static int refused(int fd) {
    long mode = page()->mode;
    if ((mode != FULL && mode != READ_ONLY) || !watched(fd))
        return 0;
    page()->hits++;
    errno = mode == FULL ? ENOSPC : EROFS;
    return 1;
}

static void wait_for_disk(int fd) {
    if (page()->mode != SLOW)
        return;
    if (watched(fd))
        page()->hits++;
    struct timespec rest = {page()->delay_ms / 1000, page()->delay_ms % 1000 * 1000000};
    while (nanosleep(&rest, &rest) && errno == EINTR)
        ;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *from, size_t size) {
    REAL(write);
    return refused(fd) ? -1 : real(fd, from, size);
}

ssize_t pwrite64(int fd, const void *from, size_t size, off64_t at) {
    REAL(pwrite64);
    if (refused(fd))
        return -1;
    if (page()->mode == TORN && size > 1000 && watched(fd)) {
        page()->mode = WELL;
        page()->hits++;
        real(fd, from, size / 2, at);
        kill(getpid(), SIGKILL);
    }
    return real(fd, from, size, at);
}

ssize_t pwrite(int fd, const void *from, size_t size, off_t at) { return pwrite64(fd, from, size, at); }

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    return refused(fd) ? -1 : real(fd, size);
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int fsync(int fd) {
    REAL(fsync);
    wait_for_disk(fd);
    return real(fd);
}

int fdatasync(int fd) {
    REAL(fdatasync);
    wait_for_disk(fd);
    return real(fd);
}

static int open_refused(const char *path, int flags) {
    long mode = page()->mode;
    int writes = (flags & O_ACCMODE) != O_RDONLY;
    if (!ours(path) || !writes || (mode != READ_ONLY && !(mode == FULL && (flags & O_CREAT) && access(path, F_OK))))
        return 0;
    page()->hits++;
    errno = mode == FULL ? ENOSPC : EROFS;
    return 1;
}

int open64(const char *path, int flags, ...) {
    REAL(open64);
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
    va_end(more);
    return open_refused(path, flags) ? -1 : real(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
    va_end(more);
    return open64(path, flags, mode);
}
