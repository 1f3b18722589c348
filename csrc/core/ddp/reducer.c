/* Which gradients share a bucket, and the exchange of full buckets during the backward
 * pass.
 *
 * Buckets start in the order of `turns` alone, and a bucket starts only after all of
 * the bucket's parameters, so the ranks' collectives match in order and shape. */
#include "core/ddp/reducer.h"

#include "core/base/alloc.h"
#include "core/comm/collectives.h"
#include "core/comm/staged.h"

#include <math.h>
#include <string.h>

/* ---- the plan of buckets ---------------------------------------------------------
 *
 * The plan depends on lengths, dtypes, owners and limits alone, so ranks with the same
 * parameters make the same plan without asking each other. */

enum {
    NONE = -1
};

/* The bucket of a dtype and owner that is being filled. */
typedef struct filling {
    int64_t bucket; /* or NONE */
    size_t limit;
} filling;

typedef struct planner {
    ct_bucket_plan *plan;
    const ct_bucket_limits *limits;
    const ct_owners *owners;
    filling *fillings; /* by owner, CT_EVERY_RANK first, and dtype */
} planner;

static int
owner_of(const planner *p, size_t param)
{
    return p->owners->of == NULL ? CT_EVERY_RANK : p->owners->of[param];
}

/* One bucket for each parameter at most, and as many were allocated. */
static ct_bucket *
add_bucket(const planner *p, ct_dtype dtype, int owner, bool alone)
{
    ct_bucket *made = &p->plan->buckets[p->plan->n_buckets++];
    *made = (ct_bucket){.dtype = dtype, .owner = owner, .alone = alone};
    return made;
}

/* An owner has no second bucket: a parameter that does not fit is alone. */
static bool
is_alone(const planner *p, const filling *f, size_t bytes, bool is_owned)
{
    const size_t alone_bytes = p->limits->alone_bytes;
    const ct_bucket *open = f->bucket == NONE ? NULL : &p->plan->buckets[f->bucket];
    const size_t filled = open == NULL ? 0 : open->n * ct_dtype_size(open->dtype);
    return (alone_bytes != 0 && bytes >= alone_bytes) ||
           (is_owned && bytes != 0 && bytes + filled > p->limits->cap_bytes);
}

static ct_bucket *
open_bucket(const planner *p, filling *f, ct_dtype dtype, int owner)
{
    if (f->bucket == NONE) {
        f->bucket = (int64_t)p->plan->n_buckets;
        return add_bucket(p, dtype, owner, false);
    }
    return &p->plan->buckets[f->bucket];
}

static void
assign(const planner *p, const ct_span *param, size_t i)
{
    ct_bucket_plan *plan = p->plan;
    const size_t item = ct_dtype_size(param->dtype);
    const int owner = owner_of(p, i);
    filling *f = &p->fillings[(owner + 1) * CT_DTYPE_COUNT + (int)param->dtype];
    const bool is_owned = owner != CT_EVERY_RANK;
    const bool alone = is_alone(p, f, param->n * item, is_owned);
    ct_bucket *bucket = alone ? add_bucket(p, param->dtype, owner, true)
                              : open_bucket(p, f, param->dtype, owner);
    plan->bucket_of[i] = (uint32_t)(bucket - plan->buckets);
    plan->offset[i] = bucket->n;
    bucket->n += param->n;
    bucket->n_params++;
    /* Only the first bucket of a dtype is small: the exchange begins early. */
    if (!alone && !is_owned && bucket->n * item >= f->limit) {
        *f = (filling){NONE, p->limits->cap_bytes};
    }
}

/* Lists the parameters by bucket, in the order of arrival within a bucket. */
static void
put_in_order(ct_bucket_plan *plan)
{
    size_t at = 0;
    for (size_t b = 0; b < plan->n_buckets; b++) {
        plan->buckets[b].first = at;
        at += plan->buckets[b].n_params;
        /* Counted anew below, as the place of the next parameter. */
        plan->buckets[b].n_params = 0;
    }
    for (size_t i = plan->n_params; i-- > 0;) {
        ct_bucket *bucket = &plan->buckets[plan->bucket_of[i]];
        plan->order[bucket->first + bucket->n_params++] = (uint32_t)i;
    }
}

