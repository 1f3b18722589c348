/* The memory in which the ranks of one machine read each other's data.
 *
 * A lane is a rank's part of a segment in which every rank has one as long, in rank
 * order. All ranks add the same segments in the same order, so that an index and an
 * offset mean the same to all. */
#ifndef CT_LANES_H
#define CT_LANES_H

#include "core/base/pages.h"

typedef struct ct_lanes {
    ct_pages **own; /* this rank's lane of each segment */
    size_t n, room;
} ct_lanes;

typedef struct ct_lane_place {
    int lane; /* index, or -1: in none */
    size_t offset;
} ct_lane_place;

/* Makes room for one more (CT_ENOMEM), then holds it. */
CT_NODISCARD ct_status ct_lanes_reserve(ct_lanes *lanes, ct_error *err);
void ct_lanes_add(ct_lanes *lanes, ct_pages *own);

/* Where `bytes` at `data` lie whole in this rank's lanes; NULL lies in none. */
ct_lane_place ct_lanes_find(const ct_lanes *lanes, const void *data, size_t bytes);

/* What lies there in that rank's lane; NULL for what lies in none. */
char *ct_lanes_at(const ct_lanes *lanes, int rank, ct_lane_place place);

void ct_lanes_fini(ct_lanes *lanes); /* all zeros is fine */

#endif
