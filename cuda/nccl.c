/* Loads libnccl.so.2 by name, so that the plugin needs no NCCL where it is built, and a
 * machine without NCCL can still load the plugin. */
#include "nccl.h"

#include "dynlib.h"

#include <pthread.h>

static const ct_dynlib_spec library = {"libnccl.so.2", "nvidia/nccl/lib",
                                       "nvidia-nccl-cu13>=2.27,<3"};
static const ct_dynlib_symbol symbols[] = {
    {"ncclGetVersion",         offsetof(ct_nccl, get_version)   },
    {"ncclGetUniqueId",        offsetof(ct_nccl, get_id)        },
    {"ncclCommInitRankConfig", offsetof(ct_nccl, init_rank)     },
    {"ncclCommSplit",          offsetof(ct_nccl, split)         },
    {"ncclCommDestroy",        offsetof(ct_nccl, destroy)       },
    {"ncclCommAbort",          offsetof(ct_nccl, abort)         },
    {"ncclCommGetAsyncError",  offsetof(ct_nccl, async_error)   },
    {"ncclGetErrorString",     offsetof(ct_nccl, error_string)  },
    {"ncclAllReduce",          offsetof(ct_nccl, all_reduce)    },
    {"ncclAllGather",          offsetof(ct_nccl, all_gather)    },
    {"ncclReduceScatter",      offsetof(ct_nccl, reduce_scatter)},
    {"ncclBroadcast",          offsetof(ct_nccl, broadcast)     },
    {"ncclReduce",             offsetof(ct_nccl, reduce)        },
    {"ncclSend",               offsetof(ct_nccl, send)          },
    {"ncclRecv",               offsetof(ct_nccl, receive)       },
    {"ncclGroupStart",         offsetof(ct_nccl, group_start)   },
    {"ncclGroupEnd",           offsetof(ct_nccl, group_end)     },
};

static ct_nccl functions;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool loaded;

ct_status
ct_nccl_borrow(const ct_nccl **nccl, ct_error *err)
{
    ct_status status = CT_OK;
    (void)pthread_mutex_lock(&lock);
    if (!loaded) {
        status = ct_dynlib_load(&library, symbols, sizeof symbols / sizeof symbols[0],
                                &functions, err);
        loaded = status == CT_OK;
    }
    (void)pthread_mutex_unlock(&lock);
    if (status == CT_OK) {
        *nccl = &functions;
    }
    return status;
}

ct_status
ct_nccl_check(ct_nccl_result result, const char *what, ct_error *err)
{
    if (result == 0) {
        return CT_OK;
    }
    return ct_fail(err, CT_ECOMM, "cannot %s: NCCL says %s", what,
                   functions.error_string(result));
}

ct_status
ct_nccl_version(int *version, ct_error *err)
{
    const ct_nccl *nccl = NULL;
    ct_status status = ct_nccl_borrow(&nccl, err);
    return status == CT_OK
               ? ct_nccl_check(nccl->get_version(version), "ask for its version", err)
               : status;
}
