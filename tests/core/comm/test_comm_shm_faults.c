#define _GNU_SOURCE
#include "core/base/alloc.h"
#include "core/comm/shm.h"
#include "core/base/wait.h"
#include "ct_processes.h"
#include "ct_rank_values.h"
#include "ct_reduce_to.h"
#include "ct_test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static void
sleep_seconds(double seconds)
{
    const struct timespec time = {(time_t)seconds,
                                  (long)((seconds - floor(seconds)) * 1e9)};
    (void)nanosleep(&time, NULL);
}

/* ---- ranks that differ ----------------------------------------------------------- */

static void
call_differently(ct_comm *comm)
{
    ct_error err;
    double value = 1.0;
    const ct_span one = {&value, 1, CT_F64}, none = {&value, 0, CT_F64};
    const ct_span single = {&value, 1, CT_F32};
    CHECK((comm->rank == 2
               ? ct_comm_barrier(comm, &err)
               : ct_comm_all_reduce(comm, &one, CT_REDUCE_SUM, &err)) == CT_EINVAL);
    CHECK(strstr(err.message, "rank 0 called all_reduce of 1 float64") != NULL);
    CHECK(strstr(err.message, "rank 2 barrier") != NULL);
    CHECK(ct_comm_all_reduce(comm, comm->rank == 1 ? &none : &one, CT_REDUCE_SUM,
                             &err) == CT_EINVAL);
    CHECK(strstr(err.message, "rank 1 all_reduce of 0 float64") != NULL);
    CHECK(ct_comm_all_reduce(comm, comm->rank == 1 ? &single : &one, CT_REDUCE_SUM,
                             &err) == CT_EINVAL);
    CHECK(strstr(err.message, "rank 1 all_reduce of 1 float32") != NULL);
    CHECK(ct_comm_all_gather(comm, &one, &one, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "all_gather over 3 ranks needs 3 times") != NULL);
    CHECK(ct_comm_broadcast(comm, &one, 3, &err) == CT_EINVAL);
    CHECK(reduce_to(comm, &one, CT_REDUCE_SUM, 3, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "root must be in [0, ") != NULL);
    CHECK(strstr(err.message, "root must be in [0, 3), got 3") != NULL);
    CHECK(value == 1.0);
    CHECK(ct_comm_all_reduce(comm, &one, CT_REDUCE_SUM, &err) == CT_OK);
    CHECK(value == 3.0);
}

/* One of many pieces meets one of few. */
static void
call_with_other_lengths(ct_comm *comm)
{
    ct_error err;
    float *values = values_of(comm->rank, LARGEST);
    const ct_span span = {values, comm->rank == 0 ? LARGEST : 2, CT_F32};
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "rank 0 called all_reduce of 300001 float32") != NULL);
    CHECK(values[0] == value_at(comm->rank, 0));
    CHECK(ct_comm_barrier(comm, NULL) == CT_OK);
    ct_free(values);
}

static void
test_ranks_that_disagree_are_all_rejected_and_may_go_on(void)
{
    run_processes(3, 30.0, -1, call_differently);
    run_processes(2, 30.0, -1, call_with_other_lengths);
}

/* ---- ranks that fail ------------------------------------------------------------- */

/* Whether the message tells who fails, in what, and because of whom. */
static bool
tells(const ct_error *err, const ct_comm *comm, const char *what, int culprit)
{
    char begin[80];
    (void)snprintf(begin, sizeof begin, "%s on rank %d of %d: rank %d (process ", what,
                   comm->rank, comm->world_size, culprit);
    return strncmp(err->message, begin, strlen(begin)) == 0;
}

static void
leave_early(ct_comm *comm)
{
    ct_error err;
    float value = 1.0f;
    const ct_span span = {&value, 1, CT_F32};
    CHECK(ct_comm_barrier(comm, NULL) == CT_OK);
    if (comm->rank == 2) {
        return;
    }
    for (int i = 0; i < 2; i++) {
        CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_ECOMM);
        CHECK(tells(&err, comm, "all_reduce", 2));
        CHECK(strstr(err.message, "has left the group") != NULL && value == 1.0f);
    }
}

static void
test_a_rank_that_leaves_makes_the_others_fail(void)
{
    run_processes(4, 30.0, -1, leave_early);
}

