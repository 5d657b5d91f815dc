/* Sees the calls of a process that change files below one directory, writes them down, and makes one of them fail.

   Loaded with LD_PRELOAD; tests/crash/recorder.py compiles it, and says what is written down. It does nothing until
   `crash_arm` is called. Calls are counted over all threads of the process; a lock that processes share gives the
   calls of all ranks of a job one order. With CRASH_FSYNC=0 in the environment no fsync reaches the disk: that makes no
   difference to a process that is killed, and a disk needs milliseconds for each. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, KILL_BEFORE, KILL_AFTER, FAIL, SHORT }; /* as in recorder.py */
enum { SPACE = 1, ANY = 2 };                            /* which calls a failure that stays concerns */

static struct {
    volatile int on;
    char root[PATH_MAX];
    int log, position, kind, error, sticky, who;
    int count, fired;
} the;

static pthread_mutex_t *turn; /* in memory that a fork shares */

/* What a call is about. */
struct call {
    const char *name;
    char one[PATH_MAX], two[PATH_MAX]; /* paths; empty where there is none */
    int takes_space;                   /* whether a full disk can refuse it */
    long long offset, size;            /* of a write, or the new size of a file */
    const void *data;                  /* what is written */
    int fd;                            /* of the file, or -1 */
};

static void *real(void **cache, const char *name) {
    if (!*cache) *cache = dlsym(RTLD_NEXT, name);
    if (!*cache) abort();
    return *cache;
}

#define REAL(name) ((__typeof__(&name))real(&cache, #name))

__attribute__((constructor)) static void begin(void) {
    pthread_mutexattr_t how;
    turn = mmap(NULL, sizeof *turn, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_init(&how);
    pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST); /* a process may be killed while it has it */
    pthread_mutexattr_settype(&how, PTHREAD_MUTEX_ERRORCHECK);
    pthread_mutex_init(turn, &how);
}

static void lock(void) {
    if (pthread_mutex_lock(turn) == EOWNERDEAD) pthread_mutex_consistent(turn);
}

static int below(const char *path) {
    size_t n = strlen(the.root);
    return !strncmp(path, the.root, n) && (path[n] == '/' || path[n] == 0);
}

static int path_of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
    return n > 0;
}

static void path_at(int dir, const char *name, char *path) {
    char base[PATH_MAX] = "";
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return;
    }
    if (dir == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) base[0] = 0;
    } else {
        path_of_fd(dir, base);
    }
    if (snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) abort();
}

static void put(const char *text, size_t n) {
    while (n > 0) {
        ssize_t done = syscall(SYS_write, the.log, text, n);
        if (done <= 0) abort();
        text += done, n -= done;
    }
}

/* One line: who, number, call, inode, offset, size, result, error, path, path, data in hex; tabs between them. */
static void note(const struct call *c, int number, long long result, int error) {
    struct stat status;
    unsigned long long inode = 0;
    char line[3 * PATH_MAX];
    size_t bytes = c->data && result > 0 ? (size_t)result : 0;
    if (c->fd >= 0 ? fstat(c->fd, &status) == 0 : lstat(c->two[0] ? c->two : c->one, &status) == 0)
        inode = status.st_ino;
    int n = snprintf(line, sizeof line, "%d\t%d\t%s\t%llu\t%lld\t%lld\t%lld\t%d\t%s\t%s\t", the.who, number, c->name,
                     inode, c->offset, c->size, result, result < 0 ? error : 0, c->one, c->two);
    char *hex = malloc(n + 2 * bytes + 1);
    memcpy(hex, line, n);
    for (size_t i = 0; i < bytes; i++) {
        unsigned char byte = ((const unsigned char *)c->data)[i];
        hex[n + 2 * i] = "0123456789abcdef"[byte >> 4];
        hex[n + 2 * i + 1] = "0123456789abcdef"[byte & 15];
    }
    hex[n + 2 * bytes] = '\n';
    put(hex, n + 2 * bytes + 1);
    free(hex);
}

/* Whether a call is watched. If so the lock is held, and `finish` has to be called. *fail says that the call is not
   to be made, *most how many bytes a write may write. */
static int start(struct call *c, int *number, int *fail, size_t *most) {
    *fail = 0;
    if (!the.on || !(below(c->one) || below(c->two))) return 0;
    lock();
    *number = the.count++;
    int here = *number == the.position, later = the.sticky && *number > the.position;
    if (the.position < 0 || !(here || later)) return 1;
    if (the.kind == FAIL) {
        /* unlink and rmdir need no space, and so does nobody who makes a file smaller. */
        if (the.error == ENOSPC && !c->takes_space) return 1;
        the.fired = *fail = 1;
    } else if (the.kind == SHORT && here && c->data && c->size > 1) {
        the.fired = 1, *most = c->size / 2;
    } else if (the.kind == KILL_BEFORE) {
        note(c, *number, -1, EINTR);
        syscall(SYS_kill, getpid(), SIGKILL);
        for (;;) pause();
    }
    return 1;
}

