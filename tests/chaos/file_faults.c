/* Library for LD_PRELOAD that makes calls on files fail, wait or write less, and moves the wall clock.

   The rules are in a file of fixed size that every process maps: file_faults.py writes it, with the layout of `struct
   control`. While it holds no rule, a call costs one comparison. A process without MRL_FILE_FAULTS, or one that cannot
   map the file, is left alone. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x6d726c66
#define RULES 16
#define PATTERN 512

/* Bits of `calls`, in the order of CALLS in file_faults.py. */
enum { OPEN, CREATE, READ, WRITE, CLOSE, FSYNC, TRUNCATE, RENAME, LINK, UNLINK, MKDIR, STAT, LIST, LOCK };

struct rule {
    char path[PATTERN];   /* pattern of fnmatch for the absolute path */
    char host[64];        /* pattern for the name of the host */
    char command[128];    /* pattern for the words of the process's command line */
    uint32_t calls;
    int32_t error;        /* errno; 0: the call succeeds */
    uint32_t delay_ms;    /* longest wait before the call */
    uint32_t short_write; /* 1: a write takes only a part of its bytes */
    uint64_t chance;      /* of 2^32 */
};

struct control {
    uint32_t magic;
    uint32_t rules;
    uint64_t seed;
    int64_t clock_ns;     /* what CLOCK_REALTIME is ahead */
    char clock_host[64];
    uint64_t hits;
    struct rule rule[RULES];
};

static struct control none = {MAGIC, 0, 0, 0, "", 0, {{"", "", "", 0, 0, 0, 0, 0}}};
static struct control *control = &none;
static char host[64];
static char command[4096];
static uint64_t drawn;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define ACTIVE __builtin_expect(__atomic_load_n(&control->rules, __ATOMIC_ACQUIRE) != 0, 0)

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("MRL_FILE_FAULTS");
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
    if (file < 0) return;
    void *there = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (there == MAP_FAILED) return;
    gethostname(host, sizeof host - 1);
    int words = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC, 0);
    if (words >= 0) {
        long size = syscall(SYS_read, words, command, sizeof command - 1);
        for (long index = 0; index + 1 < size; index++)
            if (!command[index]) command[index] = ' ';
        syscall(SYS_close, words);
    }
    control = there;
}

/* SplitMix64, a stream for each process. */
static uint64_t draw(void) {
    uint64_t number = __atomic_add_fetch(&drawn, 1, __ATOMIC_RELAXED);
    uint64_t x = control->seed + ((uint64_t)getpid() << 32) + number * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Apply the rules to a call on an absolute path. Return whether the call fails, with errno. */
static int fails(int call, const char *path, size_t *bytes) {
    uint32_t count = __atomic_load_n(&control->rules, __ATOMIC_ACQUIRE);
    for (uint32_t index = 0; index < count && index < RULES; index++) {
        const struct rule *rule = &control->rule[index];
        if (!(rule->calls & (1u << call)) || fnmatch(rule->path, path, 0)) continue;
        if (fnmatch(rule->host, host, 0) || fnmatch(rule->command, command, 0)) continue;
        if ((draw() >> 32) >= rule->chance) continue;
        __atomic_add_fetch(&control->hits, 1, __ATOMIC_RELAXED);
        if (rule->delay_ms) {
            uint64_t ms = draw() % rule->delay_ms + 1;
            struct timespec left = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
            while (syscall(SYS_nanosleep, &left, &left) < 0 && errno == EINTR) {}
        }
        if (rule->short_write && bytes && *bytes > 1) *bytes = 1 + draw() % (*bytes - 1);
        if (rule->error) {
            errno = rule->error;
            return 1;
        }
    }
    return 0;
}

static int fails_at(int call, int folder, const char *path) {
    if (!ACTIVE || !path) return 0;
    char full[PATH_MAX * 2], base[PATH_MAX] = "";
    if (path[0] == '/') return fails(call, path, NULL);
    int before = errno;
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) base[0] = 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        long size = syscall(SYS_readlink, link, base, sizeof base - 1);
        base[size > 0 ? size : 0] = 0;
    }
    snprintf(full, sizeof full, path[0] ? "%s/%s" : "%s", base, path);
    errno = before;
    return fails(call, full, NULL);
}

static int fails_of(int call, int file, size_t *bytes) {
    if (!ACTIVE) return 0;
    char link[64], path[PATH_MAX];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    long size = syscall(SYS_readlink, link, path, sizeof path - 1);
    errno = before;
    if (size <= 0 || path[0] != '/') return 0; /* a socket, a pipe */
    path[size] = 0;
    return fails(call, path, bytes);
}

