/* Invariant: buckets start in the order of `turns` alone, and a bucket starts only
 * after all of the bucket's parameters, so the ranks' collectives match in order and
 * shape.
 */
#include "core/ddp/reducer.h"

#include "core/base/alloc.h"
#include "core/comm/collectives.h"

#include <math.h>
#include <string.h>

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
    ct_bucket_plan_fini(&r->plan);
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
    ct_status status =
        ct_bucket_plan_init(&r->plan, params, n_params, limits, owners, err);
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

bool
ct_reducer_is_complete(const ct_reducer *r, size_t param)
{
    const ct_reducer_param *p = &r->params[param];
    return !r->learning && p->seen > 0 && p->seen >= p->expected;
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
    const ct_request request = {
        .what = owner == CT_EVERY_RANK ? CT_ALL_REDUCE : CT_REDUCE,
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

/* Waits for the first turn that has not ended. */
static ct_status
settle_one(ct_reducer *r, ct_comm *comm, ct_error *err)
{
    const size_t b = (size_t)r->turns[r->settled++];
    r->under_way -= bytes_of(r, b);
    ct_status status = wait_for(r, comm, b, err);
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

static ct_status
start(ct_reducer *r, ct_comm *comm, size_t b, ct_error *err)
{
    if (r->label.tag == 0) {
        ct_label_set(&r->label, "gradients of replicated parameters",
                     r->plan.n_buckets);
    }
    ct_comm_label(comm, &r->label, CT_ALL_REDUCE);
    ct_status status = exchange(r, comm, b, err);
    ct_comm_unlabel(comm);
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
    if (r->plan.buckets[b].alone) {
        p->place = *grad;
        r->buckets[b].flat = *grad;
        return CT_OK;
    }
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
    ct_status status = order.n > 1 ? ct_comm_broadcast(comm, &order, 0, err) : CT_OK;
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
