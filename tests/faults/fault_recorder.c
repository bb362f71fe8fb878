/* Records what a process writes below one folder, what of it is synced, and what it says on sockets.
 *
 * Preloaded with LD_PRELOAD. FAULT_RECORDER_LOG names the log, FAULT_RECORDER_UNDER the folder. Each
 * event is one header and its bytes, appended once the call is over; a sync writes a second event
 * before it begins, since only what was written before that is covered. Reading: fault_writes.py.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, DSYNC_WRITE, SYNC_BEGIN, SYNC_END, RENAME, SEND, NAME, FOLDER_SYNC };

struct event {
    uint32_t kind, length;
    uint64_t file, offset;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static const char *under;
static size_t under_length;

static int enabled(void)
{
    if (!under) {
        under = getenv("FAULT_RECORDER_UNDER");
        if (!under)
            under = "";
        under_length = strlen(under);
    }
    return under_length > 0;
}

static void append(uint32_t kind, uint64_t file, uint64_t offset, const struct iovec *parts, int count, size_t length)
{
    int saved = errno;
    struct event event = {kind, (uint32_t)length, file, offset};
    pthread_mutex_lock(&lock);
    if (log_fd < 0)
        log_fd = syscall(SYS_openat, AT_FDCWD, getenv("FAULT_RECORDER_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    char *buffer = malloc(sizeof event + length);
    memcpy(buffer, &event, sizeof event);
    size_t at = sizeof event, left = length;
    for (int i = 0; i < count && left; i++) {
        size_t take = parts[i].iov_len < left ? parts[i].iov_len : left;
        memcpy(buffer + at, parts[i].iov_base, take);
        at += take, left -= take;
    }
    for (size_t done = 0; done < at;) {
        long wrote = syscall(SYS_write, log_fd, buffer + done, at - done);
        if (wrote <= 0)
            abort();
        done += wrote;
    }
    free(buffer);
    pthread_mutex_unlock(&lock);
    errno = saved;
}

/* The path of a descriptor where it lies below the folder; its inode number in *file, else 0. */
static uint64_t watched(int fd, int *folder)
{
    char link[64], path[PATH_MAX];
    struct stat info;
    if (!enabled() || fd == log_fd)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < (ssize_t)under_length || strncmp(path, under, under_length) || fstat(fd, &info))
        return 0;
    if (folder)
        *folder = S_ISDIR(info.st_mode);
    return S_ISREG(info.st_mode) || (folder && *folder) ? info.st_ino : 0;
}

static void wrote(int fd, const struct iovec *parts, int count, off_t offset, ssize_t done)
{
    uint64_t file = done > 0 ? watched(fd, NULL) : 0;
    if (file)
        append(fcntl(fd, F_GETFL) & O_DSYNC ? DSYNC_WRITE : WRITE, file, offset, parts, count, done);
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define PWRITE(name) \
    ssize_t name(int fd, const void *data, size_t size, off_t offset) \
    { \
        REAL(name); \
        ssize_t done = real(fd, data, size, offset); \
        struct iovec part = {(void *)data, size}; \
        wrote(fd, &part, 1, offset, done); \
        return done; \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define PWRITEV(name) \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) \
    { \
        REAL(name); \
        ssize_t done = real(fd, parts, count, offset); \
        wrote(fd, parts, count, offset, done); \
        return done; \
    }
PWRITEV(pwritev)
PWRITEV(pwritev64)

ssize_t write(int fd, const void *data, size_t size)
{
    REAL(write);
    ssize_t done = real(fd, data, size);
    struct iovec part = {(void *)data, size};
    if (done > 0 && enabled())
        wrote(fd, &part, 1, lseek(fd, 0, SEEK_CUR) - done, done);
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    REAL(writev);
    ssize_t done = real(fd, parts, count);
    if (done > 0 && enabled())
        wrote(fd, parts, count, lseek(fd, 0, SEEK_CUR) - done, done);
    return done;
}

#define SYNC(name) \
    int name(int fd) \
    { \
        REAL(name); \
        int folder = 0; \
        uint64_t file = watched(fd, &folder); \
        if (file && !folder) \
            append(SYNC_BEGIN, file, 0, NULL, 0, 0); \
        int failed = real(fd); \
        if (file && !failed) \
            append(folder ? FOLDER_SYNC : SYNC_END, file, 0, NULL, 0, 0); \
        return failed; \
    }
SYNC(fdatasync)
SYNC(fsync)

/* A file's name: when it is opened, and when it changes. Both paths, NUL between them. */
static void named(uint32_t kind, const char *before, const char *after, uint64_t file)
{
    char names[2 * PATH_MAX + 2];
    int length = snprintf(names, sizeof names, "%s%c%s", before, 0, after);
    struct iovec part = {names, length};
    append(kind, file, 0, &part, 1, length);
}

static void opened(int fd)
{
    char link[64], path[PATH_MAX];
    uint64_t file = fd >= 0 ? watched(fd, NULL) : 0;
    if (!file)
        return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length > 0) {
        path[length] = 0;
        named(NAME, path, "", file);
    }
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        int fd = real(path, flags, va_arg(more, int)); \
        va_end(more); \
        opened(fd); \
        return fd; \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) \
    { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        int fd = real(folder, path, flags, va_arg(more, int)); \
        va_end(more); \
        opened(fd); \
        return fd; \
    }
OPENAT(openat)
OPENAT(openat64)

int rename(const char *before, const char *after)
{
    REAL(rename);
    int failed = real(before, after);
    struct stat info;
    if (!failed && enabled() && !strncmp(after, under, under_length) && !stat(after, &info) && S_ISREG(info.st_mode))
        named(RENAME, before, after, info.st_ino);
    return failed;
}

static void said(int fd, const struct iovec *parts, int count, ssize_t done)
{
    if (done > 0 && enabled())
        append(SEND, fd, 0, parts, count, done);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    REAL(sendmsg);
    /* Said before it is on its way: what comes later in the log cannot have come before it. */
    ssize_t whole = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++)
        whole += message->msg_iov[i].iov_len;
    said(fd, message->msg_iov, message->msg_iovlen, whole);
    return real(fd, message, flags);
}

ssize_t send(int fd, const void *data, size_t size, int flags)
{
    REAL(send);
    struct iovec part = {(void *)data, size};
    said(fd, &part, 1, size);
    return real(fd, data, size, flags);
}