/* Opening */

static int fails_to_open(int folder, const char *path, int flags) {
    return fails_at(OPEN, folder, path) || ((flags & (O_CREAT | O_WRONLY | O_RDWR)) && fails_at(CREATE, folder, path));
}

#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    }

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        MODE \
        return fails_to_open(AT_FDCWD, path, flags) ? -1 : real(path, flags, mode); \
    }
#define OPENS_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        MODE \
        return fails_to_open(folder, path, flags) ? -1 : real(folder, path, flags, mode); \
    }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

#define FOPENS(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(name); \
        int flags = mode && (mode[0] != 'r' || strchr(mode, '+')) ? O_WRONLY : 0; \
        return fails_to_open(AT_FDCWD, path, flags) ? NULL : real(path, mode); \
    }
FOPENS(fopen)
FOPENS(fopen64)

DIR *opendir(const char *path) {
    REAL(opendir);
    return fails_at(LIST, AT_FDCWD, path) ? NULL : real(path);
}

DIR *fdopendir(int file) {
    REAL(fdopendir);
    return fails_of(LIST, file, NULL) ? NULL : real(file);
}

/* On descriptors */

ssize_t read(int file, void *data, size_t size) {
    REAL(read);
    return fails_of(READ, file, NULL) ? -1 : real(file, data, size);
}

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    return fails_of(WRITE, file, &size) ? -1 : real(file, data, size);
}

#define READS_AT(name, offset) \
    ssize_t name(int file, void *data, size_t size, offset at) { \
        REAL(name); \
        return fails_of(READ, file, NULL) ? -1 : real(file, data, size, at); \
    }
READS_AT(pread, off_t)
READS_AT(pread64, off64_t)

#define WRITES_AT(name, offset) \
    ssize_t name(int file, const void *data, size_t size, offset at) { \
        REAL(name); \
        return fails_of(WRITE, file, &size) ? -1 : real(file, data, size, at); \
    }
WRITES_AT(pwrite, off_t)
WRITES_AT(pwrite64, off64_t)

ssize_t readv(int file, const struct iovec *parts, int count) {
    REAL(readv);
    return fails_of(READ, file, NULL) ? -1 : real(file, parts, count);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    return fails_of(WRITE, file, NULL) ? -1 : real(file, parts, count);
}

#define SENDS(name, offset) \
    ssize_t name(int out, int in, offset *at, size_t size) { \
        REAL(name); \
        return fails_of(READ, in, NULL) || fails_of(WRITE, out, &size) ? -1 : real(out, in, at, size); \
    }
SENDS(sendfile, off_t)
SENDS(sendfile64, off64_t)

/* A failed close has closed the descriptor: it reports a write that failed in the meantime. */
int close(int file) {
    REAL(close);
    int bad = fails_of(CLOSE, file, NULL), error = errno, done = real(file);
    if (bad) errno = error;
    return bad ? -1 : done;
}

#define SYNCS(name) \
    int name(int file) { \
        REAL(name); \
        return fails_of(FSYNC, file, NULL) ? -1 : real(file); \
    }
SYNCS(fsync)
SYNCS(fdatasync)

#define TRUNCATES(name, offset) \
    int f##name(int file, offset size) { \
        REAL(f##name); \
        return fails_of(TRUNCATE, file, NULL) ? -1 : real(file, size); \
    } \
    int name(const char *path, offset size) { \
        REAL(name); \
        return fails_at(TRUNCATE, AT_FDCWD, path) ? -1 : real(path, size); \
    }
TRUNCATES(truncate, off_t)
TRUNCATES(truncate64, off64_t)

int flock(int file, int operation) {
    REAL(flock);
    return fails_of(LOCK, file, NULL) ? -1 : real(file, operation);
}

/* On names */

int rename(const char *old, const char *new) {
    REAL(rename);
    return fails_at(RENAME, AT_FDCWD, new) ? -1 : real(old, new);
}

int renameat(int from, const char *old, int to, const char *new) {
    REAL(renameat);
    return fails_at(RENAME, to, new) ? -1 : real(from, old, to, new);
}

int link(const char *old, const char *new) {
    REAL(link);
    return fails_at(LINK, AT_FDCWD, new) ? -1 : real(old, new);
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
    REAL(linkat);
    return fails_at(LINK, to, new) ? -1 : real(from, old, to, new, flags);
}

