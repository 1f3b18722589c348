/* Memory at a fixed address whose pages come and go.
 *
 * Views into it stay valid for its whole life. Release gives the pages back to the
 * system: what is there afterwards is zeros, or, where watched, a fault at the first
 * touch, so that use after release is found where it happens. */
#ifndef CT_MAPPING_H
#define CT_MAPPING_H

#include "core/ct_status.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_mapping ct_mapping;

/* Where such memory comes from: this process alone, or what other ranks read too. */
typedef struct ct_mapping_ops {
    void (*release)(ct_mapping *map);
    /* Makes them usable after a release; no call is needed before the first use. */
    void (*obtain)(ct_mapping *map);
    void (*close)(ct_mapping *map);
} ct_mapping_ops;

/* Starts as {0}, which is empty and may be closed. */
struct ct_mapping {
    const ct_mapping_ops *ops;
    void *data;
    size_t bytes;
    bool watched;
};

/* Zeroed pages of this process; nothing is taken before it is touched. watched: from a
 * release on to `obtain` every touch faults. bytes may be 0. CT_ENOMEM. */
CT_NODISCARD ct_status ct_mapping_open(ct_mapping *map, size_t bytes, bool watched,
                                       ct_error *err);

void ct_mapping_release(ct_mapping *map);
void ct_mapping_obtain(ct_mapping *map);
void ct_mapping_close(ct_mapping *map);

#ifdef __cplusplus
}
#endif

#endif
