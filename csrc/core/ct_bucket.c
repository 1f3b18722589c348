#include "core/ct_bucket.h"

#include "core/ct_alloc.h"

enum {
    NONE = -1
};

/* What is being filled. */
typedef struct filling {
    int64_t open[CT_DTYPE_COUNT]; /* a bucket, or NONE */
    size_t limit[CT_DTYPE_COUNT];
} filling;

static ct_bucket *
add_bucket(ct_bucket_plan *plan, ct_dtype dtype, bool alone)
{
    ct_bucket *made = &plan->buckets[plan->n_buckets++];
    *made = (ct_bucket){.dtype = dtype, .alone = alone};
    return made;
}

static ct_bucket *
bucket_for(ct_bucket_plan *plan, filling *f, const ct_span *param, bool alone)
{
    int64_t *open = &f->open[param->dtype];
    if (alone) {
        return add_bucket(plan, param->dtype, true);
    }
    if (*open == NONE) {
        *open = (int64_t)plan->n_buckets;
        return add_bucket(plan, param->dtype, false);
    }
    return &plan->buckets[*open];
}

static void
assign(ct_bucket_plan *plan, filling *f, const ct_span *params, size_t i,
       const ct_bucket_limits *limits)
{
    const ct_span *param = &params[i];
    const size_t item = ct_dtype_size(param->dtype);
    const bool alone =
        limits->alone_bytes != 0 && param->n * item >= limits->alone_bytes;
    ct_bucket *bucket = bucket_for(plan, f, param, alone);
    plan->bucket_of[i] = (uint32_t)(bucket - plan->buckets);
    plan->offset[i] = bucket->n;
    bucket->n += param->n;
    bucket->n_params++;
    if (!alone && bucket->n * item >= f->limit[param->dtype]) {
        f->open[param->dtype] = NONE;
        f->limit[param->dtype] = limits->cap_bytes;
    }
}

/* Lists the parameters by bucket; within one they keep the order of arrival. */
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

ct_status
ct_bucket_plan_init(ct_bucket_plan *plan, const ct_span *params, size_t n_params,
                    const ct_bucket_limits *limits, ct_error *err)
{
    filling f;
    *plan = (ct_bucket_plan){
        .buckets = ct_calloc(n_params + 1, sizeof *plan->buckets),
        .order = ct_calloc(n_params + 1, sizeof *plan->order),
        .bucket_of = ct_calloc(n_params + 1, sizeof *plan->bucket_of),
        .offset = ct_calloc(n_params + 1, sizeof *plan->offset),
        .n_params = n_params,
    };
    if (plan->buckets == NULL || plan->order == NULL || plan->bucket_of == NULL ||
        plan->offset == NULL) {
        ct_bucket_plan_fini(plan);
        return ct_fail(err, CT_ENOMEM, "no memory to put %zu parameters into buckets",
                       n_params);
    }
    for (int dtype = 0; dtype < CT_DTYPE_COUNT; dtype++) {
        f.open[dtype] = NONE;
        f.limit[dtype] = limits->first_bytes;
    }
    for (size_t i = n_params; i-- > 0;) {
        assign(plan, &f, params, i, limits);
    }
    put_in_order(plan);
    return CT_OK;
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
