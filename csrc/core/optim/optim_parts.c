#include "core/optim/optim_parts.h"

#include "core/base/alloc.h"

/* ---- who has what ------------------------------------------------------------------
 */

enum {
    NUMBERS = sizeof(ct_optim_part) / sizeof(int64_t)
};

bool
ct_optim_is_first(const ct_optim_share *share, size_t i)
{
    const ct_comm *comm = ct_optim_comm_borrow(share, i);
    size_t k = 0;
    while (ct_optim_comm_borrow(share, k) != comm) {
        k++;
    }
    return k == i;
}

/* This rank's parts of one group; how many there are. */
static size_t
describe(const ct_optim_share *share, const ct_comm *comm, ct_optim_part *to,
         size_t *spans)
{
    size_t n = 0;
    for (size_t i = 0; i < share->update.n_spans; i++) {
        const ct_update_span *span = &share->spans[i];
        if (ct_optim_comm_borrow(share, i) == comm) {
            to[n] = (ct_optim_part){share->owner[i], span->begin, span->n, span->whole};
            spans[n++] = i;
        }
    }
    return n;
}

/* Room for own parts, all ranks' and the numbers of spans. */
static ct_status
reserve(ct_optim_room *room, size_t ranks, size_t n, ct_error *err)
{
    ct_status status = ct_grow(&room->described, &room->described_capacity,
                               (ranks + 1) * n, sizeof(ct_optim_part), err);
    return status == CT_OK ? ct_grow(&room->numbers, &room->numbers_capacity, n,
                                     sizeof(size_t), err)
                           : status;
}

ct_status
ct_optim_parts_gather(const ct_optim_share *share, ct_comm *comm, ct_optim_parts *parts,
                      ct_error *err)
{
    const size_t ranks = (size_t)comm->world_size;
    ct_optim_room *room = share->room;
    ct_status status = reserve(room, ranks, share->update.n_spans, err);
    if (status != CT_OK) {
        return status;
    }
    ct_optim_part *own = room->described, *all = own + share->update.n_spans;
    const size_t n = describe(share, comm, own, room->numbers);
    const ct_span in = {own, n * NUMBERS, CT_I64};
    const ct_span out = {all, ranks * n * NUMBERS, CT_I64};
    *parts = (ct_optim_parts){n, room->numbers, all};
    return comm->ops->all_gather(comm, &out, &in, err);
}

/* One parameter's parts of all ranks. */
static ct_status
check_parts(const ct_optim_parts *parts, size_t number, size_t ranks, ct_error *err)
{
    const ct_optim_part *first = ct_optim_part_of(parts, 0, number);
    const unsigned long long owner = first->owner, whole = first->whole;
    unsigned long long end = 0;
    for (size_t rank = 0; rank < ranks; rank++) {
        const ct_optim_part *part = ct_optim_part_of(parts, rank, number);
        if (part->owner != owner || part->whole != whole) {
            return ct_fail(err, CT_EINVAL,
                           "rank %zu has a gradient of parameter %llu of %llu elements "
                           "where rank 0 has one of parameter %llu of %llu: all ranks "
                           "need gradients of the same parameters",
                           rank, (unsigned long long)part->owner,
                           (unsigned long long)part->whole, owner, whole);
        }
        if (part->begin != end && part->n != 0) {
            return ct_fail(err, CT_EINVAL,
                           "parameter %llu: the part of rank %zu begins at element "
                           "%llu, and the ranks before it have %llu: parts have to "
                           "follow each other in rank order",
                           owner, rank, (unsigned long long)part->begin, end);
        }
        end += part->n;
    }
    return end == whole ? CT_OK
                        : ct_fail(err, CT_EINVAL,
                                  "parameter %llu: the parts of all ranks have %llu "
                                  "elements, and it has %llu",
                                  owner, end, whole);
}

static ct_status
check_reach(const ct_optim_share *share, const ct_comm *comm, ct_error *err)
{
    return share->device == &ct_device_cpu || comm->ops->takes_device_memory
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "the group %s of ranks that have a part each cannot reach the "
                         "memory of %s, where the parameters are",
                         comm->ops->name, share->device->name);
}

static ct_status
agree(const ct_optim_share *share, ct_comm *comm, ct_error *err)
{
    ct_optim_parts parts;
    ct_status status = ct_optim_parts_gather(share, comm, &parts, err);
    for (size_t k = 0; status == CT_OK && k < parts.n; k++) {
        status = check_parts(&parts, k, (size_t)comm->world_size, err);
    }
    return status == CT_OK ? check_reach(share, comm, err) : status;
}

ct_status
ct_optim_parts_agree(const ct_optim_share *share, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < share->update.n_spans; i++) {
        ct_comm *comm = ct_optim_comm_borrow(share, i);
        if (comm != NULL && ct_optim_is_first(share, i)) {
            status = agree(share, comm, err);
        }
    }
    return status;
}

/* ---- sums --------------------------------------------------------------------------
 */

ct_status
ct_optim_sum_add(const ct_optim_share *share, void *stream, ct_comm *comm, double *sums,
                 size_t n, ct_error *err)
{
    const ct_span span = {sums, n, CT_F64};
    double first; /* to read it is to wait for the stream */
    ct_status status = share->device->read(stream, sums, &first, err);
    return status == CT_OK ? comm->ops->all_reduce(comm, &span, CT_REDUCE_SUM, err)
                           : status;
}

/* Those of one group, side by side for one collective. */
static ct_status
add(const ct_optim_share *share, void *stream, ct_comm *comm, const ct_span *sums,
    ct_error *err)
{
    const ct_device *device = share->device;
    double *const exchange = share->room->exchange.data;
    ct_span *apart = share->room->pairs, *packed = apart + share->update.n_spans;
    size_t n = 0, total = 0;
    for (size_t i = 0; i < share->update.n_spans; i++) {
        if (ct_optim_comm_borrow(share, i) == comm && sums[i].n != 0) {
            apart[n] = sums[i];
            packed[n++] = (ct_span){exchange + total, sums[i].n, CT_F64};
            total += sums[i].n;
        }
    }
    if (total == 0) {
        return CT_OK;
    }
    ct_status status = device->copy(stream, packed, apart, n, err);
    if (status == CT_OK) {
        status = ct_optim_sum_add(share, stream, comm, exchange, total, err);
    }
    return status == CT_OK ? device->copy(stream, apart, packed, n, err) : status;
}

ct_status
ct_optim_parts_add(const ct_optim_share *share, void *stream, const ct_span *sums,
                   ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < share->update.n_spans; i++) {
        ct_comm *comm = ct_optim_comm_borrow(share, i);
        if (comm != NULL && ct_optim_is_first(share, i)) {
            status = add(share, stream, comm, sums, err);
        }
    }
    return status;
}
