/* Planning an update: every parameter is checked and gets its constants before the
 * first kernel runs, so that an update with a bad option changes nothing. Buffers grow
 * at ct_optim_resize; a step allocates nothing. */
#include "core/optim/optim.h"

#include "core/base/alloc.h"
#include "core/optim/disk.h"
#include "core/optim/run.h"
#include "math/norm.h"

#include <math.h>
#include <string.h>

/* ---- the list of gradients ------------------------------------------------------- */

/* Norms by group: the device sums each run of spans of one group, and the host merges
 * the sums, so the groups' norms cost no pass of their own over the gradients. */
void
ct_grads_init(ct_grads *grads, const ct_device *device)
{
    *grads = (ct_grads){.device = device};
}

static void
release_scratch(ct_grads *grads)
{
    grads->device->scratch_release(&grads->sum);
    grads->device->scratch_release(&grads->scratch);
}

void
ct_grads_fini(ct_grads *grads)
{
    release_scratch(grads);
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
        /* Of all, and a spare beside the groups' sums. */
        status = ct_grow(&sums, &grads->sums_capacity, n_groups + 2,
                         sizeof *grads->sums, err);
        grads->sums = sums;
    }
    if (status != CT_OK) {
        return status;
    }
    /* 1 until a clip decides otherwise: a new group must not scale by 0. */
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

/* The end of the run of spans of one group that begins at `from`. Gradients are listed
 * by group, so a group is mostly a single run. */
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
ct_grads_scale(ct_grads *grads, void *stream, double factor, double limit,
               ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0, end; status == CT_OK && i < grads->n; i = end) {
        const double by = grads->groups[grads->group_of[i]].coef * factor;
        end = run_end(grads, i);
        /* A pass over the gradients that multiplies by 1 is left out. */
        if (by != 1.0 || limit != (double)INFINITY) {
            status =
                grads->device->scale(stream, by, limit, grads->spans + i, end - i, err);
        }
    }
    return status;
}

/* ---- groups and parameters ------------------------------------------------------- */

/* The last constants of a group in this step. Most parameters have had equally many
 * updates and share them. */
typedef struct group_cache {
    uint64_t key;
    size_t coef; /* index + 1; 0: none yet */
} group_cache;

struct ct_optim {
    const ct_device *device;
    size_t n_groups, n_params;
    size_t groups_capacity, before_capacity, caches_capacity, params_capacity;
    /* >= n_params: a step allocates nothing */
    size_t coefs_capacity, spans_capacity, owner_capacity;
    ct_optim_group *groups;
    ct_optim_group *before; /* the groups before the last update */
    group_cache *caches;
    ct_optim_param *params;
    ct_rule_coef *coefs;
    ct_update_span *spans;
    uint32_t *owner; /* each span's parameter */
    ct_run_buffers buffers;
    ct_disk_state disk;
    ct_grads grads;       /* the gradients present, and the clipping of each group */
    ct_scratch outcome;   /* of clipping, in the device's memory */
    ct_pending_read read; /* of the outcome */
    ct_scratch constants; /* of capturable updates, in the device's memory */
    size_t n_coefs;
    /* Hashes of what a graph knows of an update: of the last capturable update, and of
     * the one captured; 0: there is none. */
    uint64_t layout, captured;
};

ct_optim *
ct_optim_new(const ct_device *device)
{
    ct_optim *optim = ct_calloc(1, sizeof *optim);
    if (optim != NULL) {
        optim->device = device;
        ct_grads_init(&optim->grads, device);
    }
    return optim;
}

static void
release_outcome(ct_optim *optim)
{
    optim->device->read_release(&optim->read);
    optim->device->scratch_release(&optim->outcome);
    optim->device->scratch_release(&optim->constants);
    optim->layout = optim->captured = 0;
}

void
ct_optim_free(ct_optim *optim)
{
    if (optim == NULL) {
        return;
    }
    release_outcome(optim);
    ct_grads_fini(&optim->grads);
    ct_disk_state_fini(&optim->disk);
    ct_run_buffers_fini(optim->device, &optim->buffers);
    ct_free(optim->owner);
    ct_free(optim->spans);
    ct_free(optim->coefs);
    ct_free(optim->params);
    ct_free(optim->caches);
    ct_free(optim->before);
    ct_free(optim->groups);
    ct_free(optim);
}

