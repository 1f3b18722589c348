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
#include <unistd.h>

CT_BEGIN_DECLS

typedef struct ct_owner {
    int32_t process;
} ct_owner;

/* The calling process. */
static inline ct_owner
ct_owner_here(void)
{
    const ct_owner here = {(int32_t)getpid()}; /* as C++ takes it too */
    return here;
}

/* A process number is reused only after the end of the process, and with it of every
 * resource a child could damage. */
static inline bool
ct_owner_is_here(ct_owner owner)
{
    return owner.process == (int32_t)getpid();
}

/* CT_ECOMM in a forked child: "DOING: THING belongs to process N ...". */
CT_NODISCARD static inline ct_status
ct_owner_check(ct_owner owner, const char *doing, const char *thing, ct_error *err)
{
    return ct_owner_is_here(owner)
               ? CT_OK
               : ct_fail(err, CT_ECOMM,
                         "%s: %s belongs to process %d; this is process %d, which was "
                         "forked from it and cannot use it",
                         doing, thing, (int)owner.process, (int)getpid());
}

CT_END_DECLS

#endif