int symlink(const char *target, const char *path) {
    REAL(symlink);
    return fails_at(LINK, AT_FDCWD, path) ? -1 : real(target, path);
}

int symlinkat(const char *target, int folder, const char *path) {
    REAL(symlinkat);
    return fails_at(LINK, folder, path) ? -1 : real(target, folder, path);
}

#define REMOVES(name) \
    int name(const char *path) { \
        REAL(name); \
        return fails_at(UNLINK, AT_FDCWD, path) ? -1 : real(path); \
    }
REMOVES(unlink)
REMOVES(rmdir)
REMOVES(remove)

int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    return fails_at(UNLINK, folder, path) ? -1 : real(folder, path, flags);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return fails_at(MKDIR, AT_FDCWD, path) ? -1 : real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat);
    return fails_at(MKDIR, folder, path) ? -1 : real(folder, path, mode);
}

#define LOOKS(name, type) \
    int name(const char *path, struct type *there) { \
        REAL(name); \
        return fails_at(STAT, AT_FDCWD, path) ? -1 : real(path, there); \
    }
LOOKS(stat, stat)
LOOKS(lstat, stat)
LOOKS(stat64, stat64)
LOOKS(lstat64, stat64)

#define LOOKS_AT(name, type) \
    int name(int folder, const char *path, struct type *there, int flags) { \
        REAL(name); \
        return fails_at(STAT, folder, path) ? -1 : real(folder, path, there, flags); \
    }
LOOKS_AT(fstatat, stat)
LOOKS_AT(fstatat64, stat64)

#define LOOKS_OF(name, type) \
    int name(int file, struct type *there) { \
        REAL(name); \
        return fails_of(STAT, file, NULL) ? -1 : real(file, there); \
    }
LOOKS_OF(fstat, stat)
LOOKS_OF(fstat64, stat64)

int access(const char *path, int mode) {
    REAL(access);
    return fails_at(STAT, AT_FDCWD, path) ? -1 : real(path, mode);
}

/* The wall clock */

static int64_t ahead_ns(void) {
    int64_t ns = __atomic_load_n(&control->clock_ns, __ATOMIC_RELAXED);
    return ns && !fnmatch(control->clock_host, host, 0) ? ns : 0;
}

static void move(struct timespec *moment, int64_t ns) {
    int64_t nanos = moment->tv_nsec + ns % 1000000000;
    moment->tv_sec += ns / 1000000000 + (nanos >= 1000000000) - (nanos < 0);
    moment->tv_nsec = nanos + 1000000000 * ((nanos < 0) - (nanos >= 1000000000));
}

int clock_gettime(clockid_t clock, struct timespec *moment) {
    REAL(clock_gettime);
    int done = real(clock, moment);
    int64_t ns = ahead_ns();
    if (ns && !done && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) move(moment, ns);
    return done;
}

int gettimeofday(struct timeval *restrict moment, void *restrict zone) {
    REAL(gettimeofday);
    int done = real(moment, zone);
    int64_t ns = ahead_ns();
    if (ns && !done) moment->tv_sec += ns / 1000000000;
    return done;
}

time_t time(time_t *moment) {
    REAL(time);
    time_t now = real(NULL) + ahead_ns() / 1000000000;
    if (moment) *moment = now;
    return now;
}

/* The kernel ends a wait by its own clock. A moment of the monotonic clock is less than a billion seconds. */
static const struct timespec *of_kernel(const struct timespec *moment, struct timespec *moved) {
    int64_t ns = ahead_ns();
    if (!ns || !moment || moment->tv_sec < 1000000000) return moment;
    *moved = *moment;
    move(moved, -ns);
    return moved;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict moment) {
    static __typeof__(&pthread_cond_timedwait) real;
    if (!real) real = (__typeof__(real))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec moved;
    return real(condition, mutex, of_kernel(moment, &moved));
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict moment) {
    REAL(pthread_cond_clockwait);
    struct timespec moved;
    return real(condition, mutex, clock, of_kernel(moment, &moved));
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict moment) {
    REAL(sem_timedwait);
    struct timespec moved;
    return real(semaphore, of_kernel(moment, &moved));
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict moment) {
    REAL(sem_clockwait);
    struct timespec moved;
    return real(semaphore, clock, of_kernel(moment, &moved));
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict moment) {
    REAL(pthread_mutex_timedlock);
    struct timespec moved;
    return real(mutex, of_kernel(moment, &moved));
}
