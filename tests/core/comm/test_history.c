#include "core/comm/collectives.h"

#include "core/base/alloc.h"
#include "ct_comm_local.h"
#include "ct_ranks.h"
#include "ct_test.h"

#include <stdio.h>
#include <string.h>

static void
note(ct_comm *comm, const char *name, uint64_t call)
{
    ct_label label;
    ct_label_set(&label, name, 7);
    label.call = call;
    ct_comm_label(comm, &label, CT_ALL_GATHER);
    CHECK(comm->label == &label);
    ct_comm_unlabel(comm);
    CHECK(comm->label == NULL);
}

static void
begin(ct_comm *comm)
{
    comm->history = ct_history_new();
    CHECK(comm->history != NULL);
}

static void
end(ct_comm *comm)
{
    ct_history_free(comm->history);
    comm->history = NULL;
}

static const ct_reduce_op OPS[] = {CT_REDUCE_SUM, CT_REDUCE_MAX, CT_REDUCE_MIN};

/* ---- ranks that do the same ------------------------------------------------------ */

static void
reduce_alike(ct_comm *comm, void *arg)
{
    static const double results[] = {6.0, 3.0, 1.0};
    (void)arg;
    for (int kept = 0; kept < 2; kept++) {
        if (kept) {
            begin(comm);
        }
        for (size_t n = 1; n < 200; n = 3 * n + 1) {
            for (int op = 0; op < 3; op++) {
                double numbers[200];
                for (size_t i = 0; i < n; i++) {
                    numbers[i] = comm->rank + 1;
                    note(comm, "unit", n + i);
                }
                CHECK(ct_comm_reduce_numbers(comm, numbers, n, OPS[op], NULL) == CT_OK);
                for (size_t i = 0; i < n; i++) {
                    CHECK(numbers[i] == results[op]);
                }
            }
        }
    }
    end(comm);
}

static void
test_numbers_of_ranks_that_do_the_same_are_reduced(void)
{
    run_ranks(3, 60.0, reduce_alike, NULL);
}

/* ---- ranks that do not ----------------------------------------------------------- */

static void
expect_difference(ct_comm *comm, ct_reduce_op op, const char *const *texts)
{
    double number = 1.0;
    ct_error err;
    CHECK(ct_comm_reduce_numbers(comm, &number, 1, op, &err) == CT_EINVAL);
    for (; *texts != NULL; texts++) {
        if (strstr(err.message, *texts) == NULL) {
            fprintf(stderr, "'%s' is not in: %s\n", *texts, err.message);
        }
        CHECK(strstr(err.message, *texts) != NULL);
    }
    CHECK(ct_comm_reduce_numbers(comm, &number, 1, op, &err) == CT_OK); /* it goes on */
}

static void
differ_in_a_unit(ct_comm *comm, void *arg)
{
    const int wrong = *(const int *)arg;
    char who[64];
    begin(comm);
    (void)snprintf(who, sizeof who, "rank %d gathers 'layers.9'", wrong);
    const char *const texts[] = {who, "gathers 'layers.1'",
                                 "3 of 4 ranks are with rank", NULL};
    for (int op = 0; op < 3; op++) {
        for (uint64_t call = 0; call < 40; call++) {
            const bool other = comm->rank == wrong && call == 20;
            note(comm, other ? "layers.9" : "layers.1", call);
        }
        expect_difference(comm, OPS[op], texts);
    }
    end(comm);
}

static void
test_the_first_unit_that_differs_is_named(void)
{
    for (int wrong = 0; wrong < 4; wrong++) {
        run_ranks(4, 60.0, differ_in_a_unit, &wrong);
    }
}

static void
leave_one_out(ct_comm *comm, void *arg)
{
    const char *const texts[] = {"rank 0 gathers 'a' (number 5)",
                                 "rank 2 gathers 'a' (number 6)", NULL};
    const char *const none[] = {"rank 0 gathers 'a'", "rank 2 calls all_reduce", NULL};
    (void)arg;
    begin(comm);
    for (uint64_t call = 0; call < 10; call++) {
        if (comm->rank != 2 || call != 5) {
            note(comm, "a", call);
        }
    }
    expect_difference(comm, CT_REDUCE_SUM, texts);
    if (comm->rank != 2) {
        note(comm, "a", 0);
    }
    expect_difference(comm, CT_REDUCE_SUM, none);
    end(comm);
}

static void
test_a_unit_that_is_left_out_is_named(void)
{
    run_ranks(3, 60.0, leave_one_out, NULL);
}

/* More than are kept: that they differ is found, which is not. */
static void
differ_late(ct_comm *comm, void *arg)
{
    const char *const texts[] = {"ranks use different units",
                                 "after 4096 collectives that were alike", NULL};
    (void)arg;
    begin(comm);
    for (uint64_t call = 0; call < 5000; call++) {
        note(comm, comm->rank == 1 && call == 4500 ? "b" : "a", call);
    }
    expect_difference(comm, CT_REDUCE_MAX, texts);
    end(comm);
}

static void
test_what_differs_behind_all_that_is_kept_is_found(void)
{
    run_ranks(2, 60.0, differ_late, NULL);
}

static void
call_for_another(ct_comm *comm, void *arg)
{
    const char *const texts[] = {"ranks use different units", NULL};
    ct_label label;
    (void)arg;
    begin(comm);
    ct_label_set(&label, "a", 1);
    ct_comm_label(comm, &label, comm->rank == 0 ? CT_ALL_GATHER : CT_REDUCE_SCATTER);
    ct_comm_unlabel(comm);
    expect_difference(comm, CT_REDUCE_MIN, texts);
    end(comm);
}

static void
test_what_a_unit_is_called_for_counts_too(void)
{
    run_ranks(2, 60.0, call_for_another, NULL);
}

/* ---- no memory ------------------------------------------------------------------- */

static void
test_without_memory_there_is_no_history_or_no_note_of_a_name(void)
{
    ct_comm *comm = ct_comm_self_new();
    double number = 3.0;
    ct_alloc_fail_after(1);
    CHECK(ct_history_new() == NULL);
    ct_alloc_fail_after(0);
    begin(comm);
    ct_alloc_fail_after(1);
    note(comm, "a", 0);
    ct_alloc_fail_after(0);
    note(comm, "a", 1);
    CHECK(ct_comm_reduce_numbers(comm, &number, 1, CT_REDUCE_SUM, NULL) == CT_OK);
    CHECK(number == 3.0);
    end(comm);
    comm->ops->free(comm);
}

int
main(void)
{
    test_numbers_of_ranks_that_do_the_same_are_reduced();
    test_the_first_unit_that_differs_is_named();
    test_a_unit_that_is_left_out_is_named();
    test_what_differs_behind_all_that_is_kept_is_found();
    test_what_a_unit_is_called_for_counts_too();
    test_without_memory_there_is_no_history_or_no_note_of_a_name();
    return 0;
}
