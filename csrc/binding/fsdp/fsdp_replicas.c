/* Units whose shards other groups of ranks have too: hybrid sharding. */
#include "binding/fsdp/unit.h"

int
fsdp_lend_replicas(FSDPUnit *self)
{
    if (self->replicas == NULL) {
        return 0;
    }
    ct_comm *comm = ctpy_comm_borrow(fsdp_state_borrow(self), self->replicas);
    if (comm == NULL) {
        return -1;
    }
    ((Communicator *)self->replicas)->busy++;
    self->core.replicas = comm;
    return 0;
}

void
fsdp_return_replicas(FSDPUnit *self)
{
    if (self->core.replicas != NULL) {
        ((Communicator *)self->replicas)->busy--;
        self->core.replicas = NULL;
    }
}
