/* Ownership by process number. */
#define _POSIX_C_SOURCE 200809L /* getpid */
#include "core/base/owner.h"

#include <unistd.h>

ct_owner
ct_owner_here(void)
{
    return (ct_owner){(int32_t)getpid()};
}

/* A process number is reused only after the end of the process, and with it of every
 * resource a child could damage. */
bool
ct_owner_is_here(ct_owner owner)
{
    return owner.process == (int32_t)getpid();
}

ct_status
ct_owner_check(ct_owner owner, const char *doing, const char *thing, ct_error *err)
{
    return ct_owner_is_here(owner)
               ? CT_OK
               : ct_fail(err, CT_ECOMM,
                         "%s: %s belongs to process %d; this is process %d, which was "
                         "forked from it and cannot use it",
                         doing, thing, (int)owner.process, (int)getpid());
}
