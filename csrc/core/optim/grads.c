/* Norms by group: the device sums each run of spans of one group, and the host merges
 * the sums, so the groups' norms cost no pass of their own over the gradients. */
#include "core/optim/grads.h"

#include "core/base/alloc.h"
#include "math/norm.h"

#include <string.h>

void
ct_grads_init(ct_grads *grads, const ct_device *device)
{
    *grads = (ct_grads){.device = device};
}

void
ct_grads_fini(ct_grads *grads)
{
    grads->device->scratch_release(&grads->sum);
    grads->device->scratch_release(&grads->scratch);
    ct_free(grads->sums);
    ct_free(grads->groups);
    ct_free(grads->group_of);
    ct_free(grads->spans);
    ct_grads_init(grads, grads->device);
}

ct_status
ct_grads_reserve(ct_grads *grads, size_t n, ct_error *err)
{
    void *spans = grads->spans, *group_of = grads->group_of;
    ct_status status =
        ct_grow(&spans, &grads->spans_capacity, n, sizeof *grads->spans, err);
    grads->spans = spans;
    if (status == CT_OK) {
        status = ct_grow(&group_of, &grads->group_of_capacity, n,
                         sizeof *grads->group_of, err);
        grads->group_of = group_of;
    }
    return status;
}

ct_status
ct_grads_set_groups(ct_grads *grads, size_t n_groups, ct_error *err)
{
    void *groups = grads->groups, *sums = grads->sums;
    ct_status status =
        ct_grow(&groups, &grads->groups_capacity, n_groups, sizeof *grads->groups, err);
    grads->groups = groups;
    if (status == CT_OK) {
        status = ct_grow(&sums, &grads->sums_capacity, n_groups + 2,
                         sizeof *grads->sums, err);
        grads->sums = sums;
    }
    if (status != CT_OK) {
        return status;
    }
    for (size_t g = grads->n_groups; g < n_groups; g++) {
        grads->groups[g] = (ct_grad_group){.coef = 1.0};
    }
    grads->n_groups = n_groups;
    return CT_OK;
}

void
ct_grads_add(ct_grads *grads, const ct_span *span, uint32_t group)
{
    grads->spans[grads->n] = *span;
    grads->group_of[grads->n++] = group;
}

/* The end of the run of spans of one group that begins at `from`. */
static size_t
run_end(const ct_grads *grads, size_t from)
{
    size_t end = from;
    while (end < grads->n && grads->group_of[end] == grads->group_of[from]) {
        end++;
    }
    return end;
}

static ct_status
sum_of(ct_grads *grads, void *stream, double p, size_t from, size_t end, double *sum,
       ct_error *err)
{
    const ct_device *device = grads->device;
    ct_status status = device->scratch_grow(&grads->sum, sizeof *sum, err);
    if (status == CT_OK) {
        status = device->norm(stream, &grads->scratch, p, grads->spans + from,
                              end - from, grads->sum.data, err);
    }
    return status == CT_OK ? device->read(stream, grads->sum.data, sum, err) : status;
}

static ct_status
sum_groups(ct_grads *grads, void *stream, double p, ct_error *err)
{
    const ct_norm_kind kind = ct_norm_kind_of(p);
    ct_status status = CT_OK;
    memset(grads->sums, 0, (grads->n_groups + 1) * sizeof *grads->sums);
    for (size_t i = 0, end; status == CT_OK && i < grads->n; i = end) {
        double sum = 0.0, *of_group = &grads->sums[grads->group_of[i]];
        end = run_end(grads, i);
        status = sum_of(grads, stream, p, i, end, &sum, err);
        *of_group = ct_norm_merge(kind, *of_group, sum);
        *ct_grads_total(grads) = ct_norm_merge(kind, *ct_grads_total(grads), sum);
    }
    return status;
}

ct_status
ct_grads_sum(ct_grads *grads, void *stream, double p, bool by_group, ct_error *err)
{
    return by_group ? sum_groups(grads, stream, p, err)
                    : sum_of(grads, stream, p, 0, grads->n, ct_grads_total(grads), err);
}

ct_status
ct_grads_sum_each(ct_grads *grads, void *stream, double p, double *each, ct_error *err)
{
    const ct_device *device = grads->device;
    ct_status status = device->scratch_grow(&grads->sum, grads->n * sizeof *each, err);
    if (status == CT_OK) {
        status = device->norms(stream, &grads->scratch, p, grads->spans, grads->n,
                               grads->sum.data, err);
    }
    for (size_t i = 0; status == CT_OK && i < grads->n; i++) {
        status = device->read(stream, (double *)grads->sum.data + i, &each[i], err);
    }
    return status;
}

ct_status
ct_grads_scale(ct_grads *grads, void *stream, double factor, double limit,
               ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0, end; status == CT_OK && i < grads->n; i = end) {
        const double by = grads->groups[grads->group_of[i]].coef * factor;
        end = run_end(grads, i);
        if (by != 1.0 || limit != (double)INFINITY) {
            status =
                grads->device->scale(stream, by, limit, grads->spans + i, end - i, err);
        }
    }
    return status;
}
