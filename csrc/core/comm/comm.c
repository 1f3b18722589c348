/* The common part of all backends: dispatch, and the comparison of the ranks'
 * requests.
 *
 * A request is rejected on all ranks or on none: lengths and dtypes are checked only
 * once the requests are known to be alike. Otherwise one rank would return with an
 * error while the others wait in the collective. */
#include "core/comm/comm.h"

#include "core/base/alloc.h"

#include <stdio.h>
#include <string.h>

ct_comm
ct_comm_made(const ct_comm_ops *ops, int rank, int world_size)
{
    return (ct_comm){
        .ops = ops,
        .rank = rank,
        .world_size = world_size,
        .owner = ct_owner_here(),
        .names = {0, 1, world_size},
    };
}

ct_status
ct_comm_check_here(const ct_comm *comm, const char *what, ct_error *err)
{
    char doing[64];
    if (ct_comm_is_here(comm)) {
        return CT_OK;
    }
    (void)snprintf(doing, sizeof doing, "%s on rank %d of %d", what,
                   ct_rank_called(&comm->names, comm->rank), comm->names.of);
    return ct_owner_check(comm->owner, doing, "this group of ranks", err);
}

ct_status
ct_comm_enqueue(ct_comm *comm, const ct_request *request, void *stream, ct_error *err)
{
    ct_work *work;
    ct_status status = ct_comm_follow(comm, stream, err);
    if (status == CT_OK && comm->ops->order == NULL) {
        return ct_comm_run(comm, request, err);
    }
    if (status == CT_OK) {
        status = ct_comm_start(comm, request, &work, err);
    }
    return status == CT_OK ? ct_comm_order(comm, work, stream, err) : status;
}

ct_status
ct_comm_all_reduce(ct_comm *comm, const ct_span *span, ct_reduce_op op, ct_error *err)
{
    const ct_request r = {.what = CT_ALL_REDUCE, .op = op, .in = *span};
    return ct_comm_run(comm, &r, err);
}

ct_status
ct_comm_all_gather(ct_comm *comm, const ct_span *out, const ct_span *in, ct_error *err)
{
    const ct_request r = {.what = CT_ALL_GATHER, .in = *in, .out = *out};
    return ct_comm_run(comm, &r, err);
}

ct_status
ct_comm_reduce_scatter(ct_comm *comm, const ct_span *out, const ct_span *in,
                       ct_reduce_op op, ct_error *err)
{
    const ct_request r = {.what = CT_REDUCE_SCATTER, .op = op, .in = *in, .out = *out};
    return ct_comm_run(comm, &r, err);
}

ct_status
ct_comm_all_to_all(ct_comm *comm, const ct_span *out, const ct_span *in, ct_error *err)
{
    const ct_request r = {.what = CT_ALL_TO_ALL, .in = *in, .out = *out};
    return ct_comm_run(comm, &r, err);
}

ct_status
ct_comm_broadcast(ct_comm *comm, const ct_span *span, int root, ct_error *err)
{
    const ct_request r = {.what = CT_BROADCAST, .root = root, .in = *span};
    return ct_comm_run(comm, &r, err);
}

ct_status
ct_comm_barrier(ct_comm *comm, ct_error *err)
{
    const ct_request r = {.what = CT_BARRIER};
    return ct_comm_run(comm, &r, err);
}

const char *
ct_collective_name(ct_collective what)
{
    static const char *const names[] = {
        [CT_ALL_REDUCE] = "all_reduce",
        [CT_ALL_GATHER] = "all_gather",
        [CT_REDUCE_SCATTER] = "reduce_scatter",
        [CT_ALL_TO_ALL] = "all_to_all",
        [CT_BROADCAST] = "broadcast",
        [CT_REDUCE] = "reduce",
        [CT_BARRIER] = "barrier",
    };
    return names[what];
}

const char *
ct_reduce_op_name(ct_reduce_op op)
{
    static const char *const names[] = {
        [CT_REDUCE_SUM] = "sum",
        [CT_REDUCE_MEAN] = "mean",
        [CT_REDUCE_MAX] = "max",
        [CT_REDUCE_MIN] = "min",
    };
    return names[op];
}

/* Addresses may differ, as every process has its own. */
static bool
is_like(const ct_request *a, const ct_request *b)
{
    return a->what == b->what && a->out.n == b->out.n && a->in.n == b->in.n &&
           a->out.dtype == b->out.dtype && a->in.dtype == b->in.dtype &&
           a->op == b->op && a->root == b->root && a->label.tag == b->label.tag &&
           a->label.call == b->label.call;
}