/* What is kept between updates in the old device's memory is scratch alone. */
void
ct_optim_move(ct_optim *optim, const ct_device *device)
{
    ct_run_buffers_release(optim->device, &optim->buffers);
    release_scratch(&optim->grads);
    release_outcome(optim);
    optim->grads.device = device;
    optim->device = device;
}

/* A failure may leave some arrays longer: the counts of groups and parameters stay. */
static ct_status
reserve(ct_optim *optim, size_t n_groups, size_t n_params, ct_error *err)
{
#define ARRAY(name, n, type)                                                           \
    {                                                                                  \
        (void **)&optim->name, &optim->name##_capacity, n, sizeof(type)                \
    }
    const struct {
        void **block;
        size_t *capacity;
        size_t n, size;
    } arrays[] = {
        ARRAY(groups, n_groups, ct_optim_group),
        ARRAY(before, n_groups, ct_optim_group),
        ARRAY(caches, n_groups, group_cache),
        ARRAY(params, n_params, ct_optim_param),
        ARRAY(coefs, n_params, ct_rule_coef),
        ARRAY(spans, n_params, ct_update_span),
        ARRAY(owner, n_params, uint32_t),
    };
#undef ARRAY
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        ct_status status = ct_grow(arrays[i].block, arrays[i].capacity, arrays[i].n,
                                   arrays[i].size, err);
        if (status != CT_OK) {
            return status;
        }
    }
    ct_status status = ct_run_buffers_reserve(&optim->buffers, n_params, err);
    return status == CT_OK ? ct_grads_reserve(&optim->grads, n_params, err) : status;
}

