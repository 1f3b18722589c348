#include "core/comm/comm.h"
#include "core/base/pages.h"

ct_status
ct_comm_memory(ct_comm *comm, size_t bytes, ct_pages **memory, ct_error *err)
{
    return comm->ops->memory != NULL ? comm->ops->memory(comm, bytes, memory, err)
                                     : ct_pages_new(memory, bytes, err);
}