/* FNV-1a. */
void
ct_label_set(ct_label *label, const char *name, uint64_t shape)
{
    const size_t n = strlen(name), room = sizeof label->name - 1;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ (unsigned char)name[i]) * 0x100000001b3u;
    }
    for (int i = 0; i < 8; i++) {
        hash = (hash ^ (shape >> (8 * i) & 0xff)) * 0x100000001b3u;
    }
    /* 0 stands for no label. The end of the name is kept: names of modules differ
     * there. */
    *label = (ct_label){.tag = hash == 0 ? 1 : hash};
    (void)snprintf(label->name, sizeof label->name, "%s",
                   n > room ? name + (n - room) : name);
}

ct_request
ct_request_labelled(const ct_comm *comm, const ct_request *request)
{
    ct_request r = *request;
    if (comm->label != NULL) {
        r.label = *comm->label;
    }
    return r;
}

/* "all_reduce of 3 float32 to 0 (max, root 0)" */
typedef struct description {
    char text[96];
} description;

static description
describe(const ct_request *r)
{
    description d;
    (void)snprintf(d.text, sizeof d.text, "%s of %zu %s to %zu (%s, root %d)",
                   ct_collective_name(r->what), r->in.n, ct_dtype_name(r->in.dtype),
                   r->out.n, ct_reduce_op_name(r->op), r->root);
    return d;
}

/* "gathers 'layers.1'", or the whole request without a label. */
static void
say(const ct_request *r, bool counts, char *text, size_t room)
{
    static const char *const doing[] = {
        [CT_ALL_REDUCE] = "averages",      [CT_ALL_GATHER] = "gathers",
        [CT_REDUCE_SCATTER] = "reduces",   [CT_ALL_TO_ALL] = "exchanges",
        [CT_BROADCAST] = "broadcasts",     [CT_REDUCE] = "reduces",
        [CT_BARRIER] = "waits for all at",
    };
    char call[32] = "";
    if (counts) {
        (void)snprintf(call, sizeof call, " (number %llu)",
                       (unsigned long long)r->label.call);
    }
    if (r->label.tag == 0) {
        (void)snprintf(text, room, "calls %s", describe(r).text);
    }
    else if (r->label.is_step) {
        (void)snprintf(text, room, "is in %s", r->label.name);
    }
    else {
        (void)snprintf(text, room, "%s '%s'%s", doing[r->what], r->label.name, call);
    }
}

/* The number of ranks whose requests are like that of `rank`. */
static int
count_like(ct_request_at *at, const void *group, int world_size, int rank)
{
    const ct_request *request = at(group, rank);
    int n = 0;
    for (int other = 0; other < world_size; other++) {
        n += is_like(request, at(group, other));
    }
    return n;
}

/* Labels make a better message than shapes, and a step's label means that the ranks'
 * data differs in length rather than their modules. */
static ct_status
fail_different(const ct_request *a, int rank_a, const ct_request *b, int rank_b,
               const char *who, ct_error *err)
{
    char text_a[144], text_b[144];
    if (a->label.tag == 0 && b->label.tag == 0) {
        return ct_fail(err, CT_EINVAL,
                       "all ranks must call the same: rank %d called %s, rank %d %s%s",
                       rank_a, describe(a).text, rank_b, describe(b).text, who);
    }
    const bool counts = a->label.tag == b->label.tag;
    say(a, counts, text_a, sizeof text_a);
    say(b, counts, text_b, sizeof text_b);
    if (a->label.is_step || b->label.is_step) {
        return ct_fail(err, CT_EINVAL,
                       "ranks are in different steps: rank %d %s, rank %d %s%s. Ranks "
                       "have to make the same steps with as many samples each; empty "
                       "ones stand for data that a rank does not have",
                       rank_a, text_a, rank_b, text_b, who);
    }
    return ct_fail(err, CT_EINVAL,
                   "ranks use different units, or in different orders: rank %d %s, "
                   "rank %d %s%s. All ranks have to call the same modules in the same "
                   "order",
                   rank_a, text_a, rank_b, text_b, who);
}

