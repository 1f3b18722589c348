#define _GNU_SOURCE
#include "ct_comm_local.h"
#include "core/base/owner.h"
#include "core/base/pages.h"
#include "ct_processes.h"

#include <pthread.h>
#include <string.h>

enum {
    N = 100000
};

/* What the child of a rank does to a group; it ends as a child should. */
typedef void child_fn(ct_comm *comm, ct_pages *memory);

static void
run_child(ct_comm *comm, ct_pages *memory, child_fn *fn)
{
    int ended;
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        (void)alarm(LONGEST_SECONDS);
        fn(comm, memory);
        _exit(0);
    }
    CHECK(waitpid(child, &ended, 0) == child);
    CHECK(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
}

static void
free_all(ct_comm *comm, ct_pages *memory)
{
    ct_pages_free(memory);
    comm->ops->free(comm);
}

static void
check_rejected(ct_status status, const ct_error *err, const char *what)
{
    char owner[64];
    (void)snprintf(owner, sizeof owner, "belongs to process %d; this is process %d,",
                   (int)getppid(), (int)getpid());
    CHECK(status == CT_ECOMM);
    CHECK(strstr(err->message, what) == err->message);
    CHECK(strstr(err->message, owner) != NULL);
}

static void
use_all(ct_comm *comm, ct_pages *memory)
{
    ct_error err;
    ct_work *work = NULL;
    ct_comm *part = NULL;
    ct_pages *more = NULL;
    float value = 1.0f;
    const ct_request sum = {
        .what = CT_ALL_REDUCE, .in = {&value, 1, CT_F32}
    };
    check_rejected(ct_comm_run(comm, &sum, &err), &err, "all_reduce on rank ");
    check_rejected(ct_comm_start(comm, &sum, &work, &err), &err, "all_reduce on rank ");
    check_rejected(ct_comm_barrier(comm, &err), &err, "barrier on rank ");
    check_rejected(ct_comm_split(comm, 0, 0, &part, &err), &err, "all_gather on rank ");
    CHECK(value == 1.0f && work == NULL && part == NULL && more == NULL);
    if (memory != NULL) {
        check_rejected(ct_comm_memory(comm, 4096, &more, &err), &err, "all_reduce on ");
        check_rejected(ct_pages_discard(memory, 0, memory->bytes, &err), &err,
                       "discard: this memory of a group");
    }
}

static void
sum_ones(ct_comm *comm)
{
    static float values[MAX_PROCESSES][N];
    float *own = values[comm->rank];
    const ct_span span = {own, N, CT_F32};
    for (int i = 0; i < N; i++) {
        own[i] = 1.0f;
    }
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, NULL) == CT_OK);
    CHECK(own[0] == (float)comm->world_size && own[N - 1] == own[0]);
}

static void
have_children(ct_comm *comm)
{
    ct_pages *memory = NULL;
    CHECK(ct_comm_memory(comm, N, &memory, NULL) == CT_OK);
    memset(memory->data, 17, N);
    run_child(comm, memory, free_all);
    run_child(comm, memory, use_all);
    CHECK(memory->data[0] == 17 && memory->data[N - 1] == 17);
    sum_ones(comm);
    ct_pages_free(memory);
}

static void
test_children_leave_a_group_of_processes_alone(void)
{
    run_processes(3, 30.0, -1, have_children);
}

/* A collective that is under way in the parent is none of the child's. */
static void
fork_in_a_collective(ct_comm *comm)
{
    static float values[N];
    ct_work *work = NULL;
    const ct_request sum = {
        .what = CT_ALL_REDUCE, .in = {values, N, CT_F32}
    };
    values[N - 1] = 1.0f;
    CHECK(ct_comm_start(comm, &sum, &work, NULL) == CT_OK);
    run_child(comm, NULL, use_all);
    run_child(comm, NULL, free_all);
    CHECK(ct_comm_wait(comm, work, NULL) == CT_OK);
    CHECK(values[N - 1] == (float)comm->world_size);
}

static void
test_children_leave_a_collective_under_way_alone(void)
{
    run_processes(2, 30.0, -1, fork_in_a_collective);
}

static void *
be_thread(void *comm)
{
    sum_ones(comm);
    return NULL;
}

static void
test_children_leave_a_group_of_threads_alone(void)
{
    ct_comm *comms[3];
    pthread_t threads[3];
    CHECK(ct_comm_local_new(comms, 3, 30.0, NULL) == CT_OK);
    run_child(comms[0], NULL, use_all);
    run_child(comms[1], NULL, free_all);
    for (int rank = 0; rank < 3; rank++) {
        CHECK(pthread_create(&threads[rank], NULL, be_thread, comms[rank]) == 0);
    }
    for (int rank = 0; rank < 3; rank++) {
        CHECK(pthread_join(threads[rank], NULL) == 0);
        comms[rank]->ops->free(comms[rank]);
    }
}

/* Nobody else is needed: a group of one works in a child, too. */
static void
work_alone(ct_comm *comm, ct_pages *memory)
{
    float value = 2.0f;
    const ct_span span = {&value, 1, CT_F32};
    CHECK(memory == NULL);
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, NULL) == CT_OK);
    CHECK(value == 2.0f);
}

static void
test_a_group_of_one_works_in_a_child(void)
{
    ct_comm *comm = ct_comm_self_new();
    CHECK(comm != NULL);
    run_child(comm, NULL, work_alone);
    comm->ops->free(comm);
}

int
main(void)
{
    test_children_leave_a_group_of_processes_alone();
    test_children_leave_a_collective_under_way_alone();
    test_children_leave_a_group_of_threads_alone();
    test_a_group_of_one_works_in_a_child();
    return 0;
}
