/* How a gather that has begun ends; for core/fsdp/unit.c alone. */
#ifndef CT_FSDP_PREFETCH_H
#define CT_FSDP_PREFETCH_H

#include "core/fsdp/unit.h"

/* Waits for the collectives of a unit that is `begun`, all of them on failure too: it
 * is gathered then, or released. */
CT_NODISCARD ct_status ct_fsdp_end_gather(ct_fsdp *unit, ct_comm *comm, ct_error *err);

#endif
