/* NCCL's functions, loaded at first use. */
#ifndef CT_CUDA_NCCL_H
#define CT_CUDA_NCCL_H

#include "core/comm/plugin.h"

#include <cuda_runtime_api.h>

CT_BEGIN_DECLS

/* The part of nccl.h that is used; the numbers are NCCL's ABI. */
typedef struct ncclComm *ct_nccl_handle;
typedef int ct_nccl_result; /* 0 is success */
typedef struct ct_nccl_group_id {
    char bytes[CT_COMM_ID_BYTES];
} ct_nccl_group_id;
enum {
    CT_NCCL_IN_PROGRESS = 7,
    CT_NCCL_NO_COLOR = -1 /* of a split: in none of the groups */
};

#define CT_NCCL_MAGIC 0xcafebeefU
#define CT_NCCL_CONFIG_VERSION 21800U

/* ncclConfig_t as of NCCL 2.18; INT_MIN leaves a choice to NCCL; newer ones read as
 * much of it as `version` says. */
typedef struct ct_nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
} ct_nccl_config;

typedef struct ct_nccl {
    ct_nccl_result (*get_version)(int *version);
    ct_nccl_result (*get_id)(ct_nccl_group_id *id);
    ct_nccl_result (*init_rank)(ct_nccl_handle *comm, int world_size,
                                ct_nccl_group_id id, int rank, ct_nccl_config *config);
    ct_nccl_result (*split)(ct_nccl_handle comm, int color, int key,
                            ct_nccl_handle *made, ct_nccl_config *config);
    ct_nccl_result (*destroy)(ct_nccl_handle comm);
    ct_nccl_result (*abort)(ct_nccl_handle comm);
    ct_nccl_result (*async_error)(ct_nccl_handle comm, ct_nccl_result *result);
    const char *(*error_string)(ct_nccl_result result);
    ct_nccl_result (*all_reduce)(const void *in, void *out, size_t n, int dtype, int op,
                                 ct_nccl_handle comm, cudaStream_t stream);
    ct_nccl_result (*all_gather)(const void *in, void *out, size_t n, int dtype,
                                 ct_nccl_handle comm, cudaStream_t stream);
    ct_nccl_result (*reduce_scatter)(const void *in, void *out, size_t n, int dtype,
                                     int op, ct_nccl_handle comm, cudaStream_t stream);
    ct_nccl_result (*broadcast)(const void *in, void *out, size_t n, int dtype,
                                int root, ct_nccl_handle comm, cudaStream_t stream);
    ct_nccl_result (*reduce)(const void *in, void *out, size_t n, int dtype, int op,
                             int root, ct_nccl_handle comm, cudaStream_t stream);
    ct_nccl_result (*send)(const void *in, size_t n, int dtype, int peer,
                           ct_nccl_handle comm, cudaStream_t stream);
    ct_nccl_result (*receive)(void *out, size_t n, int dtype, int peer,
                              ct_nccl_handle comm, cudaStream_t stream);
    ct_nccl_result (*group_start)(void);
    ct_nccl_result (*group_end)(void);
} ct_nccl;

/* The functions, the same for the whole process. CT_EDEVICE when NCCL cannot be found.
 */
CT_NODISCARD ct_status ct_nccl_borrow(const ct_nccl **nccl, ct_error *err);

/* CT_ECOMM, with NCCL's word for it, unless result is success. */
CT_NODISCARD ct_status ct_nccl_check(ct_nccl_result result, const char *what,
                                     ct_error *err);

/* The version, 10000 * major + 100 * minor + patch. */
CT_NODISCARD ct_status ct_nccl_version(int *version, ct_error *err);

CT_END_DECLS

#endif
