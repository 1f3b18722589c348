/* The process that made a resource which outlives a fork in name only.
 *
 * A forked child has a copy of every object, and its finalizers run for all of them.
 * What an object stands for beyond the child's own memory (a rank's place in a group,
 * memory that ranks share, a folder being written) stays the parent's: whoever releases
 * it asks here first, and leaves in a child everything but the child's copy as it is.
 */
#ifndef CT_OWNER_H
#define CT_OWNER_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_owner {
    int32_t process;
} ct_owner;

ct_owner ct_owner_here(void); /* the calling process */
bool ct_owner_is_here(ct_owner owner);

/* CT_ECOMM in a forked child: "DOING: THING belongs to process N ...". */
CT_NODISCARD ct_status ct_owner_check(ct_owner owner, const char *doing,
                                      const char *thing, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