ct_status
ct_requests_compare(ct_request_at *at, const void *group, int world_size,
                    const ct_rank_names *names, ct_error *err)
{
    int most = 0, wrong = 1;
    while (wrong < world_size && is_like(at(group, 0), at(group, wrong))) {
        wrong++;
    }
    if (wrong >= world_size) {
        return CT_OK;
    }
    /* The rank with the most like requests stands for the majority, the lowest of
     * several: all ranks compute the same message. */
    for (int rank = 1, best = count_like(at, group, world_size, 0); rank < world_size;
         rank++) {
        const int n = count_like(at, group, world_size, rank);
        most = n > best ? rank : most;
        best = n > best ? n : best;
    }
    /* `wrong` differs from rank 0; now the first that differs from the majority is
     * wanted. */
    if (most != 0) {
        for (wrong = 0; is_like(at(group, most), at(group, wrong));) {
            wrong++;
        }
    }
    char who[64] = "";
    const int like = count_like(at, group, world_size, most);
    /* Of two ranks neither is a majority. */
    if (world_size > 2 && 2 * like > world_size) {
        (void)snprintf(who, sizeof who, "; %d of %d ranks are with rank %d", like,
                       world_size, ct_rank_called(names, most));
    }
    const int first = most < wrong ? most : wrong;
    const int second = most < wrong ? wrong : most;
    return fail_different(at(group, first), ct_rank_called(names, first),
                          at(group, second), ct_rank_called(names, second), who, err);
}

static const ct_request *
request_at(const void *all, int rank)
{
    return (const ct_request *)all + rank;
}

/* The spans' addresses in the gathered requests are other processes'. */
ct_status
ct_requests_exchange(ct_comm *comm, const ct_request *own, ct_error *err)
{
    const size_t ranks = (size_t)comm->world_size, bytes = sizeof *own;
    ct_request sent = *own, *all = ct_calloc(ranks, bytes);
    if (all == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for %zu requests", ranks);
    }
    const ct_span in = {&sent, bytes, CT_U8}, out = {all, ranks * bytes, CT_U8};
    ct_status status = ct_comm_all_gather(comm, &out, &in, err);
    if (status == CT_OK) {
        status =
            ct_requests_compare(request_at, all, comm->world_size, &comm->names, err);
    }
    else if (status == CT_ECOMM && err != NULL) {
        /* ct_fail writes to *err, and the reason still lies there. */
        const ct_error why = *err;
        status = ct_fail(err, CT_ECOMM, "%s on rank %d of %d: comparing requests: %s",
                         ct_collective_name(own->what),
                         ct_rank_called(&comm->names, comm->rank), comm->names.of,
                         why.message);
    }
    ct_free(all);
    return status;
}

static ct_status
check_parts(const ct_request *r, const ct_span *whole, const ct_span *part,
            size_t world_size, ct_error *err)
{
    if (whole->dtype == part->dtype && whole->n % world_size == 0 &&
        whole->n / world_size == part->n) {
        return CT_OK;
    }
    return ct_fail(err, CT_EINVAL,
                   "%s over %zu ranks needs %zu times as many elements of one dtype on "
                   "one side, got %zu of %s and %zu of %s",
                   ct_collective_name(r->what), world_size, world_size, whole->n,
                   ct_dtype_name(whole->dtype), part->n, ct_dtype_name(part->dtype));
}

static ct_status
check_exchange(const ct_request *r, size_t world_size, ct_error *err)
{
    if (r->in.dtype == r->out.dtype && r->in.n == r->out.n &&
        r->in.n % world_size == 0) {
        return CT_OK;
    }
    return ct_fail(err, CT_EINVAL,
                   "all_to_all over %zu ranks needs the same number of elements of one "
                   "dtype on both sides, a multiple of %zu, got %zu of %s and %zu of "
                   "%s",
                   world_size, world_size, r->in.n, ct_dtype_name(r->in.dtype),
                   r->out.n, ct_dtype_name(r->out.dtype));
}

ct_status
ct_request_check(const ct_request *r, int world_size, ct_error *err)
{
    switch (r->what) {
    case CT_ALL_GATHER:
        return check_parts(r, &r->out, &r->in, (size_t)world_size, err);
    case CT_REDUCE_SCATTER:
        return check_parts(r, &r->in, &r->out, (size_t)world_size, err);
    case CT_ALL_TO_ALL:
        return check_exchange(r, (size_t)world_size, err);
    case CT_BROADCAST:
    case CT_REDUCE:
        if (r->root < 0 || r->root >= world_size) {
            return ct_fail(err, CT_EINVAL, "root must be in [0, %d), got %d",
                           world_size, r->root);
        }
        return CT_OK;
    case CT_ALL_REDUCE:
    case CT_BARRIER:
        break;
    }
    return CT_OK;
}