static ct_status
check_owners(const ct_owners *owners, size_t n_params, ct_error *err)
{
    for (size_t i = 0; owners->of != NULL && i < n_params; i++) {
        if (owners->of[i] < CT_EVERY_RANK || owners->of[i] >= owners->world_size) {
            return ct_fail(
                err, CT_EINVAL,
                "the owner of parameter %zu is %d; expected a rank of %d, or "
                "-1 for all",
                i, owners->of[i], owners->world_size);
        }
    }
    return CT_OK;
}

static filling *
new_fillings(const ct_bucket_limits *limits, const ct_owners *owners)
{
    const size_t kinds = owners->of == NULL ? 1 : (size_t)owners->world_size + 1;
    filling *made = ct_calloc(kinds * CT_DTYPE_COUNT, sizeof *made);
    for (size_t k = 0; made != NULL && k < kinds * CT_DTYPE_COUNT; k++) {
        made[k] = (filling){NONE, limits->first_bytes};
    }
    return made;
}

static void
plan_fini(ct_bucket_plan *plan)
{
    ct_free(plan->offset);
    ct_free(plan->bucket_of);
    ct_free(plan->order);
    ct_free(plan->buckets);
    *plan = (ct_bucket_plan){0};
}

static ct_status
plan_init(ct_bucket_plan *plan, const ct_span *params, size_t n_params,
          const ct_bucket_limits *limits, const ct_owners *owners, ct_error *err)
{
    ct_status status = check_owners(owners, n_params, err);
    if (status != CT_OK) {
        return status;
    }
    *plan = (ct_bucket_plan){
        .buckets = ct_calloc(n_params + 1, sizeof *plan->buckets),
        .order = ct_calloc(n_params + 1, sizeof *plan->order),
        .bucket_of = ct_calloc(n_params + 1, sizeof *plan->bucket_of),
        .offset = ct_calloc(n_params + 1, sizeof *plan->offset),
        .n_params = n_params,
    };
    const planner p = {plan, limits, owners, new_fillings(limits, owners)};
    if (plan->buckets == NULL || plan->order == NULL || plan->bucket_of == NULL ||
        plan->offset == NULL || p.fillings == NULL) {
        ct_free(p.fillings);
        plan_fini(plan);
        return ct_fail(err, CT_ENOMEM, "no memory to put %zu parameters into buckets",
                       n_params);
    }
    /* From the last parameter on, as autograd computes gradients backwards. */
    for (size_t i = n_params; i-- > 0;) {
        assign(&p, &params[i], i);
    }
    ct_free(p.fillings);
    put_in_order(plan);
    return CT_OK;
}

/* ---- lifetime -------------------------------------------------------------------- */

static void
set_places(ct_reducer *r, const ct_span *params)
{
    for (size_t i = 0; i < r->plan.n_params; i++) {
        r->params[i].place = (ct_span){.n = params[i].n, .dtype = params[i].dtype};
        r->params[i].expected = 1;
    }
    for (size_t b = 0; b < r->plan.n_buckets; b++) {
        const ct_bucket *bucket = &r->plan.buckets[b];
        r->buckets[b].flat = (ct_span){.n = bucket->n, .dtype = bucket->dtype};
    }
}

/* The order of full buckets if gradients arrive in the reverse of the
 * parameters' order. */
static void
set_turns(ct_reducer *r)
{
    int64_t *turn = r->turns;
    for (size_t i = r->plan.n_params; i-- > 0;) {
        const uint32_t b = r->plan.bucket_of[i];
        const ct_bucket *bucket = &r->plan.buckets[b];
        /* A bucket is full with its last parameter. */
        if (r->plan.order[bucket->first + bucket->n_params - 1] == i) {
            *turn++ = (int64_t)b;
        }
    }
}

void
ct_reducer_fini(ct_reducer *r)
{
    for (size_t b = 0; r->buckets != NULL && b < r->plan.n_buckets; b++) {
        r->device->scratch_release(&r->buckets[b].rounded);
    }
    ct_free(r->turns);
    ct_free(r->buckets);
    ct_free(r->params);
    plan_fini(&r->plan);
    *r = (ct_reducer){0};
}

