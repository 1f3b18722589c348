/* The rendezvous of a segment: rank 0 listens on an abstract socket named after the key
 * and answers each rank's hello with the memory's descriptor or a reason to stop.
 *
 * Abstract sockets have no permissions, so both sides ask the kernel for the other's
 * user. The rendezvous ends with the joining: the socket is closed, and the descriptor
 * of the memory serves the locks below alone. */
#define _GNU_SOURCE /* memfd_create, struct ucred */

#include "core/base/segment.h"

#include "core/base/wait.h"
#include "core/base/io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    MAGIC = 0x63745337, /* "ctS7": raised when the layout of shared data changes */
};

/* A rank's first message to rank 0. */
typedef struct hello {
    uint32_t magic;
    int32_t rank, world_size;
    uint64_t bytes;
} hello;

typedef enum answer {
    NO_ANSWER,
    WELCOME,
    OTHER_KIND, /* another release of this library */
    OTHER_SIZE, /* another world size or segment size */
    RANK_TAKEN,
} answer;

typedef struct rendezvous {
    const char *key;
    int rank, world_size;
    size_t bytes;
    double timeout_seconds;
    ct_deadline deadline;
} rendezvous;

/* ---- rendezvous ------------------------------------------------------------------ */

/* FNV-1a: shortens a name of any length. */
static uint64_t
hash_text(const char *text)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *text != '\0'; text++) {
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    }
    return hash;
}

/* A leading zero byte makes the name abstract: no file, gone with its socket. The user
 * is a part of the name: another user's job of the same key is another rendezvous. The
 * hash fits every key into a name of limited length. */
static socklen_t
socket_address(const char *key, struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    const int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1,
                           "ctrainer-%u-%016llx", (unsigned)geteuid(),
                           (unsigned long long)hash_text(key));
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static bool
is_our_user(int socket_fd)
{
    struct ucred peer;
    socklen_t n = sizeof peer;
    return getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) == 0 &&
           peer.uid == geteuid();
}

static ct_status
fail_system(const rendezvous *m, const char *doing, ct_error *err)
{
    return ct_fail_io(err, errno, doing, m->key);
}

/* SEQPACKET keeps the bounds of messages: a hello arrives whole or not at all. */
static ct_status
open_socket(const rendezvous *m, int *fd, ct_error *err)
{
    *fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    return *fd < 0 ? fail_system(m, "make a socket for the ranks of", err) : CT_OK;
}

/* Sends the answer, with the descriptor for WELCOME. */
static bool
send_answer(int to, answer reply, int fd)
{
    const int32_t word = (int32_t)reply;
    struct iovec data = {(void *)&word, sizeof word};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    if (reply == WELCOME) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    /* MSG_NOSIGNAL: a rank that has gone away must not end this process by SIGPIPE. */
    return sendmsg(to, &message, MSG_NOSIGNAL) == (ssize_t)sizeof word;
}

/* *fd: the received descriptor, or -1. */
static answer
receive_answer(int from, int *fd)
{
    int32_t word = 0;
    struct iovec data = {&word, sizeof word};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    struct msghdr message = {.msg_iov = &data,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    *fd = -1;
    if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof word) {
        return NO_ANSWER;
    }
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_type == SCM_RIGHTS) {
        memcpy(fd, CMSG_DATA(header), sizeof *fd);
    }
    return (answer)word;
}

/* ---- rank 0 ---------------------------------------------------------------------- */

static answer
judge(const rendezvous *m, const hello *h, const bool *has_come)
{
    if (h->magic != MAGIC) {
        return OTHER_KIND;
    }
    if (h->world_size != m->world_size || h->bytes != m->bytes || h->rank < 1 ||
        h->rank >= m->world_size) {
        return OTHER_SIZE;
    }
    return has_come[h->rank] ? RANK_TAKEN : WELCOME;
}

static ct_status
fail_judged(const rendezvous *m, const hello *h, answer reply, ct_error *err)
{
    if (reply == RANK_TAKEN) {
        return ct_fail(err, CT_EINVAL, "two processes of %s say that they are rank %d",
                       m->key, (int)h->rank);
    }
    if (reply == OTHER_KIND) {
        return ct_fail(err, CT_EINVAL,
                       "a rank of %s runs another release of ctrainer; use one on all",
                       m->key);
    }
    return ct_fail(err, CT_EINVAL,
                   "the ranks of %s disagree: rank 0 expects %d ranks and %zu bytes, "
                   "rank %d expects %d ranks and %zu bytes",
                   m->key, m->world_size, m->bytes, (int)h->rank, (int)h->world_size,
                   (size_t)h->bytes);
}

