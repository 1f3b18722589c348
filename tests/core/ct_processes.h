/* Runs one function as the ranks of a group of processes. The includer defines
 * _GNU_SOURCE. */
#ifndef CT_PROCESSES_H
#define CT_PROCESSES_H

#include "core/comm/shm.h"
#include "ct_test.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    MAX_PROCESSES = 8,
    LONGEST_SECONDS = 200 /* a rank that hangs ends with a signal, and the test fails */
};

typedef void process_fn(ct_comm *comm);

static inline void
process_key(char *key, size_t room)
{
    static int n_groups;
    (void)snprintf(key, room, "test %d of %d", n_groups++, (int)getpid());
}

static inline _Noreturn void
be_rank(const char *key, int rank, int world_size, double timeout_seconds,
        process_fn *fn)
{
    ct_comm *comm = NULL;
    ct_error err = {.message = ""};
    (void)alarm(LONGEST_SECONDS);
    if (ct_comm_shm_new(&comm, key, rank, world_size, timeout_seconds, &err) != CT_OK) {
        fprintf(stderr, "rank %d: %s\n", rank, err.message);
        exit(1);
    }
    fn(comm);
    comm->ops->free(comm);
    exit(0);
}

/* All must end well, but for rank `killed` (-1: none), which must have been killed. */
static inline void
run_processes(int world_size, double timeout_seconds, int killed, process_fn *fn)
{
    char key[64];
    pid_t processes[MAX_PROCESSES];
    process_key(key, sizeof key);
    for (int rank = 0; rank < world_size; rank++) {
        processes[rank] = fork();
        CHECK(processes[rank] >= 0);
        if (processes[rank] == 0) {
            be_rank(key, rank, world_size, timeout_seconds, fn);
        }
    }
    for (int rank = 0; rank < world_size; rank++) {
        int ended;
        CHECK(waitpid(processes[rank], &ended, 0) == processes[rank]);
        if (rank == killed) {
            CHECK(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGKILL);
        }
        else {
            CHECK(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
        }
    }
}

#endif
