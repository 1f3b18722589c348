#include "core/engine/noise.h"

#include "core/base/alloc.h"
#include "core/optim/optim.h"

#include <math.h>
#include <string.h>

void
ct_noise_see(ct_noise_sample *sample, double share, double sum_sq)
{
    if (share > 0.0) {
        sample->small += sum_sq / share;
        sample->n++;
    }
}

/* With micro-batches of sizes s_i * batch the expectation of small is
 * |G|^2 + n T / batch, that of big |G|^2 + T / batch. */
bool
ct_noise_add(ct_noise *noise, const ct_noise_sample *sample, double big, double batch)
{
    const double share_of_trace = (sample->small - big) / ((double)sample->n - 1.0);
    if (sample->n < 2 || !isfinite(share_of_trace)) {
        return false;
    }
    const double kept = CT_NOISE_KEPT, taken = 1.0 - CT_NOISE_KEPT;
    noise->trace = kept * noise->trace + taken * batch * share_of_trace;
    noise->signal = kept * noise->signal + taken * (big - share_of_trace);
    noise->weight = kept * noise->weight + taken;
    return true;
}

double
ct_noise_scale(const ct_noise *noise)
{
    return noise->signal > 0.0 ? noise->trace / noise->signal : (double)INFINITY;
}

/* A step of SGD with a learning rate of 1 subtracts what is from what was, in any mix
 * of dtypes and on all threads; then what is becomes what was. */

/* One gradient: its copy, and where it lies during a measurement. */
typedef struct entry {
    ct_span was;
    ct_span now; /* data NULL: it is not there */
} entry;

struct ct_probe {
    ct_optim *optim;
    entry *entries;
    ct_span *was, *now; /* lists of those that are there */
    size_t n, capacity, was_capacity, now_capacity;
    ct_scratch scratch;
};

ct_probe *
ct_probe_new(void)
{
    ct_probe *probe = ct_calloc(1, sizeof *probe);
    if (probe != NULL && (probe->optim = ct_optim_new(&ct_device_cpu)) == NULL) {
        ct_free(probe);
        return NULL;
    }
    return probe;
}

void
ct_probe_free(ct_probe *probe)
{
    if (probe == NULL) {
        return;
    }
    for (size_t i = 0; i < probe->n; i++) {
        ct_free(probe->entries[i].was.data);
    }
    ct_device_cpu.scratch_release(&probe->scratch);
    ct_free(probe->now);
    ct_free(probe->was);
    ct_free(probe->entries);
    ct_optim_free(probe->optim);
    ct_free(probe);
}

void
ct_probe_begin(ct_probe *probe)
{
    for (size_t i = 0; i < probe->n; i++) {
        const ct_span *was = &probe->entries[i].was;
        if (was->data != NULL) {
            memset(was->data, 0, was->n * ct_dtype_size(was->dtype));
        }
    }
}

/* Makes room for entries 0 .. n - 1; new ones are empty. */
static ct_status
reserve(ct_probe *probe, size_t n, ct_error *err)
{
    void *entries = probe->entries, *was = probe->was, *now = probe->now;
    ct_status status =
        ct_grow(&entries, &probe->capacity, n, sizeof *probe->entries, err);
    probe->entries = entries;
    if (status == CT_OK) {
        status = ct_grow(&was, &probe->was_capacity, n, sizeof *probe->was, err);
        probe->was = was;
    }
    if (status == CT_OK) {
        status = ct_grow(&now, &probe->now_capacity, n, sizeof *probe->now, err);
        probe->now = now;
    }
    for (; status == CT_OK && probe->n < n; probe->n++) {
        probe->entries[probe->n] = (entry){.now = {0}};
    }
    return status;
}

ct_status
ct_probe_set(ct_probe *probe, size_t number, const ct_span *grad, ct_error *err)
{
    const ct_dtype wide = grad->dtype == CT_F64 ? CT_F64 : CT_F32;
    ct_status status = number < probe->n ? CT_OK : reserve(probe, number + 1, err);
    if (status != CT_OK) {
        return status;
    }
    ct_span *was = &probe->entries[number].was;
    if (was->data == NULL || was->n != grad->n || was->dtype != wide) {
        void *zeros = ct_calloc(grad->n + 1, ct_dtype_size(wide));
        if (zeros == NULL) {
            return ct_fail(err, CT_ENOMEM, "out of memory: a copy of %zu gradients",
                           grad->n);
        }
        ct_free(was->data);
        *was = (ct_span){zeros, grad->n, wide};
    }
    probe->entries[number].now = *grad;
    return CT_OK;
}

/* Lists the gradients that are there, as the optimizer's too; returns how many. */
static size_t
list(ct_probe *probe)
{
    ct_optim_param *params = ct_optim_params_borrow(probe->optim);
    size_t n = 0;
    for (size_t i = 0; i < probe->n; i++) {
        entry *e = &probe->entries[i];
        params[i] = (ct_optim_param){
            .param = e->was.data,
            .grad = e->now.data,
            .n = e->was.n,
            .dtype = e->was.dtype,
            .grad_dtype = e->now.dtype,
        };
        if (e->now.data != NULL) {
            probe->was[n] = e->was;
            probe->now[n++] = e->now;
        }
        e->now.data = NULL;
    }
    return n;
}

ct_status
ct_probe_measure(ct_probe *probe, double *sum_sq, ct_error *err)
{
    const ct_device *device = &ct_device_cpu;
    ct_status status = ct_optim_resize(probe->optim, 1, probe->n, err);
    if (status != CT_OK) {
        return status;
    }
    ct_optim_groups_borrow(probe->optim)[0] =
        (ct_optim_group){.kind = CT_OPTIM_SGD, .sgd = {.lr = 1.0}};
    const size_t n = list(probe);
    status =
        ct_optim_update(probe->optim, NULL, &(ct_optim_pass){.grad_scale = 1.0}, err);
    if (status == CT_OK) {
        status = device->norm(NULL, &probe->scratch, 2.0, probe->was, n, sum_sq, err);
    }
    return status == CT_OK ? device->copy(NULL, probe->was, probe->now, n, err)
                           : status;
}
