#include "core/ct_optim.h"

#include "core/ct_alloc.h"
#include "core/ct_optim_kind.h"

#include <math.h>
#include <string.h>

/* The constants that a group's parameters of this step use. Parameters mostly have had
 * equally many updates, so the last ones are remembered and shared. */
typedef struct group_cache {
    uint64_t key;
    size_t coef; /* index + 1; 0: none yet */
} group_cache;

struct ct_optim {
    ct_optim_kind kind;
    const ct_optim_ops *ops;
    const ct_device *device;
    size_t n_groups, n_params;
    size_t groups_capacity, caches_capacity, params_capacity;
    size_t coefs_capacity, spans_capacity; /* >= n_params: a step allocates nothing */
    ct_optim_group *groups;
    group_cache *caches;
    ct_optim_param *params;
    void *coefs;
    void *spans;
    ct_scratch scratch; /* the device's, for partial sums */
    ct_scratch sum_sq;  /* the device's, one double */
};

ct_optim *
ct_optim_new(ct_optim_kind kind, const ct_device *device)
{
    ct_optim *optim = ct_calloc(1, sizeof *optim);
    if (optim != NULL) {
        optim->kind = kind;
        optim->ops = ct_optim_kinds[kind];
        optim->device = device;
    }
    return optim;
}

void
ct_optim_free(ct_optim *optim)
{
    if (optim == NULL) {
        return;
    }
    optim->device->scratch_release(&optim->sum_sq);
    optim->device->scratch_release(&optim->scratch);
    ct_free(optim->spans);
    ct_free(optim->coefs);
    ct_free(optim->params);
    ct_free(optim->caches);
    ct_free(optim->groups);
    ct_free(optim);
}