ct_status
ct_reducer_init(ct_reducer *r, const ct_device *device, void *stream,
                const ct_span *params, size_t n_params, const ct_bucket_limits *limits,
                const ct_owners *owners, ct_error *err)
{
    *r = (ct_reducer){
        .device = device,
        .stream = stream,
        .factor = 1.0,
        .has_owners = owners->of != NULL,
    };
    ct_status status = plan_init(&r->plan, params, n_params, limits, owners, err);
    if (status != CT_OK) {
        return status;
    }
    r->params = ct_calloc(n_params + 1, sizeof *r->params);
    r->buckets = ct_calloc(r->plan.n_buckets + 1, sizeof *r->buckets);
    r->turns = ct_calloc(2 * r->plan.n_buckets + 1, sizeof *r->turns);
    if (r->params == NULL || r->buckets == NULL || r->turns == NULL) {
        ct_reducer_fini(r);
        return ct_fail(err, CT_ENOMEM, "no memory to reduce %zu parameters", n_params);
    }
    r->filled = r->turns + r->plan.n_buckets;
    set_places(r, params);
    set_turns(r);
    return CT_OK;
}

void
ct_reducer_set_memory(ct_reducer *r, size_t bucket, void *memory)
{
    const ct_bucket *b = &r->plan.buckets[bucket];
    r->buckets[bucket].flat.data = memory;
    for (size_t k = b->first; k < b->first + b->n_params; k++) {
        const uint32_t i = r->plan.order[k];
        r->params[i].place.data =
            (char *)memory + r->plan.offset[i] * ct_dtype_size(b->dtype);
    }
}

/* ---- a cycle --------------------------------------------------------------------- */

/* The order of the turns and the counts of announcements stay from earlier cycles. */
void
ct_reducer_begin(ct_reducer *r)
{
    for (size_t b = 0; b < r->plan.n_buckets; b++) {
        r->buckets[b].pending = r->plan.buckets[b].n_params;
        r->buckets[b].work = NULL;
    }
    for (size_t i = 0; i < r->plan.n_params; i++) {
        r->params[i].seen = 0;
        r->params[i].grad.data = NULL;
    }
    r->started = r->settled = r->under_way = r->n_filled = 0;
    r->active = true;
}

static size_t
bytes_of(const ct_reducer *r, size_t b)
{
    return r->plan.buckets[b].n * ct_dtype_size(r->plan.buckets[b].dtype);
}

static ct_status
wait_for(ct_reducer *r, ct_comm *comm, size_t b, ct_error *err)
{
    ct_work *work = r->buckets[b].work;
    r->buckets[b].work = NULL;
    return work == NULL ? CT_OK : ct_comm_wait(comm, work, err);
}

/* ---- the exchange of a bucket: unchanged, or rounded to fp16 or bf16 ------------- */

static bool
is_rounded(const ct_reducer *r, size_t b)
{
    return r->rounds && ct_dtype_size(r->plan.buckets[b].dtype) > 2;
}

static ct_span
rounded(const ct_reducer *r, size_t b)
{
    return (ct_span){r->buckets[b].rounded.data, r->buckets[b].flat.n, r->rounded};
}

/* Gradients are divided by the number of ranks before rounding, so that a sum overflows
 * only if the average does. */
static ct_status
round_off(ct_reducer *r, const ct_comm *comm, size_t b, ct_error *err)
{
    ct_reducer_bucket *bucket = &r->buckets[b];
    ct_status status =
        /* Two bytes an element; one more, so that an empty bucket is no special
         * case. */
        r->device->scratch_grow(&bucket->rounded, 2 * bucket->flat.n + 1, err);
    if (status == CT_OK) {
        status = r->device->scale(r->stream, 1.0 / comm->world_size, (double)INFINITY,
                                  &bucket->flat, 1, err);
    }
    const ct_span sent = rounded(r, b);
    return status == CT_OK ? r->device->copy(r->stream, &sent, &bucket->flat, 1, err)
                           : status;
}