ct_status
ct_optim_resize(ct_optim *optim, size_t n_groups, size_t n_params, ct_error *err)
{
    ct_status status = reserve(optim, n_groups, n_params, err);
    if (status == CT_OK) {
        status = ct_grads_set_groups(&optim->grads, n_groups, err);
    }
    if (status != CT_OK) {
        return status;
    }
    /* Zeros are a valid group and parameter: without a gradient, thus skipped. */
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

void
ct_optim_set_disk(ct_optim *optim, const ct_disk_memory *memory, size_t n_buffers)
{
    ct_pages_drop(optim->disk.buffers);
    optim->disk.buffers = NULL;
    optim->disk.buffer_bytes = 0;
    optim->disk.memory = memory;
    optim->disk.n_buffers = n_buffers;
    optim->disk.n_shards = n_buffers == 0 ? 0 : optim->disk.n_shards;
}

ct_status
ct_optim_set_shards(ct_optim *optim, const ct_disk_memory *const *files, size_t n,
                    ct_error *err)
{
    if (n == 0) {
        optim->disk.n_shards = 0;
        return CT_OK;
    }
    if (optim->disk.n_buffers == 0) {
        optim->disk.n_buffers = 4;
    }
    return ct_disk_state_set_shards(&optim->disk, files, n, err);
}

size_t
ct_optim_n_groups(const ct_optim *optim)
{
    return optim->n_groups;
}

static ct_status
check_group(const ct_optim *optim, size_t i, ct_error *err)
{
    const uint32_t group = optim->params[i].group;
    return group < optim->n_groups
               ? CT_OK
               : ct_fail(err, CT_EINVAL,
                         "parameter %zu: group must be below %zu, got %u", i,
                         optim->n_groups, group);
}

/* ---- gradients present ----------------------------------------------------------- */

ct_status
ct_optim_grads(ct_optim *optim, ct_grads **grads, ct_error *err)
{
    *grads = &optim->grads;
    optim->grads.n = 0;
    for (size_t g = 0; g < optim->n_groups; g++) {
        /* Limits may change between updates. */
        optim->grads.groups[g].max_norm = optim->groups[g].max_norm;
    }
    for (size_t i = 0; i < optim->n_params; i++) {
        const ct_optim_param *p = &optim->params[i];
        if (p->grad == NULL) {
            continue;
        }
        ct_status status = check_group(optim, i, err);
        if (status != CT_OK) {
            return status;
        }
        ct_grads_add(&optim->grads, &(ct_span){p->grad, p->n, p->grad_dtype}, p->group);
    }
    return CT_OK;
}

ct_status
ct_optim_zero_grads(ct_optim *optim, void *stream, ct_error *err)
{
    ct_grads *grads;
    ct_status status = ct_optim_grads(optim, &grads, err);
    return status == CT_OK ? optim->device->zero(stream, grads->spans, grads->n, err)
                           : status;
}

/* ---- the plan of an update ------------------------------------------------------- */

unsigned
ct_optim_arrays(const ct_optim_group *group, const ct_optim_param *param)
{
    const ct_optim_ops *ops = &ct_optim_kinds[group->kind];
    return ops->arrays != NULL ? ops->arrays(group, param) : ops->states(group);
}

bool
ct_optim_group_is_whole(const ct_optim_group *group)
{
    return ct_rule_is_of_whole(ct_optim_kinds[group->kind].rule(group));
}

static const ct_optim_ops *
ops_of(const ct_optim *optim, const ct_optim_param *param)
{
    return &ct_optim_kinds[optim->groups[param->group].kind];
}

static ct_status
check_param(const ct_optim *optim, size_t i, ct_error *err)
{
    const ct_optim_param *p = &optim->params[i];
    /* Before the group's operations are looked up. */
    if (check_group(optim, i, err) != CT_OK) {
        return CT_EINVAL;
    }
    if (!ct_dtype_is_float(p->dtype)) {
        return ct_fail(err, CT_EINVAL, "parameter %zu: dtype must be a float, got %s",
                       i, ct_dtype_name(p->dtype));
    }
    if (p->n != 0 && p->param == NULL) {
        return ct_fail(err, CT_EINVAL, "parameter %zu has a gradient but no memory", i);
    }
    const unsigned states = ct_optim_arrays(&optim->groups[p->group], p);
    for (unsigned k = 0; p->n != 0 && k < CT_OPTIM_MAX_STATES; k++) {
        if ((states >> k & 1) != 0 && p->state[k] == NULL) {
            return ct_fail(err, CT_EINVAL,
                           "parameter %zu: its state array %u is missing", i, k);
        }
    }
    return ops_of(optim, p)->check == NULL ? CT_OK : ops_of(optim, p)->check(p, i, err);
}

/* The index of a parameter's constants, worked out unless the group has them already. A
 * kind with `complete` has constants that depend on the parameter, so nothing is
 * shared. */
static ct_status
find_coef(ct_optim *optim, const ct_optim_param *param, const ct_optim_pass *pass,
          uint32_t *coef, ct_error *err)
{
    const ct_optim_ops *ops = ops_of(optim, param);
    const ct_optim_group *group = &optim->groups[param->group];
    group_cache *cache = &optim->caches[param->group];
    const uint64_t key = ops->key(param);
    if (cache->coef == 0 || cache->key != key || ops->complete != NULL) {
        const double clip = pass->clip ? optim->grads.groups[param->group].coef : 1.0;
        /* Maximizing is minimizing with the opposite gradient. */
        const double scale = (group->maximize ? -clip : clip) * pass->grad_scale;
        ct_status status = ct_optim_check_group(group, err);
        if (status != CT_OK) {
            return status;
        }
        ct_rule_coef *made = &optim->coefs[optim->n_coefs];
        ops->coef(made, group, key, scale);
        if (ops->complete != NULL) {
            ops->complete(made, group, param);
        }
        *cache = (group_cache){key, ++optim->n_coefs};
    }
    *coef = (uint32_t)(cache->coef - 1);
    return CT_OK;
}

static ct_update_span
span_of(const ct_optim_param *param, const ct_optim_group *group, uint32_t coef,
        uint64_t first)
{
    const unsigned states = ct_optim_kinds[group->kind].states(group);
    ct_update_span span = {.n = param->n,
                           .grad = param->grad,
                           .param = param->param,
                           .correction = param->correction,
                           .copy = param->copy,
                           .ema = param->ema,
                           .dtype = param->dtype,
                           .grad_dtype = param->grad_dtype,
                           .state_dtype = param->state_dtype,
                           .copy_dtype = param->copy_dtype,
                           .ema_dtype = param->ema_dtype,
                           .coef = coef,
                           .rounding = group->stochastic ? &group->rounding : NULL,
                           .first = first,
                           .begin = param->part.begin,
                           .whole = param->part.whole,
                           .rows = param->rows,
                           .cols = param->cols};
    size_t n = 0;
    for (unsigned k = 0; k < CT_OPTIM_MAX_STATES; k++) {
        if ((states >> k & 1) != 0) {
            span.quant[n] = param->quant[k];
            span.state[n++] = param->state[k];
        }
    }
    return span;
}

/* The first span of each rule, which is the end of the rule before. */
typedef struct rule_table {
    size_t begin[CT_RULE_COUNT + 1];
} rule_table;

/* Counts the spans of each rule and checks their parameters. */
static ct_status
count_rules(ct_optim *optim, rule_table *table, ct_error *err)
{
    *table = (rule_table){{0}};
    for (size_t i = 0; i < optim->n_params; i++) {
        const ct_optim_param *p = &optim->params[i];
        if (p->grad == NULL) {
            continue;
        }
        ct_status status = check_param(optim, i, err);
        if (status != CT_OK) {
            return status;
        }
        table->begin[ops_of(optim, p)->rule(&optim->groups[p->group]) + 1]++;
    }
    for (size_t r = 0; r < CT_RULE_COUNT; r++) {
        table->begin[r + 1] += table->begin[r];
    }
    return CT_OK;
}

/* Fills in coefs, and spans by rule, for the parameters that have a gradient. Sorted by
 * rule by counting, so that each rule is a single call of the device. */
static ct_status
plan(ct_optim *optim, const ct_optim_pass *pass, rule_table *table, ct_error *err)
{
    ct_update_span *spans = optim->spans;
    size_t next[CT_RULE_COUNT];
    uint64_t elements = 0;
    ct_status status = count_rules(optim, table, err);
    optim->n_coefs = 0;
    memcpy(next, table->begin, sizeof next);
    if (optim->n_groups != 0) {
        memset(optim->caches, 0, optim->n_groups * sizeof *optim->caches);
    }
    for (size_t i = 0; status == CT_OK && i < optim->n_params; i++) {
        const ct_optim_param *p = &optim->params[i];
        if (p->grad != NULL) {
            const ct_optim_group *group = &optim->groups[p->group];
            const ct_rule rule = ct_optim_kinds[group->kind].rule(group);
            uint32_t coef = 0;
            status = find_coef(optim, p, pass, &coef, err);
            optim->owner[next[rule]] = (uint32_t)i;
            spans[next[rule]++] = span_of(p, group, coef, elements + p->number);
        }
        /* Counted for skipped parameters too: the random bits of an element must not
         * depend on the other gradients. A multiple of 8, as Philox's blocks. */
        elements += ((p->numbered != 0 ? p->numbered : p->n) + 7) / 8 * 8;
    }
    return status;
}

/* ---- the update ------------------------------------------------------------------ */

static size_t
product_bytes(const ct_optim_param *p)
{
    return p->product == NULL ? 0 : ct_dtype_size(p->product_dtype);
}

/* After the update has succeeded: a failed update is not counted, and may be
 * repeated. */
static void
count_steps(ct_optim *optim)
{
    if (optim->n_groups != 0) {
        memcpy(optim->before, optim->groups, optim->n_groups * sizeof *optim->groups);
    }
    for (size_t g = 0; g < optim->n_groups; g++) {
        const ct_optim_ops *ops = &ct_optim_kinds[optim->groups[g].kind];
        if (ops->advance != NULL) {
            ops->advance(&optim->groups[g]);
        }
        optim->groups[g].rounding.step += optim->groups[g].stochastic;
    }
    for (size_t i = 0; i < optim->n_params; i++) {
        ct_optim_param *p = &optim->params[i];
        if (p->grad != NULL) {
            if (ops_of(optim, p)->count != NULL) {
                memcpy(&p->last_product, p->product, product_bytes(p));
                ops_of(optim, p)->count(&optim->groups[p->group], p);
            }
            p->step++;
        }
    }
}

/* The counts are as before the last count_steps(). */
static void
take_counts_back(ct_optim *optim)
{
    for (size_t i = 0; i < optim->n_params; i++) {
        ct_optim_param *p = &optim->params[i];
        if (p->grad != NULL) {
            if (ops_of(optim, p)->count != NULL) {
                memcpy(p->product, &p->last_product, product_bytes(p));
            }
            p->step--;
        }
    }
    if (optim->n_groups != 0) {
        memcpy(optim->groups, optim->before, optim->n_groups * sizeof *optim->groups);
    }
}

static ct_rule_run
run_of(ct_optim *optim, const rule_table *table, size_t rule, const ct_optim_pass *pass)
{
    const size_t begin = table->begin[rule];
    return (ct_rule_run){
        .device = optim->device,
        .buffers = &optim->buffers,
        .params = optim->params,
        .owner = optim->owner + begin,
        .spans = optim->spans + begin,
        .coefs = optim->coefs,
        .update = {.rule = (ct_rule)rule,
                   .coefs = optim->coefs,
                   .spans = optim->spans + begin,
                   .n_spans = table->begin[rule + 1] - begin,
                   .zero_grads = pass->zero_grads,
                   .ema_decay = pass->ema_decay,
                   .clip = pass->outcome},
    };
}

/* ---- updates in a graph ---------------------------------------------------------- */

/* FNV-1a of the spans, which have no padding; never 0. Of a gradient's address only the
 * alignment counts: the gradients of a graph may lie in a pool of memory of its own. */
static uint64_t
hash_layout(const ct_optim *optim, const rule_table *table)
{
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i < table->begin[CT_RULE_COUNT]; i++) {
        ct_update_span span = optim->spans[i];
        hash ^= (uintptr_t)span.grad % 64;
        span.grad = NULL;
        span.settled = NULL;
        for (size_t k = 0; k < sizeof span; k++) {
            hash = (hash ^ ((const unsigned char *)&span)[k]) * 0x100000001b3;
        }
    }
    return hash | 1;
}

