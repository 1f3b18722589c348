/* The plan depends on lengths, dtypes, owners and limits alone, so ranks with the same
 * parameters make the same plan without asking each other. */
#include "core/ddp/bucket.h"

#include "core/base/alloc.h"

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

void
ct_bucket_plan_fini(ct_bucket_plan *plan)
{
    ct_free(plan->offset);
    ct_free(plan->bucket_of);
    ct_free(plan->order);
    ct_free(plan->buckets);
    *plan = (ct_bucket_plan){0};
}

ct_status
ct_bucket_plan_init(ct_bucket_plan *plan, const ct_span *params, size_t n_params,
                    const ct_bucket_limits *limits, const ct_owners *owners,
                    ct_error *err)
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
        ct_bucket_plan_fini(plan);
        return ct_fail(err, CT_ENOMEM, "no memory to put %zu parameters into buckets",
                       n_params);
    }
    for (size_t i = n_params; i-- > 0;) {
        assign(&p, &params[i], i);
    }
    ct_free(p.fillings);
    put_in_order(plan);
    return CT_OK;
}