static ct_status
exchange(ct_reducer *r, ct_comm *comm, size_t b, ct_error *err)
{
    const bool rounds = is_rounded(r, b);
    const int owner = r->plan.buckets[b].owner;
    ct_status status = rounds ? round_off(r, comm, b, err) : CT_OK;
    if (status == CT_OK) { /* the gradients are on their way to the bucket */
        status = ct_comm_follow(comm, r->stream, err);
    }
    const ct_request request = {
        .what = owner == CT_EVERY_RANK ? CT_ALL_REDUCE : CT_REDUCE,
        /* Rounded gradients have been divided already. */
        .op = rounds ? CT_REDUCE_SUM : CT_REDUCE_MEAN,
        .root = owner == CT_EVERY_RANK ? 0 : owner,
        .in = rounds ? rounded(r, b) : r->buckets[b].flat,
    };
    return status == CT_OK ? ct_comm_start(comm, &request, &r->buckets[b].work, err)
                           : status;
}

static ct_status
unpack(ct_reducer *r, const ct_comm *comm, size_t b, ct_error *err)
{
    const int owner = r->plan.buckets[b].owner;
    ct_reducer_bucket *bucket = &r->buckets[b];
    ct_status status = CT_OK;
    if (!is_rounded(r, b)) {
        return status;
    }
    if (owner == CT_EVERY_RANK || owner == comm->rank) {
        const ct_span sent = rounded(r, b);
        status = r->device->copy(r->stream, &bucket->flat, &sent, 1, err);
    }
    if (owner !=
        CT_EVERY_RANK) { /* owned gradients are dropped, so keep no memory for them */
        r->device->scratch_release(&bucket->rounded);
    }
    return status;
}

/* Orders later work on the stream behind the first turn that is not settled; over a
 * backend that does not enqueue, the host waits. */
static ct_status
settle_one(ct_reducer *r, ct_comm *comm, ct_error *err)
{
    const size_t b = (size_t)r->turns[r->settled++];
    ct_work *work = r->buckets[b].work;
    r->under_way -= bytes_of(r, b);
    r->buckets[b].work = NULL;
    ct_status status = ct_comm_order(comm, work, r->stream, err);
    return status == CT_OK ? unpack(r, comm, b, err) : status;
}

/* Limits the bytes under way, beside the bucket that was started last. */
static ct_status
settle_some(ct_reducer *r, ct_comm *comm, ct_error *err)
{
    ct_status status = CT_OK;
    while (status == CT_OK && r->has_owners && r->settled + 1 < r->started &&
           r->under_way > r->most_under_way) {
        status = settle_one(r, comm, err);
    }
    return status;
}

/* The number of buckets is a part of the label, by which ranks with different plans are
 * reported. */
static ct_status
start(ct_reducer *r, ct_comm *comm, size_t b, ct_error *err)
{
    if (r->label.tag == 0) {
        ct_label_set(&r->label, "gradients of replicated parameters",
                     r->plan.n_buckets);
    }
    ct_comm *const named = ct_comm_of_host(comm);
    ct_comm_label(named, &r->label, CT_ALL_REDUCE);
    ct_status status = exchange(r, comm, b, err);
    ct_comm_unlabel(named);
    r->label.call += status == CT_OK;
    if (status != CT_OK) {
        return status;
    }
    r->started++;
    r->under_way += bytes_of(r, b);
    return settle_some(r, comm, err);
}

/* Starts full buckets, up to the first bucket that is not full. */
static ct_status
start_full(ct_reducer *r, ct_comm *comm, ct_error *err)
{
    ct_status status = CT_OK;
    while (status == CT_OK && r->started < r->plan.n_buckets) {
        const size_t b = (size_t)r->turns[r->started];
        if (r->buckets[b].pending != 0) {
            break;
        }
        status = start(r, comm, b, err);
    }
    return status;
}

/* Copies a gradient into the bucket, or makes the gradient the bucket. */
static ct_status
put_in_bucket(ct_reducer *r, size_t i, const ct_span *grad, ct_error *err)
{
    ct_reducer_param *p = &r->params[i];
    const uint32_t b = r->plan.bucket_of[i];
    p->grad = *grad;
    /* Exchanged in place: no copy, and no memory beside the gradient. */
    if (r->plan.buckets[b].alone) {
        p->place = *grad;
        r->buckets[b].flat = *grad;
        return CT_OK;
    }
    /* The gradient is a view of the bucket from the second pass on. */
    return grad->data == p->place.data
               ? CT_OK
               : r->device->copy(r->stream, &p->place, grad, 1, err);
}