/* Receives one rank's hello and answers. A visitor of another user, or one that goes
 * away, is ignored. */
static ct_status
serve(const rendezvous *m, int visitor, int memory, bool *has_come, ct_error *err)
{
    hello h;
    if (!is_our_user(visitor)) {
        return CT_OK;
    }
    const ct_status heard = ct_deadline_poll(m->deadline, visitor, err);
    if (heard == CT_EHOST) {
        return heard;
    }
    if (heard != CT_OK || recv(visitor, &h, sizeof h, 0) != (ssize_t)sizeof h) {
        return CT_OK;
    }
    const answer reply = judge(m, &h, has_come);
    const bool sent = send_answer(visitor, reply, memory);
    if (reply != WELCOME) {
        return fail_judged(m, &h, reply, err);
    }
    /* A rank that went away before the answer may come once more. */
    has_come[h.rank] = sent;
    return CT_OK;
}

/* Rank 0, the caller, never visits itself. */
static int
first_missing(const rendezvous *m, const bool *has_come)
{
    int rank = 1;
    while (rank < m->world_size && has_come[rank]) {
        rank++;
    }
    return rank;
}

static ct_status
serve_all(const rendezvous *m, int server, int memory, ct_error *err)
{
    bool has_come[CT_SEGMENT_MOST_RANKS] = {false};
    ct_status status = CT_OK;
    while (status == CT_OK && first_missing(m, has_come) < m->world_size) {
        status = ct_deadline_poll(m->deadline, server, err);
        if (status == CT_EHOST) {
            return status;
        }
        if (status != CT_OK) {
            return ct_fail(
                err, CT_ECOMM, "rank %d of %d of %s did not come within %g seconds",
                first_missing(m, has_come), m->world_size, m->key, m->timeout_seconds);
        }
        const int visitor = accept4(server, NULL, NULL, SOCK_CLOEXEC);
        if (visitor >= 0) {
            status = serve(m, visitor, memory, has_come, err);
            (void)close(visitor);
        }
    }
    return status;
}

static ct_status
receive_ranks(const rendezvous *m, int memory, ct_error *err)
{
    struct sockaddr_un address;
    const socklen_t n = socket_address(m->key, &address);
    int server = -1;
    ct_status status = open_socket(m, &server, err);
    /* The backlog has a place for every rank, as all may come before the first
     * accept. */
    if (status == CT_OK && (bind(server, (struct sockaddr *)&address, n) != 0 ||
                            listen(server, m->world_size) != 0)) {
        status = errno == EADDRINUSE
                     ? ct_fail(err, CT_EINVAL,
                               "two processes of %s say that they are rank 0", m->key)
                     : fail_system(m, "wait for the ranks of", err);
    }
    if (status == CT_OK) {
        status = serve_all(m, server, memory, err);
    }
    if (server >= 0) {
        (void)close(server);
    }
    return status;
}

static ct_status
make_memory(const rendezvous *m, int *fd, ct_error *err)
{
    *fd = memfd_create("ctrainer", MFD_CLOEXEC);
    if (*fd < 0 || ftruncate(*fd, (off_t)m->bytes) != 0) {
        return fail_system(m, "make memory for the ranks of", err);
    }
    return m->world_size == 1 ? CT_OK : receive_ranks(m, *fd, err);
}

/* ---- the other ranks ------------------------------------------------------------- */

/* Tries until rank 0 listens. */
static ct_status
visit(const rendezvous *m, int *fd, ct_error *err)
{
    struct sockaddr_un address;
    const socklen_t n = socket_address(m->key, &address);
    ct_status status = open_socket(m, fd, err);
    while (status == CT_OK && connect(*fd, (struct sockaddr *)&address, n) != 0) {
        /* No listener yet, or no place in the backlog: both pass. */
        if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) {
            return fail_system(m, "reach rank 0 of", err);
        }
        if (ct_interrupted()) {
            return ct_fail(err, CT_EHOST, "interrupted");
        }
        if (ct_deadline_left(m->deadline) <= 0.0) {
            return ct_fail(err, CT_ECOMM,
                           "rank 0 of %d of %s did not come within %g seconds",
                           m->world_size, m->key, m->timeout_seconds);
        }
        ct_deadline_nap(m->deadline, 2e-3);
    }
    if (status == CT_OK && !is_our_user(*fd)) {
        return ct_fail(err, CT_ECOMM, "another user's process answers for %s", m->key);
    }
    return status;
}