static void finish(struct call *c, int number, long long result) {
    int error = errno;
    note(c, number, result, error);
    if (number == the.position && the.kind == KILL_AFTER) {
        syscall(SYS_kill, getpid(), SIGKILL);
        for (;;) pause();
    }
    pthread_mutex_unlock(turn);
    errno = error;
}

/* The body of a call: `make` is the call itself. */
#define CALL(type, make)                                                                                               \
    type result;                                                                                                       \
    int number, fail;                                                                                                  \
    size_t most = (size_t)-1;                                                                                          \
    if (!start(&c, &number, &fail, &most)) return make;                                                                \
    (void)most;                                                                                                        \
    if (fail)                                                                                                          \
        result = -1, errno = the.error;                                                                                \
    else                                                                                                               \
        result = make;                                                                                                 \
    finish(&c, number, result);                                                                                        \
    return result

static struct call called(const char *name, int takes_space) {
    struct call c = {.name = name, .takes_space = takes_space, .fd = -1};
    return c;
}

static struct call on_fd(const char *name, int fd, int takes_space) {
    struct call c = called(name, takes_space);
    if (the.on) path_of_fd(fd, c.one), c.fd = fd;
    return c;
}

static struct call on_path(const char *name, int dir, const char *path, int takes_space) {
    struct call c = called(name, takes_space);
    if (the.on) path_at(dir, path, c.one);
    return c;
}

/* --- what the tests call --- */

void crash_arm(const char *root, int log, int who, int position, int kind, int error, int sticky) {
    snprintf(the.root, sizeof the.root, "%s", root);
    the.log = log, the.who = who, the.position = position, the.kind = kind, the.error = error, the.sticky = sticky;
    the.count = the.fired = 0;
    the.on = 1;
}

int crash_disarm(void) {
    the.on = 0;
    return the.fired;
}

/* Writes down that the program has got so far. */
void crash_mark(const char *text) {
    struct call c = called("mark", 0);
    snprintf(c.one, sizeof c.one, "%s", text);
    lock();
    note(&c, -1, 0, 0);
    pthread_mutex_unlock(turn);
}

/* --- the calls --- */

#define OPEN(symbol, declared, dir, takes_dir)                                                                         \
    int symbol declared {                                                                                              \
        static void *cache;                                                                                            \
        mode_t mode = 0;                                                                                               \
        if (flags & (O_CREAT | __O_TMPFILE)) {                                                                         \
            va_list rest;                                                                                              \
            va_start(rest, flags);                                                                                     \
            mode = va_arg(rest, mode_t);                                                                               \
            va_end(rest);                                                                                              \
        }                                                                                                              \
        if (!(flags & (O_CREAT | O_TRUNC))) return takes_dir(flags, mode);                                             \
        struct call c = on_path(flags & O_TRUNC ? "truncate-open" : "create", dir, path, 1);                           \
        CALL(int, takes_dir(flags, mode));                                                                             \
    }

#define OPEN_(f, m) REAL(open)(path, f, m)
#define OPEN64_(f, m) REAL(open64)(path, f, m)
#define OPENAT_(f, m) REAL(openat)(fd, path, f, m)
#define OPENAT64_(f, m) REAL(openat64)(fd, path, f, m)
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, OPEN_)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, OPEN64_)
OPEN(openat, (int fd, const char *path, int flags, ...), fd, OPENAT_)
OPEN(openat64, (int fd, const char *path, int flags, ...), fd, OPENAT64_)

int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return open64(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static void writes(struct call *c, const void *data, size_t size, long long offset) {
    c->data = data, c->size = size, c->offset = offset;
}

#define MIN(a, b) ((a) < (b) ? (a) : (b))

ssize_t write(int fd, const void *data, size_t n) {
    static void *cache;
    if (!the.on) return REAL(write)(fd, data, n);
    struct call c = on_fd("write", fd, 1);
    if (below(c.one)) writes(&c, data, n, lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR));
    CALL(ssize_t, REAL(write)(fd, data, MIN(n, most)));
}