ct_status
ct_reducer_announce(ct_reducer *r, ct_comm *comm, size_t param, const ct_span *grad,
                    ct_error *err)
{
    ct_reducer_param *p = &r->params[param];
    ct_status status = put_in_bucket(r, param, grad, err);
    if (status != CT_OK) {
        return status;
    }
    p->seen++;
    /* While learning nothing starts before the end, so a parameter counts from the
     * first announcement on; otherwise from the last of the expected number. */
    const bool counts = r->learning ? p->seen == 1 : p->seen >= p->expected;
    const uint32_t b = r->plan.bucket_of[param];
    if (counts && --r->buckets[b].pending == 0) {
        r->filled[r->n_filled++] = (int64_t)b;
    }
    return counts && !r->learning ? start_full(r, comm, err) : CT_OK;
}

/* ---- the end of a cycle ---------------------------------------------------------- */

static ct_status
wait_for_all(ct_reducer *r, ct_comm *comm, ct_error *err)
{
    ct_status status = CT_OK;
    while (status == CT_OK && r->settled < r->plan.n_buckets) {
        status = settle_one(r, comm, err);
    }
    return status;
}

/* Rank 0's order of this cycle becomes the order of all ranks from the next on. */
static ct_status
take_turns(ct_reducer *r, ct_comm *comm, ct_error *err)
{
    const ct_span order = {r->filled, r->plan.n_buckets, CT_I64};
    /* Rank 0's order, as gradients may arrive in another order on every rank. */
    ct_status status =
        order.n > 1 ? ct_comm_broadcast(ct_comm_of_host(comm), &order, 0, err) : CT_OK;
    if (status == CT_OK) {
        memcpy(r->turns, r->filled, order.n * sizeof *r->turns);
        r->in_turn = true;
    }
    return status;
}

static ct_status
scale_all(ct_reducer *r, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t b = 0; status == CT_OK && b < r->plan.n_buckets; b++) {
        status = r->device->scale(r->stream, r->factor, (double)INFINITY,
                                  &r->buckets[b].flat, 1, err);
    }
    return status;
}

static ct_status
copy_back(ct_reducer *r, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < r->plan.n_params; i++) {
        const ct_reducer_param *p = &r->params[i];
        if (p->grad.data != p->place.data) {
            status = r->device->copy(r->stream, &p->grad, &p->place, 1, err);
        }
    }
    return status;
}

/* A bucket that is never full would not start, and would be taken for an exchanged
 * bucket. */
static ct_status
check_complete(const ct_reducer *r, ct_error *err)
{
    for (size_t i = 0; i < r->plan.n_params; i++) {
        if (r->params[i].seen == 0) {
            return ct_fail(err, CT_EINVAL, "parameter %zu has no gradient", i);
        }
    }
    return CT_OK;
}

static ct_status
finish(ct_reducer *r, ct_comm *comm, ct_error *err)
{
    ct_status status = check_complete(r, err);
    if (status == CT_OK) {
        status = start_full(r, comm, err);
    }
    if (status == CT_OK) {
        status = wait_for_all(r, comm, err);
    }
    if (status == CT_OK && !r->in_turn) {
        status = take_turns(r, comm, err);
    }
    if (status == CT_OK && r->factor != 1.0) {
        status = scale_all(r, err);
    }
    return status == CT_OK && r->copies_back ? copy_back(r, err) : status;
}

void
ct_reducer_abort(ct_reducer *r, ct_comm *comm)
{
    for (size_t turn = 0; turn < r->started; turn++) {
        if (wait_for(r, comm, (size_t)r->turns[turn], NULL) != CT_OK) {
            continue; /* the failure that led here has been reported */
        }
    }
    r->started = 0;
    r->active = false;
}

ct_status
ct_reducer_finish(ct_reducer *r, ct_comm *comm, ct_error *err)
{
    const ct_status status = finish(r, comm, err);
    if (status != CT_OK) {
        ct_reducer_abort(r, comm);
    }
    r->active = false;
    return status;
}
