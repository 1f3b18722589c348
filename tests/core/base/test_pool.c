#define _GNU_SOURCE /* setenv, fork, setrlimit */
#include "core/base/pool.h"
#include "ct_test.h"

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __SANITIZE_THREAD__
#define TSAN 1
#else
#define TSAN 0
#endif
#ifdef __SANITIZE_ADDRESS__
#define ASAN 1
#else
#define ASAN 0
#endif

enum {
    MOST = 5000
};

typedef struct tally {
    atomic_int runs[MOST];
} tally;

static void
count_run(void *arg, size_t batch)
{
    tally *t = arg;
    atomic_fetch_add_explicit(&t->runs[batch], 1, memory_order_relaxed);
}

static void
check_each_batch_runs_once(size_t n_batches)
{
    tally t = {0};
    ct_pool_run(count_run, &t, n_batches);
    for (size_t i = 0; i < MOST; i++) {
        CHECK(t.runs[i] == (i < n_batches));
    }
}

static void
test_each_batch_runs_once_for_any_number_of_threads(void)
{
    static const size_t threads[] = {1, 2, 3, 8, 2, 1};
    static const size_t batches[] = {0, 1, 2, 3, 7, 100, MOST};
    for (size_t t = 0; t < sizeof threads / sizeof *threads; t++) {
        CHECK(ct_pool_set_threads(threads[t], NULL) == CT_OK);
        CHECK(ct_pool_threads() == threads[t]);
        for (size_t b = 0; b < sizeof batches / sizeof *batches; b++) {
            check_each_batch_runs_once(batches[b]);
        }
    }
}

/* What a batch writes without any atomic has to be there when the run has ended. */
static void
square(void *arg, size_t batch)
{
    size_t *values = arg;
    values[batch] = batch * batch;
}

static void
run_many_small_jobs(size_t jobs)
{
    size_t values[16];
    for (size_t job = 0; job < jobs; job++) {
        const size_t n = 2 + job % 15;
        memset(values, 0, sizeof values);
        ct_pool_run(square, values, n);
        for (size_t i = 0; i < n; i++) {
            CHECK(values[i] == i * i);
        }
    }
}

static void
test_many_small_jobs_in_a_row_see_their_own_results(void)
{
    CHECK(ct_pool_set_threads(4, NULL) == CT_OK);
    run_many_small_jobs(20000);
}

static void *
small_jobs_thread(void *arg)
{
    (void)arg;
    run_many_small_jobs(3000);
    return NULL;
}

static void
test_callers_on_several_threads_do_not_disturb_each_other(void)
{
    pthread_t callers[4];
    CHECK(ct_pool_set_threads(3, NULL) == CT_OK);
    for (size_t i = 0; i < 4; i++) {
        CHECK(pthread_create(&callers[i], NULL, small_jobs_thread, NULL) == 0);
    }
    for (size_t n = 1; n <= 40; n++) {
        CHECK(ct_pool_set_threads(1 + n % 5, NULL) == CT_OK);
    }
    for (size_t i = 0; i < 4; i++) {
        CHECK(pthread_join(callers[i], NULL) == 0);
    }
}

static atomic_bool running, changed;

/* Gives the change a fifth of a second to come too early. */
static void
hold(void *arg, size_t batch)
{
    if (batch == 0) {
        atomic_store(&running, true);
        for (int i = 0; i < 200 && !atomic_load(&changed); i++) {
            (void)usleep(1000);
        }
        *(bool *)arg = atomic_load(&changed);
    }
}

static void *
change_threads(void *arg)
{
    (void)arg;
    while (!atomic_load(&running)) {
        (void)usleep(100);
    }
    CHECK(ct_pool_set_threads(4, NULL) == CT_OK);
    atomic_store(&changed, true);
    return NULL;
}

static void
test_the_number_of_threads_changes_between_jobs(void)
{
    pthread_t changer;
    bool too_early = true;
    CHECK(ct_pool_set_threads(3, NULL) == CT_OK);
    CHECK(pthread_create(&changer, NULL, change_threads, NULL) == 0);
    ct_pool_run(hold, &too_early, 4);
    CHECK(!too_early && pthread_join(changer, NULL) == 0);
    CHECK(atomic_load(&changed) && ct_pool_threads() == 4);
}

static void
run_nested(void *arg, size_t batch)
{
    size_t inner[8] = {0};
    ct_pool_run(square, inner, 8);
    ((size_t *)arg)[batch] = inner[7];
}

static void
test_a_job_inside_a_batch_runs_on_that_thread(void)
{
    size_t outer[20] = {0};
    CHECK(ct_pool_set_threads(3, NULL) == CT_OK);
    ct_pool_run(run_nested, outer, 20);
    for (size_t i = 0; i < 20; i++) {
        CHECK(outer[i] == 49);
    }
}

