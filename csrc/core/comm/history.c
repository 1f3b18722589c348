/* Ranks compare hashes by a reduction together with other numbers, as parts so short
 * that the reduction is exact. Only after a mismatch are the records themselves
 * exchanged. */
#include "core/comm/history.h"

#include "core/base/alloc.h"

#include <string.h>

enum {
    MOST_KEPT = 4096, /* later collectives are in the hash alone */
    CARRIED = 4,      /* numbers that carry the hash */
    FEW = 64          /* numbers that need no allocation */
};

typedef struct note {
    ct_label label;
    ct_collective what;
    uint64_t hash; /* of the history up to here */
} note;

struct ct_history {
    note *notes; /* the first n since the last comparison */
    size_t n, room;
    uint64_t seen, hash; /* of all collectives since then */
};

ct_history *
ct_history_new(void)
{
    return ct_calloc(1, sizeof(ct_history));
}

void
ct_history_free(ct_history *h)
{
    if (h != NULL) {
        ct_free(h->notes);
        ct_free(h);
    }
}

/* ---- recording ------------------------------------------------------------------- */

static uint64_t
mixed(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* Without memory for a note only a name is lost: the hash has the rest. */
static void
take_note(ct_history *h, const ct_label *label, ct_collective what)
{
    h->hash = mixed(mixed(mixed(h->hash, label->tag), label->call), 1 + what);
    if (h->n == h->seen++ && h->n < MOST_KEPT &&
        ct_grow((void **)&h->notes, &h->room, h->n + 1, sizeof *h->notes, NULL) ==
            CT_OK) {
        h->notes[h->n++] = (note){*label, what, h->hash};
    }
}

void
ct_comm_label(ct_comm *comm, const ct_label *label, ct_collective what)
{
    comm->label = label;
    if (comm->history != NULL) {
        take_note(comm->history, label, what);
    }
}

void
ct_comm_unlabel(ct_comm *comm)
{
    comm->label = NULL;
}

/* ---- hashes as numbers that are reduced ------------------------------------------ */

/* The bits of a part: sums of squares over all ranks have to be exact. */
static unsigned
part_bits(int world_size)
{
    unsigned bits = 20;
    while (bits > 1 &&
           (double)world_size * (double)(UINT64_C(1) << 2 * bits) > 0x1p53) {
        bits--;
    }
    return bits;
}

/* Writes two parts of the hash, each with the square for a sum, with the negative for a
 * max or min: all parts are equal exactly if largest and smallest are. */
static void
write_hash(uint64_t hash, int world_size, ct_reduce_op op, double *to)
{
    const unsigned bits = part_bits(world_size);
    for (int i = 0; i < CARRIED; i += 2, hash >>= bits) {
        const double part = (double)(hash & ((UINT64_C(1) << bits) - 1));
        to[i] = part;
        to[i + 1] = op == CT_REDUCE_SUM ? part * part : -part;
    }
}

/* For a given sum, the sum of squares of n numbers is least, n times the square of the
 * mean, exactly where all numbers are equal. */
static bool
is_one_hash(const double *reduced, int world_size, ct_reduce_op op)
{
    bool one = true;
    for (int i = 0; i < CARRIED; i += 2) {
        const double mean = reduced[i] / world_size;
        one = one && (op == CT_REDUCE_SUM ? reduced[i + 1] == mean * mean * world_size
                                          : reduced[i] == -reduced[i + 1]);
    }
    return one;
}

/* ---- the first difference -------------------------------------------------------- */

static ct_status
count_notes(ct_comm *comm, const ct_history *h, size_t *most, ct_error *err)
{
    int64_t n = (int64_t)h->n;
    const ct_span span = {&n, 1, CT_I64};
    const ct_status status = ct_comm_all_reduce(comm, &span, CT_REDUCE_MAX, err);
    *most = (size_t)n;
    return status;
}

/* The first of `n` places where the ranks' hashes differ, or n. */
static size_t
first_difference(const int64_t *all, size_t n, size_t ranks)
{
    size_t at = 0;
    for (bool same = true; same && at < n; at += same) {
        for (size_t r = 1; same && r < ranks; r++) {
            same = all[r * n + at] == all[at];
        }
    }
    return at;
}

static ct_status
find_difference(ct_comm *comm, const ct_history *h, size_t n, size_t *at, ct_error *err)
{
    const size_t ranks = (size_t)comm->world_size;
    int64_t *own = ct_calloc(n + 1, sizeof *own);
    int64_t *all = ct_calloc(n * ranks + 1, sizeof *all);
    ct_status status = CT_OK;
    if (own == NULL || all == NULL) {
        status = ct_fail(err, CT_ENOMEM, "no memory to compare %zu collectives", n);
    }
    else {
        for (size_t i = 0; i < h->n; i++) {
            own[i] = (int64_t)h->notes[i].hash;
        }
        const ct_span in = {own, n, CT_I64}, out = {all, n * ranks, CT_I64};
        status = ct_comm_all_gather(comm, &out, &in, err);
        *at = first_difference(all, n, ranks);
    }
    ct_free(all);
    ct_free(own);
    return status;
}

/* Called by all ranks after their hashes differed: always fails. */
static ct_status
fail_different(ct_comm *comm, const ct_history *h, size_t numbers, ct_error *err)
{
    size_t most = 0, at = 0;
    ct_status status = count_notes(comm, h, &most, err);
    if (status == CT_OK) {
        status = find_difference(comm, h, most, &at, err);
    }
    if (status == CT_OK) {
        ct_request own = {
            .what = CT_ALL_REDUCE, .in = {NULL, numbers, CT_F64}
        };
        if (at < h->n) {
            own = (ct_request){.what = h->notes[at].what, .label = h->notes[at].label};
        }
        status = ct_requests_exchange(comm, &own, err);
    }
    return status != CT_OK
               ? status
               : ct_fail(err, CT_EINVAL,
                         "ranks use different units, or in different orders, after %zu "
                         "collectives that were alike; CTRAINER_CHECK_COLLECTIVES=1 "
                         "names them",
                         most);
}

/* ---- numbers of all ranks -------------------------------------------------------- */

static ct_status
reduce_with_hash(ct_comm *comm, double *all, size_t n, ct_reduce_op op, ct_error *err)
{
    ct_history *h = comm->history;
    const ct_span span = {all, n + CARRIED, CT_F64};
    write_hash(h->hash, comm->world_size, op, all + n);
    ct_status status = ct_comm_all_reduce(comm, &span, op, err);
    if (status == CT_OK && !is_one_hash(all + n, comm->world_size, op)) {
        comm->label = NULL; /* the report is a collective without a label */
        status = fail_different(comm, h, n, err);
    }
    h->n = 0;
    h->seen = h->hash = 0;
    return status;
}

ct_status
ct_comm_reduce_numbers(ct_comm *comm, double *numbers, size_t n, ct_reduce_op op,
                       ct_error *err)
{
    double few[FEW + CARRIED];
    if (comm->history == NULL) {
        const ct_span span = {numbers, n, CT_F64};
        return ct_comm_all_reduce(comm, &span, op, err);
    }
    double *all = n <= FEW ? few : ct_alloc((n + CARRIED) * sizeof *all);
    if (all == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to reduce %zu numbers", n);
    }
    memcpy(all, numbers, n * sizeof *all);
    const ct_status status = reduce_with_hash(comm, all, n, op, err);
    if (status == CT_OK) {
        memcpy(numbers, all, n * sizeof *all);
    }
    if (all != few) {
        ct_free(all);
    }
    return status;
}
