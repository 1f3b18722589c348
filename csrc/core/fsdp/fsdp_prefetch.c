#include "core/fsdp/fsdp_prefetch.h"

/* Each work has to be waited for, whatever became of those before it; the first failure
 * is the one that tells why. */
static ct_status
wait_for_groups(ct_fsdp *unit, ct_comm *comm, ct_error *err)
{
    ct_status status = CT_OK;
    ct_error later;
    for (size_t i = 0; i < unit->n_groups; i++) {
        ct_work *work = unit->groups[i].work;
        unit->groups[i].work = NULL;
        const ct_status ended =
            ct_comm_wait(comm, work, status == CT_OK ? err : &later);
        status = status == CT_OK ? ended : status;
    }
    return status;
}

static void
let_go(ct_fsdp *unit)
{
    ct_mapping_release(unit->full, &unit->ledger->spares);
    unit->ledger->live -= unit->full->bytes;
}

ct_status
ct_fsdp_end_gather(ct_fsdp *unit, ct_comm *comm, ct_error *err)
{
    const ct_status status = wait_for_groups(unit, comm, err);
    unit->begun = false;
    unit->ledger->begun--;
    unit->gathered = status == CT_OK;
    if (!unit->gathered) {
        let_go(unit);
    }
    return status;
}

void
ct_fsdp_cancel_gather(ct_fsdp *unit, ct_comm *comm)
{
    ct_error unused;
    if (unit->begun && ct_fsdp_end_gather(unit, comm, &unused) == CT_OK) {
        ct_fsdp_release(unit);
    }
}