#define PWRITE(symbol)                                                                                                 \
    ssize_t symbol(int fd, const void *data, size_t n, off_t offset) {                                                 \
        static void *cache;                                                                                            \
        struct call c = on_fd("write", fd, 1);                                                                         \
        writes(&c, data, n, offset);                                                                                   \
        CALL(ssize_t, REAL(symbol)(fd, data, MIN(n, most), offset));                                                   \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

/* The vectored writes go out piece by piece: a caller sees a write that was shorter than it asked for, as it may. */
ssize_t writev(int fd, const struct iovec *v, int n) {
    static void *cache;
    char path[PATH_MAX];
    if (!the.on || !path_of_fd(fd, path) || !below(path) || n < 1) return REAL(writev)(fd, v, n);
    return write(fd, v->iov_base, v->iov_len);
}

#define PWRITEV(symbol)                                                                                                \
    ssize_t symbol(int fd, const struct iovec *v, int n, off_t offset) {                                               \
        static void *cache;                                                                                            \
        char path[PATH_MAX];                                                                                           \
        if (!the.on || !path_of_fd(fd, path) || !below(path) || n < 1) return REAL(symbol)(fd, v, n, offset);          \
        return pwrite(fd, v->iov_base, v->iov_len, offset);                                                            \
    }
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define SYNC(symbol)                                                                                                   \
    int symbol(int fd) {                                                                                               \
        static void *cache;                                                                                            \
        static int skip = -1;                                                                                          \
        if (skip < 0) skip = getenv("CRASH_FSYNC") && !strcmp(getenv("CRASH_FSYNC"), "0");                             \
        struct call c = on_fd("fsync", fd, 1);                                                                         \
        CALL(int, skip ? 0 : REAL(symbol)(fd));                                                                        \
    }
SYNC(fsync)
SYNC(fdatasync)

#define RESIZE(symbol)                                                                                                 \
    int symbol(int fd, off_t size) {                                                                                   \
        static void *cache;                                                                                            \
        struct call c = on_fd("ftruncate", fd, 0);                                                                     \
        c.size = size;                                                                                                 \
        CALL(int, REAL(symbol)(fd, size));                                                                             \
    }
RESIZE(ftruncate)
RESIZE(ftruncate64)

#define ALLOCATE(symbol)                                                                                               \
    int symbol(int fd, int mode, off_t offset, off_t size) {                                                           \
        static void *cache;                                                                                            \
        struct call c = on_fd("fallocate", fd, 1);                                                                     \
        c.offset = offset, c.size = size;                                                                              \
        CALL(int, REAL(symbol)(fd, mode, offset, size));                                                               \
    }
ALLOCATE(fallocate)
ALLOCATE(fallocate64)

int rename(const char *old, const char *new) {
    static void *cache;
    struct call c = on_path("rename", AT_FDCWD, old, 1);
    if (the.on) path_at(AT_FDCWD, new, c.two);
    CALL(int, REAL(rename)(old, new));
}

int renameat(int from, const char *old, int to, const char *new) {
    static void *cache;
    struct call c = on_path("rename", from, old, 1);
    if (the.on) path_at(to, new, c.two);
    CALL(int, REAL(renameat)(from, old, to, new));
}

int renameat2(int from, const char *old, int to, const char *new, unsigned int flags) {
    static void *cache;
    struct call c = on_path(flags & RENAME_EXCHANGE ? "exchange" : "rename", from, old, 1);
    if (the.on) path_at(to, new, c.two);
    CALL(int, REAL(renameat2)(from, old, to, new, flags));
}

int unlink(const char *path) {
    static void *cache;
    struct call c = on_path("unlink", AT_FDCWD, path, 0);
    CALL(int, REAL(unlink)(path));
}

int unlinkat(int fd, const char *path, int flags) {
    static void *cache;
    struct call c = on_path(flags & AT_REMOVEDIR ? "rmdir" : "unlink", fd, path, 0);
    CALL(int, REAL(unlinkat)(fd, path, flags));
}

int rmdir(const char *path) {
    static void *cache;
    struct call c = on_path("rmdir", AT_FDCWD, path, 0);
    CALL(int, REAL(rmdir)(path));
}

int mkdir(const char *path, mode_t mode) {
    static void *cache;
    struct call c = on_path("mkdir", AT_FDCWD, path, 1);
    CALL(int, REAL(mkdir)(path, mode));
}

int mkdirat(int fd, const char *path, mode_t mode) {
    static void *cache;
    struct call c = on_path("mkdir", fd, path, 1);
    CALL(int, REAL(mkdirat)(fd, path, mode));
}

int link(const char *old, const char *new) {
    static void *cache;
    struct call c = on_path("link", AT_FDCWD, old, 1);
    if (the.on) path_at(AT_FDCWD, new, c.two);
    CALL(int, REAL(link)(old, new));
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
    static void *cache;
    struct call c = on_path("link", from, old, 1);
    if (the.on) path_at(to, new, c.two);
    CALL(int, REAL(linkat)(from, old, to, new, flags));
}

int symlink(const char *target, const char *path) {
    static void *cache;
    struct call c = on_path("symlink", AT_FDCWD, path, 1);
    CALL(int, REAL(symlink)(target, path));
}

int symlinkat(const char *target, int fd, const char *path) {
    static void *cache;
    struct call c = on_path("symlink", fd, path, 1);
    CALL(int, REAL(symlinkat)(target, fd, path));
}