static void
in_child(void (*body)(void))
{
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        body();
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void
use_pool(void)
{
    CHECK(ct_pool_threads() == 4);
    run_many_small_jobs(500);
    check_each_batch_runs_once(MOST);
    CHECK(ct_pool_set_threads(2, NULL) == CT_OK);
    run_many_small_jobs(500);
}

static void
test_a_forked_child_has_a_pool_of_its_own(void)
{
    CHECK(ct_pool_set_threads(4, NULL) == CT_OK);
    run_many_small_jobs(10);
    in_child(use_pool);
    run_many_small_jobs(10);
}

static atomic_bool stop_jobs;

static void *
jobs_until_stopped(void *arg)
{
    (void)arg;
    while (!atomic_load(&stop_jobs)) {
        run_many_small_jobs(10);
    }
    return NULL;
}

static void
test_a_fork_beside_a_running_job_finds_the_pool_at_rest(void)
{
    pthread_t other;
    CHECK(ct_pool_set_threads(4, NULL) == CT_OK);
    CHECK(pthread_create(&other, NULL, jobs_until_stopped, NULL) == 0);
    for (int i = 0; i < 20; i++) {
        in_child(use_pool);
    }
    atomic_store(&stop_jobs, true);
    CHECK(pthread_join(other, NULL) == 0);
}

#ifdef __linux__
static int
count_threads(void)
{
    int n = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (const struct dirent *e; (e = readdir(tasks)) != NULL;) {
        n += e->d_name[0] != '.';
    }
    CHECK(closedir(tasks) == 0);
    return n;
}

/* A thread that has been joined is in /proc for a moment yet. */
static void
test_threads_above_a_lower_number_end(void)
{
    CHECK(ct_pool_set_threads(5, NULL) == CT_OK);
    const int before = count_threads();
    CHECK(ct_pool_set_threads(2, NULL) == CT_OK);
    for (int i = 0; i < 5000 && count_threads() != before - 3; i++) {
        (void)usleep(1000);
    }
    CHECK(count_threads() == before - 3);
}
#endif

static void
test_a_number_of_threads_out_of_range_is_rejected(void)
{
    ct_error err;
    CHECK(ct_pool_set_threads(2, NULL) == CT_OK);
    CHECK(ct_pool_set_threads(0, &err) == CT_EINVAL && strstr(err.message, "got 0"));
    CHECK(ct_pool_set_threads(257, &err) == CT_EINVAL && strstr(err.message, "257"));
    CHECK(ct_pool_threads() == 2);
}

/* Leaves room for the stacks of a few threads, not for those of 200. */
static void
exhaust_address_space(void)
{
    CHECK(ct_pool_set_threads(3, NULL) == CT_OK);
    const struct rlimit limit = {256u << 20, 256u << 20};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    ct_error err;
    CHECK(ct_pool_set_threads(200, &err) == CT_ENOMEM);
    CHECK(strstr(err.message, "200") != NULL && ct_pool_threads() == 3);
    run_many_small_jobs(100);
}

static void
test_too_few_resources_for_threads_keep_the_old_number(void)
{
    if (ASAN || TSAN) {
        printf("skipped: a sanitizer needs more address space than the limit here\n");
        return;
    }
    in_child(exhaust_address_space);
}

static size_t
default_with(const char *ours, const char *theirs)
{
    size_t n = 0;
    CHECK(setenv("CTRAINER_NUM_THREADS", ours, 1) == 0);
    CHECK(setenv("OMP_NUM_THREADS", theirs, 1) == 0);
    const ct_status status = ct_pool_default_threads(&n, NULL);
    CHECK(status == CT_OK || status == CT_EINVAL);
    return status == CT_OK ? n : 0;
}

static void
test_the_environment_sets_the_number_to_start_with(void)
{
    const size_t processors = default_with("", "");
    CHECK(processors >= 1);
    CHECK(default_with("3", "5") == 3);
    CHECK(default_with("", "5") == 5);
    CHECK(default_with("", "6,2") == 6);
    CHECK(default_with("", "many") == processors);
    CHECK(default_with("100000", "") == 256);
    CHECK(default_with("0", "5") == 0);
    CHECK(default_with("-1", "5") == 0);
    CHECK(default_with("2x", "5") == 0);

    ct_error err;
    size_t n;
    CHECK(setenv("CTRAINER_NUM_THREADS", "two", 1) == 0);
    CHECK(ct_pool_default_threads(&n, &err) == CT_EINVAL);
    CHECK(strstr(err.message, "CTRAINER_NUM_THREADS") && strstr(err.message, "'two'"));
}

int
main(void)
{
    test_each_batch_runs_once_for_any_number_of_threads();
    test_many_small_jobs_in_a_row_see_their_own_results();
    test_callers_on_several_threads_do_not_disturb_each_other();
    test_the_number_of_threads_changes_between_jobs();
    test_a_job_inside_a_batch_runs_on_that_thread();
    if (TSAN) {
        printf("skipped: TSan allows no threads in the child of a fork\n");
    }
    else {
        test_a_forked_child_has_a_pool_of_its_own();
        test_a_fork_beside_a_running_job_finds_the_pool_at_rest();
    }
#ifdef __linux__
    test_threads_above_a_lower_number_end();
#endif
    test_a_number_of_threads_out_of_range_is_rejected();
    test_too_few_resources_for_threads_keep_the_old_number();
    test_the_environment_sets_the_number_to_start_with();
    CHECK(ct_pool_set_threads(1, NULL) == CT_OK);
    return 0;
}
