/* The process that made a resource, as a fork copies the name of a resource only.
 *
 * A forked child has a copy of every object, and its finalizers run for all of them.
 * Resources beyond the child's own memory (a rank's place in a group, memory that ranks
 * share, a folder being written) stay the parent's: a release asks here first, and in a
 * child frees the child's copy alone. */
#ifndef CT_OWNER_H
#define CT_OWNER_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stdint.h>

CT_BEGIN_DECLS

typedef struct ct_owner {
    int32_t process;
} ct_owner;

ct_owner ct_owner_here(void); /* the calling process */
bool ct_owner_is_here(ct_owner owner);

/* CT_ECOMM in a forked child: "DOING: THING belongs to process N ...". */
CT_NODISCARD ct_status ct_owner_check(ct_owner owner, const char *doing,
                                      const char *thing, ct_error *err);

CT_END_DECLS

#endif