/* The constants of the plan become those of the spans on the device. */
static ct_status
send_constants(ct_optim *optim, void *stream, ct_error *err)
{
    const size_t bytes = optim->n_coefs * sizeof *optim->coefs;
    ct_status status = optim->device->scratch_grow(&optim->constants, bytes, err);
    return status == CT_OK ? optim->device->send(stream, optim->constants.data,
                                                 optim->coefs, bytes, err)
                           : status;
}

static ct_status
plan_capturable(ct_optim *optim, void *stream, const rule_table *table,
                ct_capture capture, ct_error *err)
{
    const uint64_t layout = hash_layout(optim, table);
    ct_status status = CT_OK;
    if (capture == CT_CAPTURE_LATER) {
        status = send_constants(optim, stream, err);
        optim->captured = layout == optim->layout ? optim->captured : 0;
        optim->layout = layout;
    }
    else if (layout == optim->layout) {
        optim->captured = layout;
    }
    else {
        status =
            ct_fail(err, CT_EINVAL,
                    "the update to capture is not the last one made: parameters "
                    "that have a gradient, their memory or their state are others; "
                    "make one such update, then capture the next");
    }
    for (size_t i = 0; i < table->begin[CT_RULE_COUNT]; i++) {
        ct_update_span *span = &optim->spans[i];
        span->settled = (const ct_rule_coef *)optim->constants.data + span->coef;
    }
    return status;
}