static double
seconds_now(void)
{
    struct timespec now;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void
die_early(ct_comm *comm)
{
    ct_error err;
    float *values = values_of(comm->rank, LARGEST);
    const ct_span span = {values, LARGEST, CT_F32};
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, NULL) == CT_OK);
    if (comm->rank == 1) {
        (void)kill(getpid(), SIGKILL);
    }
    const double before = seconds_now();
    for (int i = 0; i < 2; i++) {
        CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, &err) == CT_ECOMM);
        CHECK(tells(&err, comm, "all_reduce", 1));
        CHECK(strstr(err.message, ") died") != NULL);
    }
    CHECK(seconds_now() - before < 60.0); /* of a time-out of 300 */
    ct_free(values);
}

static void
test_a_rank_that_dies_makes_the_others_fail_at_once(void)
{
    run_processes(2, 300.0, 1, die_early);
    run_processes(4, 300.0, 1, die_early);
}

/* A rank dies wherever it may be just then. */
static void
die_any_time(ct_comm *comm)
{
    ct_error err;
    float *values = values_of(comm->rank, LARGEST);
    const ct_span span = {values, LARGEST, CT_F32};
    ct_status status = CT_OK;
    if (comm->rank == 0 && fork() == 0) {
        const pid_t parent = getppid();
        sleep_seconds(0.05);
        (void)kill(parent, SIGKILL);
        _exit(0);
    }
    while (status == CT_OK) {
        status = ct_comm_all_reduce(comm, &span, CT_REDUCE_MAX, &err);
    }
    CHECK(status == CT_ECOMM && tells(&err, comm, "all_reduce", 0));
    CHECK(strstr(err.message, ") died") != NULL);
    ct_free(values);
}

static void
test_a_rank_may_die_in_a_collective(void)
{
    run_processes(3, 30.0, 0, die_any_time);
}

static int to_absent[2]; /* a pipe to the rank that stays away until it is told */

/* Rank 1 comes when both others have given up. */
static void
come_late(ct_comm *comm)
{
    ct_error err;
    char byte = 0;
    for (int i = 0; comm->rank == 1 && i < 2; i++) {
        CHECK(read(to_absent[0], &byte, 1) == 1);
    }
    CHECK(ct_comm_barrier(comm, &err) == CT_ECOMM);
    CHECK(tells(&err, comm, "barrier", 1));
    CHECK(strstr(err.message, "did not come within 2 seconds") != NULL);
    CHECK(write(to_absent[1], &byte, 1) == 1);
}

static void
test_a_rank_that_does_not_come_in_time_breaks_the_group(void)
{
    CHECK(pipe(to_absent) == 0);
    run_processes(3, 2.0, -1, come_late);
}

static bool
interrupt(void)
{
    return true;
}

/* Rank 0 is interrupted while it waits for rank 2. */
static void
interrupt_a_wait(ct_comm *comm)
{
    ct_error err;
    char byte = 0;
    if (comm->rank == 0) {
        ct_interrupt_set(interrupt);
        CHECK(ct_comm_barrier(comm, &err) == CT_EHOST);
        ct_interrupt_set(NULL);
        CHECK(write(to_absent[1], &byte, 1) == 1);
    }
    if (comm->rank == 2) {
        CHECK(read(to_absent[0], &byte, 1) == 1);
    }
    for (int i = 0; i < 2; i++) {
        CHECK(ct_comm_barrier(comm, &err) == CT_ECOMM);
        CHECK(tells(&err, comm, "barrier", 0));
        CHECK(strstr(err.message, ") was interrupted") != NULL);
    }
}

static void
test_an_interrupted_wait_breaks_the_group(void)
{
    CHECK(pipe(to_absent) == 0);
    run_processes(3, 30.0, -1, interrupt_a_wait);
}

static void
be_slow(ct_comm *comm)
{
    float value = 1.0f;
    const ct_span span = {&value, 1, CT_F32};
    if (comm->rank == 0) {
        sleep_seconds(0.2);
    }
    CHECK(ct_comm_all_reduce(comm, &span, CT_REDUCE_SUM, NULL) == CT_OK);
    CHECK(value == 3.0f);
}

static void
test_a_slow_rank_is_waited_for(void)
{
    run_processes(3, 30.0, -1, be_slow);
}

static void
be_quiet(ct_comm *comm)
{
    CHECK(ct_comm_barrier(comm, NULL) == CT_OK);
}

/* ---- meeting --------------------------------------------------------------------- */

