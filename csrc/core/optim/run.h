/* One rule's share of an update, for core/optim/optim.c alone: rules that look at more
 * than an element take more than one kernel. */
#ifndef CORE_OPTIM_RUN_H
#define CORE_OPTIM_RUN_H

#include "core/optim/optim.h"

/* The device's memory between two kernels, and room for lists; starts as {0}. */
typedef struct ct_optim_room {
    ct_scratch partial;     /* the kernels' own */
    ct_scratch sums;        /* CT_MEASURES doubles of each span */
    ct_scratch settled;     /* ct_rule_coef of each span */
    ct_scratch factors;     /* Adafactor's rows and columns */
    ct_scratch factor_sums; /* what they are made from */
    ct_scratch matrices;    /* Muon's: of the largest parameter */
    ct_scratch exchange;    /* sums of parts, side by side */
    void *list;             /* the host's: of ct_span or ct_factored */
    void *places;           /* of ct_span: where the sums of each span are */
    void *pairs;            /* two of ct_span for each span, for core/optim/run.c */
    void *described;        /* of ct_optim_part: what ranks tell of their parts */
    void *numbers;          /* of size_t: of the spans that are parts */
    size_t list_capacity, places_capacity, pairs_capacity;
    size_t described_capacity, numbers_capacity;
} ct_optim_room;

/* All spans of one rule. */
typedef struct ct_optim_share {
    const ct_device *device;
    ct_optim_room *room;
    const ct_optim_param *params;
    const uint32_t *owner; /* spans[i] is of params[owner[i]] */
    ct_update_span *spans;
    ct_rule_coef *coefs;
    ct_update update; /* whose spans and coefs these are */
} ct_optim_share;

void ct_optim_room_fini(const ct_device *device, ct_optim_room *room);

/* Makes room on the host for n parameters. */
CT_NODISCARD ct_status ct_optim_room_reserve(ct_optim_room *room, size_t n,
                                             ct_error *err);

/* Gets the device's memory that run will take, so that it need not fail, and has the
 * ranks agree on what they have parts of. */
CT_NODISCARD ct_status ct_optim_share_prepare(const ct_optim_share *share,
                                              ct_error *err);
/* The first two parts of an update by a measured rule: each span has its constants. */
CT_NODISCARD ct_status ct_optim_share_run(ct_optim_share *share, void *stream,
                                          ct_error *err);

#endif