static ct_status
ask_for_memory(const rendezvous *m, int server, int *memory, ct_error *err)
{
    const hello h = {.magic = MAGIC,
                     .rank = m->rank,
                     .world_size = m->world_size,
                     .bytes = m->bytes};
    if (send(server, &h, sizeof h, MSG_NOSIGNAL) != (ssize_t)sizeof h) {
        return ct_fail(err, CT_ECOMM, "rank 0 of %s went away", m->key);
    }
    const ct_status heard = ct_deadline_poll(m->deadline, server, err);
    if (heard == CT_EHOST) {
        return heard;
    }
    if (heard != CT_OK) {
        return ct_fail(err, CT_ECOMM, "rank 0 of %s does not answer rank %d", m->key,
                       m->rank);
    }
    const answer reply = receive_answer(server, memory);
    if (reply == WELCOME && *memory >= 0) {
        return CT_OK;
    }
    return reply == NO_ANSWER
               ? ct_fail(err, CT_ECOMM, "rank 0 of %s went away", m->key)
               : ct_fail(err, CT_EINVAL,
                         "rank 0 of %s rejects rank %d of %d: %s (its error says more)",
                         m->key, m->rank, m->world_size,
                         reply == RANK_TAKEN   ? "there is one already"
                         : reply == OTHER_SIZE ? "it expects another number of ranks"
                                               : "it runs another release");
}

static ct_status
fetch_memory(const rendezvous *m, int *fd, ct_error *err)
{
    int server = -1;
    struct stat about;
    ct_status status = visit(m, &server, err);
    if (status == CT_OK) {
        status = ask_for_memory(m, server, fd, err);
    }
    /* Touching a mapping behind the end of a shorter file would kill the process. */
    if (status == CT_OK &&
        (fstat(*fd, &about) != 0 || about.st_size != (off_t)m->bytes)) {
        status = ct_fail(err, CT_ECOMM, "rank 0 of %s shares no memory of %zu bytes",
                         m->key, m->bytes);
    }
    if (server >= 0) {
        (void)close(server);
    }
    return status;
}

/* ---- the segment ----------------------------------------------------------------- */

ct_status
ct_segment_join(ct_segment *segment, const char *key, int rank, int world_size,
                size_t bytes, double timeout_seconds, ct_error *err)
{
    const rendezvous m = {
        .key = key,
        .rank = rank,
        .world_size = world_size,
        .bytes = bytes,
        .timeout_seconds = timeout_seconds,
        .deadline = ct_deadline_after(timeout_seconds),
    };
    int fd = -1;
    ct_status status =
        rank == 0 ? make_memory(&m, &fd, err) : fetch_memory(&m, &fd, err);
    if (status == CT_OK) {
        void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base != MAP_FAILED) {
            *segment = (ct_segment){.base = base, .bytes = bytes, .fd = fd};
            return CT_OK;
        }
        status = fail_system(&m, "map the memory of", err);
    }
    if (fd >= 0) {
        (void)close(fd);
    }
    return status;
}

/* The close releases this process's lock, so that the other ranks see the departure. */
void
ct_segment_leave(ct_segment *segment)
{
    if (segment->base != NULL) {
        (void)munmap(segment->base, segment->bytes);
        (void)close(segment->fd);
        *segment = (ct_segment){.fd = -1};
    }
}

/* ---- processes alive ------------------------------------------------------------- */

/* A lock of fcntl belongs to the process: a forked child has none, and the kernel
 * releases the lock at the end of the process, waited for or not. */
static struct flock
place_of(int rank)
{
    return (struct flock){
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
}

ct_status
ct_segment_hold(const ct_segment *segment, int rank, ct_error *err)
{
    struct flock place = place_of(rank);
    if (fcntl(segment->fd, F_SETLK, &place) != 0) {
        return ct_fail_io(err, errno, "hold this rank's place in", "shared memory");
    }
    return CT_OK;
}

bool
ct_segment_is_held(const ct_segment *segment, int rank)
{
    struct flock place = place_of(rank);
    return fcntl(segment->fd, F_GETLK, &place) != 0 || place.l_type != F_UNLCK;
}