ct_status
ct_optim_prepare_replay(ct_optim *optim, void *stream, const ct_optim_pass *pass,
                        ct_error *err)
{
    rule_table table;
    ct_status status = plan(optim, pass, &table, err);
    if (status == CT_OK && optim->captured != hash_layout(optim, &table)) {
        status =
            ct_fail(err, CT_EINVAL,
                    "the update to replay is not the one captured: parameters "
                    "that have a gradient, their memory or their state are others; "
                    "keep the gradients (zero_grad() sets None), or make an "
                    "update and capture the next");
    }
    if (status == CT_OK) {
        status = send_constants(optim, stream, err);
    }
    if (status == CT_OK) {
        count_steps(optim);
    }
    return status;
}

/* Whether the run has parameters or state in a file. */
static bool
is_in_file(const ct_optim *optim, const ct_rule_run *run)
{
    return (optim->disk.memory != NULL || optim->disk.n_shards != 0) &&
           ct_disk_state_has(&optim->disk, run);
}

ct_status
ct_optim_update(ct_optim *optim, void *stream, const ct_optim_pass *pass, ct_error *err)
{
    rule_table table;
    ct_status status = plan(optim, pass, &table, err);
    if (status == CT_OK && pass->capture != CT_CAPTURE_NEVER) {
        status = plan_capturable(optim, stream, &table, pass->capture, err);
    }
    else {
        optim->layout = optim->captured = 0;
    }
    for (size_t r = 0; status == CT_OK && r < CT_RULE_COUNT; r++) {
        /* All rules are prepared before the first is run: a failure here changes
         * nothing. */
        const ct_rule_run run = run_of(optim, &table, r, pass);
        status = ct_rule_run_prepare(&run, err);
        if (status == CT_OK && is_in_file(optim, &run)) {
            status = ct_disk_state_prepare(&optim->disk, &run, err);
        }
    }
    for (size_t r = 0; status == CT_OK && r < CT_RULE_COUNT; r++) {
        ct_rule_run run = run_of(optim, &table, r, pass);
        if (is_in_file(optim, &run)) {
            status = ct_disk_state_update(&optim->disk, &run, stream, err);
        }
        else if (run.update.n_spans != 0) {
            status = ct_rule_run_update(&run, stream, err);
        }
    }
    if (status == CT_OK && pass->capture != CT_CAPTURE_NOW) {
        count_steps(optim);
    }
    return status;
}