static size_t
larger_of(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Arrays that have grown when a later one cannot are of no harm: the counts stay. */
static ct_status
reserve(ct_optim *optim, size_t n_groups, size_t n_params, ct_error *err)
{
    const size_t span_size = larger_of(optim->ops->span_size, sizeof(ct_span));
    const struct {
        void **block;
        size_t *capacity;
        size_t n, size;
    } arrays[] = {
        {(void **)&optim->groups, &optim->groups_capacity, n_groups,
         sizeof(ct_optim_group)                                                           },
        {(void **)&optim->caches, &optim->caches_capacity, n_groups,
         sizeof(group_cache)                                                              },
        {(void **)&optim->params, &optim->params_capacity, n_params,
         sizeof(ct_optim_param)                                                           },
        {&optim->coefs,           &optim->coefs_capacity,  n_params, optim->ops->coef_size},
        {&optim->spans,           &optim->spans_capacity,  n_params, span_size            },
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        ct_status status = ct_grow(arrays[i].block, arrays[i].capacity, arrays[i].n,
                                   arrays[i].size, err);
        if (status != CT_OK) {
            return status;
        }
    }
    return CT_OK;
}

ct_status
ct_optim_resize(ct_optim *optim, size_t n_groups, size_t n_params, ct_error *err)
{
    ct_status status = reserve(optim, n_groups, n_params, err);
    if (status != CT_OK) {
        return status;
    }
    if (n_groups > optim->n_groups) {
        memset(optim->groups + optim->n_groups, 0,
               (n_groups - optim->n_groups) * sizeof *optim->groups);
    }
    if (n_params > optim->n_params) {
        memset(optim->params + optim->n_params, 0,
               (n_params - optim->n_params) * sizeof *optim->params);
    }
    optim->n_groups = n_groups;
    optim->n_params = n_params;
    return CT_OK;
}

ct_optim_group *
ct_optim_groups_borrow(ct_optim *optim)
{
    return optim->groups;
}

ct_optim_param *
ct_optim_params_borrow(ct_optim *optim)
{
    return optim->params;
}

size_t
ct_optim_n_params(const ct_optim *optim)
{
    return optim->n_params;
}

ct_optim_kind
ct_optim_get_kind(const ct_optim *optim)
{
    return optim->kind;
}

size_t
ct_optim_n_states(const ct_optim *optim, size_t group)
{
    return optim->ops->n_states(&optim->groups[group]);
}

/* Lists the gradients that are there; returns how many. */
static size_t
list_grads(ct_optim *optim)
{
    ct_span *spans = optim->spans;
    size_t n = 0;
    for (size_t i = 0; i < optim->n_params; i++) {
        const ct_optim_param *p = &optim->params[i];
        if (p->grad != NULL) {
            spans[n++] = (ct_span){p->grad, p->n, p->dtype};
        }
    }
    return n;
}

ct_status
ct_optim_norm(ct_optim *optim, void *stream, double *norm, ct_error *err)
{
    const ct_device *device = optim->device;
    ct_status status = device->scratch_grow(&optim->sum_sq, sizeof(double), err);
    if (status == CT_OK) {
        status = device->norm(stream, &optim->scratch, optim->spans, list_grads(optim),
                              optim->sum_sq.data, err);
    }
    double sum_sq = 0.0;
    if (status == CT_OK) {
        status = device->read(stream, optim->sum_sq.data, &sum_sq, err);
    }
    if (status == CT_OK) {
        *norm = sqrt(sum_sq);
    }
    return status;
}

ct_status
ct_optim_zero_grads(ct_optim *optim, void *stream, ct_error *err)
{
    return optim->device->zero(stream, optim->spans, list_grads(optim), err);
}

static ct_status
check_param(const ct_optim *optim, size_t i, ct_error *err)
{
    const ct_optim_param *p = &optim->params[i];
    if (p->group >= optim->n_groups) {
        return ct_fail(err, CT_EINVAL, "parameter %zu: group must be below %zu, got %u",
                       i, optim->n_groups, p->group);
    }
    if (!ct_dtype_is_float(p->dtype)) {
        return ct_fail(err, CT_EINVAL, "parameter %zu: dtype must be a float, got %s",
                       i, ct_dtype_name(p->dtype));
    }
    if (p->n != 0 && p->param == NULL) {
        return ct_fail(err, CT_EINVAL, "parameter %zu has a gradient but no memory", i);
    }
    const size_t n_states = ct_optim_n_states(optim, p->group);
    for (size_t k = 0; p->n != 0 && k < n_states; k++) {
        if (p->state[k] == NULL) {
            return ct_fail(err, CT_EINVAL,
                           "parameter %zu: state array %zu of %zu is missing", i, k,
                           n_states);
        }
    }
    return CT_OK;
}

/* The index of the constants of params[i], which are worked out if they are new. */
static ct_status
find_coef(ct_optim *optim, const ct_optim_param *param, double grad_scale,
          size_t *n_coefs, uint32_t *coef, ct_error *err)
{
    const ct_optim_group *group = &optim->groups[param->group];
    group_cache *cache = &optim->caches[param->group];
    const uint64_t key = optim->ops->key(param);
    if (cache->coef == 0 || cache->key != key) {
        const double scale = group->maximize ? -grad_scale : grad_scale;
        ct_status status =
            optim->ops->coef_init(optim->coefs, *n_coefs, group, key, scale, err);
        if (status != CT_OK) {
            return status;
        }
        *cache = (group_cache){key, ++*n_coefs};
    }
    *coef = (uint32_t)(cache->coef - 1);
    return CT_OK;
}

/* Fills in coefs and spans for the parameters that have a gradient. */
static ct_status
plan(ct_optim *optim, double grad_scale, size_t *n_spans, ct_error *err)
{
    size_t n_coefs = 0;
    *n_spans = 0;
    if (optim->n_groups != 0) {
        memset(optim->caches, 0, optim->n_groups * sizeof *optim->caches);
    }
    for (size_t i = 0; i < optim->n_params; i++) {
        const ct_optim_param *p = &optim->params[i];
        if (p->grad == NULL) {
            continue;
        }
        uint32_t coef = 0;
        ct_status status = check_param(optim, i, err);
        if (status == CT_OK) {
            status = find_coef(optim, p, grad_scale, &n_coefs, &coef, err);
        }
        if (status != CT_OK) {
            return status;
        }
        optim->ops->span_init(optim->spans, (*n_spans)++, p, coef,
                              ct_optim_n_states(optim, p->group));
    }
    return CT_OK;
}

static void
count_steps(ct_optim *optim)
{
    for (size_t i = 0; i < optim->n_params; i++) {
        ct_optim_param *p = &optim->params[i];
        if (p->grad != NULL) {
            p->step++;
            if (p->step_out != NULL) {
                *p->step_out = (float)p->step;
            }
        }
    }
}

ct_status
ct_optim_update(ct_optim *optim, void *stream, double grad_scale, bool zero_grads,
                ct_error *err)
{
    size_t n_spans = 0;
    ct_status status = plan(optim, grad_scale, &n_spans, err);
    if (status == CT_OK) {
        status = optim->ops->run(optim->device, stream, optim->coefs, optim->spans,
                                 n_spans, zero_grads, err);
    }
    if (status == CT_OK) {
        count_steps(optim);
    }
    return status;
}
