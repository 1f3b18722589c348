/* Every rank gathers all colors and keys and computes the members of the new group; the
 * backend then makes the group. */
#include "core/base/alloc.h"
#include "core/comm/comm.h"

#include <stdint.h>

/* The color and the key of a rank. */
typedef struct wish {
    int64_t color, key;
} wish;

/* Inserts `rank`, later than the ranks before it, behind all keys up to its own. */
static void
insert(ct_members *m, const wish *wishes, int rank)
{
    int at = m->n++;
    while (at > 0 && wishes[m->ranks[at - 1]].key > wishes[rank].key) {
        m->ranks[at] = m->ranks[at - 1];
        at--;
    }
    m->ranks[at] = rank;
}

static void
choose(const ct_comm *comm, const wish *wishes, ct_members *m)
{
    const int64_t color = wishes[comm->rank].color;
    for (int rank = 0; color >= 0 && rank < comm->world_size; rank++) {
        if (wishes[rank].color == color) {
            insert(m, wishes, rank);
        }
    }
    for (int i = 0; i < m->n; i++) {
        m->index = m->ranks[i] == comm->rank ? i : m->index;
    }
}

static ct_status
gather_wishes(ct_comm *comm, wish own, wish *all, ct_error *err)
{
    const ct_span in = {&own, 2, CT_I64};
    const ct_span out = {all, 2 * (size_t)comm->world_size, CT_I64};
    return ct_comm_all_gather(comm, &out, &in, err);
}

static ct_status
make(ct_comm *comm, const ct_members *members, ct_comm **made, ct_error *err)
{
    if (comm->ops->group != NULL) {
        ct_status status = comm->ops->group(comm, members, made, err);
        if (status != CT_OK) {
            return status;
        }
    }
    else if (comm->world_size > 1) {
        return ct_fail(err, CT_EINVAL, "a group of the %s backend cannot be split",
                       comm->ops->name);
    }
    if (members->n == 1) {
        *made = ct_comm_self_new();
    }
    return members->n > 0 && *made == NULL
               ? ct_fail(err, CT_ENOMEM, "no memory for a smaller group")
               : CT_OK;
}

static ct_status
split(ct_comm *comm, wish own, wish *wishes, int *ranks, ct_comm **made, ct_error *err)
{
    ct_members members = {.ranks = ranks, .serial = ++comm->splits};
    ct_status status = gather_wishes(comm, own, wishes, err);
    if (status != CT_OK) {
        return status;
    }
    choose(comm, wishes, &members);
    return make(comm, &members, made, err);
}

ct_status
ct_comm_split(ct_comm *comm, int64_t color, int64_t key, ct_comm **made, ct_error *err)
{
    const size_t n = (size_t)comm->world_size;
    wish *wishes = ct_calloc(n, sizeof *wishes);
    int *ranks = ct_calloc(n, sizeof *ranks);
    *made = NULL;
    ct_status status =
        wishes == NULL || ranks == NULL
            ? ct_fail(err, CT_ENOMEM, "no memory to split a group of %zu ranks", n)
            : split(comm, (wish){color, key}, wishes, ranks, made, err);
    ct_free(ranks);
    ct_free(wishes);
    return status;
}