/* ---- an update by a norm on the device ------------------------------------------- */

bool
ct_optim_can_defer(const ct_optim *optim)
{
    bool can = true;
    for (size_t g = 0; can && g < optim->n_groups; g++) {
        const ct_optim_group *group = &optim->groups[g];
        can = group->max_norm == 0.0 &&
              !(group->kind == CT_OPTIM_LAMB && group->lamb.max_grad_norm > 0.0);
    }
    return can;
}

bool
ct_optim_can_capture(const ct_optim *optim)
{
    bool can = ct_optim_can_defer(optim);
    for (size_t g = 0; can && g < optim->n_groups; g++) {
        const ct_optim_group *group = &optim->groups[g];
        const ct_optim_ops *ops = &ct_optim_kinds[group->kind];
        can = !group->stochastic && ops->advance == NULL && ops->count == NULL &&
              !ct_rule_is_of_whole(ops->rule(group));
    }
    return can;
}

/* The content of optim->outcome. */
typedef struct agreed_outcome {
    ct_clip_outcome outcome;
    double sum, all; /* of this rank, and of all ranks */
} agreed_outcome;

/* Without a global norm each rank's own is clipped, and a sum over the ranks shows
 * whether all are finite. */
static ct_status
clip_on_ranks(ct_optim *optim, void *stream, const ct_clip_request *request,
              const ct_optim_ranks *ranks, ct_error *err)
{
    const ct_device *device = optim->device;
    agreed_outcome *const there = optim->outcome.data;
    ct_grads *const grads = &optim->grads;
    const ct_span own = {&there->sum, 1, CT_F64}, all = {&there->all, 1, CT_F64};
    const ct_span *const added = ranks->global_norm ? &own : &all;
    const ct_request add = {.what = CT_ALL_REDUCE, .op = CT_REDUCE_SUM, .in = *added};
    ct_status status = device->norm(stream, &grads->scratch, request->norm_type,
                                    grads->spans, grads->n, own.data, err);
    if (status == CT_OK && !ranks->global_norm) {
        status = device->copy(stream, &all, &own, 1, err);
    }
    if (status == CT_OK) {
        status = ct_comm_enqueue(ranks->comm, &add, stream, err);
    }
    return status == CT_OK ? device->decide(stream, request, own.data, added->data,
                                            &there->outcome, err)
                           : status;
}

ct_status
ct_optim_clip(ct_optim *optim, void *stream, const ct_clip_request *request,
              const ct_optim_ranks *ranks, const ct_clip_outcome **outcome,
              ct_error *err)
{
    const ct_device *device = optim->device;
    ct_grads *grads;
    ct_status status = ct_optim_grads(optim, &grads, err);
    if (status == CT_OK) {
        status = device->scratch_grow(&optim->outcome, sizeof(agreed_outcome), err);
    }
    if (status == CT_OK) {
        status = ranks->comm != NULL
                     ? clip_on_ranks(optim, stream, request, ranks, err)
                     : device->clip(stream, &grads->scratch, request, grads->spans,
                                    grads->n, optim->outcome.data, err);
    }
    *outcome = optim->outcome.data;
    return status == CT_OK ? device->read_begin(stream, &optim->read, *outcome,
                                                sizeof **outcome, err)
                           : status;
}

ct_status
ct_optim_await(ct_optim *optim, ct_clip_outcome *outcome, ct_error *err)
{
    ct_status status = optim->device->read_end(&optim->read, outcome, err);
    if (status == CT_OK && outcome->skip) {
        take_counts_back(optim);
    }
    return status;
}