static void
test_ranks_that_never_come_are_named(void)
{
    char key[64];
    ct_comm *comm = NULL;
    ct_error err;
    process_key(key, sizeof key);
    CHECK(ct_comm_shm_new(&comm, key, 0, 2, 0.1, &err) == CT_ECOMM);
    CHECK(strstr(err.message, "rank 1 of 2") == err.message);
    CHECK(strstr(err.message, "did not come within 0.1 seconds") != NULL);
    CHECK(ct_comm_shm_new(&comm, key, 1, 2, 0.1, &err) == CT_ECOMM);
    CHECK(strstr(err.message, "rank 0 of 2") == err.message && comm == NULL);
}

static void
test_a_rank_that_waits_for_others_to_join_can_be_interrupted(void)
{
    char key[64];
    ct_comm *comm = NULL;
    process_key(key, sizeof key);
    ct_interrupt_set(interrupt);
    CHECK(ct_comm_shm_new(&comm, key, 0, 2, 30.0, NULL) == CT_EHOST);
    CHECK(ct_comm_shm_new(&comm, key, 1, 2, 30.0, NULL) == CT_EHOST && comm == NULL);
    ct_interrupt_set(NULL);
}

static pid_t
start_rank(const char *key, int rank)
{
    const pid_t process = fork();
    CHECK(process >= 0);
    if (process == 0) {
        be_rank(key, rank, 2, 30.0, be_quiet);
    }
    return process;
}

/* Of a rank 0 that was killed while it waited, nothing is left that is in the way. */
static void
test_a_group_can_be_made_anew_after_a_death(void)
{
    char key[64];
    int ended;
    process_key(key, sizeof key);
    const pid_t killed = start_rank(key, 0);
    sleep_seconds(0.1);
    CHECK(kill(killed, SIGKILL) == 0 && waitpid(killed, &ended, 0) == killed);
    const pid_t first = start_rank(key, 0), second = start_rank(key, 1);
    CHECK(waitpid(first, &ended, 0) == first && ended == 0);
    CHECK(waitpid(second, &ended, 0) == second && ended == 0);
}

static void
check_rejected(const char *key, int rank, int world_size, const char *text)
{
    ct_comm *comm = NULL;
    ct_error err = {.message = ""};
    CHECK(ct_comm_shm_new(&comm, key, rank, world_size, 30.0, &err) == CT_EINVAL);
    CHECK(strstr(err.message, text) != NULL && comm == NULL);
}

/* The child is rank 1 of 3, where this process, rank 0, expects 2. */
static void
test_ranks_that_disagree_about_their_number_are_rejected(void)
{
    char key[64];
    int ended;
    process_key(key, sizeof key);
    const pid_t child = fork();
    if (child == 0) {
        check_rejected(key, 1, 3, "it expects another number of ranks");
        exit(0);
    }
    check_rejected(key, 0, 2, "rank 0 expects 2 ranks");
    CHECK(waitpid(child, &ended, 0) == child && ended == 0);
}

static void
test_bad_arguments_are_named(void)
{
    ct_comm *comm = NULL;
    ct_error err;
    static const double bad_times[] = {0.0, -1.0, INFINITY, NAN};
    check_rejected("test", 0, 0, "world_size must be in [1, 1024], got 0");
    check_rejected("test", 2, 2, "rank must be in [0, 2), got 2");
    char long_key[257];
    memset(long_key, 'k', 256);
    long_key[256] = '\0';
    check_rejected(long_key, 0, 2, "key must have at most 255 bytes, got 256");
    for (int i = 0; i < 4; i++) {
        CHECK(ct_comm_shm_new(&comm, "test", 0, 1, bad_times[i], &err) == CT_EINVAL);
        CHECK(strstr(err.message, "timeout_seconds") == err.message);
    }
    for (size_t n = 1; n <= 4; n++) {
        ct_alloc_fail_after(n);
        CHECK(ct_comm_shm_new(&comm, "test", 0, 1, 1.0, &err) == CT_ENOMEM);
        ct_alloc_fail_after(0);
        CHECK(comm == NULL);
    }
}

int
main(void)
{
    test_ranks_that_disagree_are_all_rejected_and_may_go_on();
    test_a_rank_that_leaves_makes_the_others_fail();
    test_a_rank_that_dies_makes_the_others_fail_at_once();
    test_a_rank_may_die_in_a_collective();
    test_a_rank_that_does_not_come_in_time_breaks_the_group();
    test_an_interrupted_wait_breaks_the_group();
    test_a_rank_that_waits_for_others_to_join_can_be_interrupted();
    test_a_slow_rank_is_waited_for();
    test_ranks_that_never_come_are_named();
    test_a_group_can_be_made_anew_after_a_death();
    test_ranks_that_disagree_about_their_number_are_rejected();
    test_bad_arguments_are_named();
    return 0;
}
