/* The update of all parameters of one rule, for core/optim/optim.c alone: rules that
 * look at a whole parameter take more than one kernel. */
#ifndef CORE_OPTIM_RUN_H
#define CORE_OPTIM_RUN_H

#include "core/optim/optim.h"

/* Buffers between two kernels, and lists; starts as {0}. */
typedef struct ct_run_buffers {
    /* In the device's memory. */
    ct_scratch partial;     /* the kernels' own */
    ct_scratch sums;        /* CT_MEASURES doubles of each span */
    ct_scratch settled;     /* ct_rule_coef of each span */
    ct_scratch factors;     /* Adafactor's rows and columns */
    ct_scratch factor_sums; /* the sums of squares behind the factors */
    ct_scratch matrices;    /* Muon's, of the largest parameter */
    ct_scratch exchange;    /* sums of parts, side by side; messages of Muon */
    ct_update_table tables[CT_RULE_COUNT];
    /* In the host's. */
    void *list;      /* of ct_factored, or two lists of ct_span */
    void *places;    /* of ct_span: the sums of each span */
    void *pairs;     /* two lists of ct_span */
    void *described; /* the parts of all ranks */
    void *numbers;   /* size_t: the spans that are parts */
    size_t list_capacity, places_capacity, pairs_capacity;
    size_t described_capacity, numbers_capacity;
} ct_run_buffers;

/* All spans of one rule. */
typedef struct ct_rule_run {
    const ct_device *device;
    ct_run_buffers *buffers;
    const ct_optim_param *params;
    const uint32_t *owner; /* spans[i] is of params[owner[i]] */
    ct_update_span *spans;
    ct_rule_coef *coefs;
    ct_update update; /* of these spans by these constants */
} ct_rule_run;

/* Whether a parameter is updated as a whole: by a measured rule, or by Muon's, whose
 * direction alone is made element by element. */
static inline bool
ct_rule_is_of_whole(ct_rule rule)
{
    return rule == CT_RULE_muon || ct_rule_is_measured(rule) != 0;
}

void ct_run_buffers_fini(const ct_device *device, ct_run_buffers *buffers);

/* Releases the device's memory alone; the next run takes it anew. */
void ct_run_buffers_release(const ct_device *device, ct_run_buffers *buffers);

/* Reserves the host's lists for n parameters. */
CT_NODISCARD ct_status ct_run_buffers_reserve(ct_run_buffers *buffers, size_t n,
                                              ct_error *err);

/* Reserves the device's memory of the update, so that the update need not fail, and
 * checks that the parts of all ranks fit each other. */
CT_NODISCARD ct_status ct_rule_run_prepare(const ct_rule_run *run, ct_error *err);
CT_NODISCARD ct_status ct_rule_run_update(ct_rule_run *run, void *stream,
                                          ct_error *err);

#endif
