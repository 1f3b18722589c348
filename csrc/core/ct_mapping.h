/* Memory at a fixed address whose pages come and go.
 *
 * Views into it stay valid for its whole life. What is released reads as zeros, or,
 * where watched, ends in a fault at the first touch, so that use after release is found
 * where it happens.
 *
 * Its pages need not go back to the system: that has to find and to zero new ones,
 * which costs as much as a copy of them. They can be moved aside to mappings that are
 * obtained later, each at its own address. */
#ifndef CT_MAPPING_H
#define CT_MAPPING_H

#include "core/ct_status.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_spare ct_spare;

/* Pages that lie ready for mappings, not more than these have had at once. Starts as
 * {NULL}, which is empty and may be closed. */
typedef struct ct_spares {
    ct_spare *first;
} ct_spares;

/* Starts as {0}, which is empty and may be closed. */
typedef struct ct_mapping {
    void *data;
    size_t bytes;
    ct_spare *lent; /* whose pages these are; NULL: its own */
    bool watched;
} ct_mapping;

/* Zeroed pages of this process; nothing is taken before it is touched. watched: from a
 * release on to `obtain` every touch faults. bytes may be 0. CT_ENOMEM. */
CT_NODISCARD ct_status ct_mapping_open(ct_mapping *map, size_t bytes, bool watched,
                                       ct_error *err);

/* Takes the memory away, into spares, or to the system if that is NULL. */
void ct_mapping_release(ct_mapping *map, ct_spares *spares);

/* Makes it usable after a release, with pages of spares if there are; no call is needed
 * before the first use. What is in it is whatever was. */
void ct_mapping_obtain(ct_mapping *map, ct_spares *spares);

void ct_mapping_close(ct_mapping *map);

/* Gives what lies ready back to the system. */
void ct_spares_discard(ct_spares *spares);
void ct_spares_close(ct_spares *spares);

#ifdef __cplusplus
}
#endif

#endif
