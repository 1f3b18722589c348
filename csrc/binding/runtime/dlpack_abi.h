/* The parts of DLPack that read a tensor's address, by its C exchange table (ABI
 * version 1), and export memory, by its older capsule.
 *
 * torch publishes the table from 2.10 on as the capsule "dlpack_exchange_api" in
 * torch.Tensor.__dlpack_c_exchange_api__. Declared here since we build without torch.
 *
 * Source: the DLPack specification, dlpack.h 1.3. */
#ifndef CTPY_DLPACK_ABI_H
#define CTPY_DLPACK_ABI_H

#include <stdint.h>

#define CTPY_DLPACK_MAJOR 1
#define CTPY_DLPACK_CAPSULE "dlpack_exchange_api"

enum {
    CTPY_DL_CPU = 1,
    CTPY_DL_CUDA = 2,
    CTPY_DL_CUDA_HOST = 3
}; /* device types; the first and the last are host memory */
enum {
    CTPY_DL_INT = 0,
    CTPY_DL_UINT = 1,
    CTPY_DL_FLOAT = 2,
    CTPY_DL_BFLOAT = 4,
    CTPY_DL_BOOL = 6
}; /* type codes */

typedef struct ctpy_dl_tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    uint8_t type_code;
    uint8_t type_bits;
    uint16_t type_lanes;
    int64_t *shape;   /* the producer's; valid until the tensor changes */
    int64_t *strides; /* in elements; NULL means contiguous */
    uint64_t byte_offset;
} ctpy_dl_tensor;

typedef struct ctpy_dlpack_api {
    uint32_t major, minor;
    struct ctpy_dlpack_api *older; /* a table of an older version, or NULL */
    void *managed_tensor_allocator;
    void *managed_tensor_from_object;
    void *managed_tensor_to_object;
    int (*tensor_from_object)(void *op, ctpy_dl_tensor *out); /* or NULL */
    /* The stream that torch works on now, of the GPU of that number; or NULL. */
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **stream);
} ctpy_dlpack_api;

/* A tensor in a capsule called DLPACK_CAPSULE; the receiver renames the capsule. */
#define CTPY_DLPACK_TENSOR "dltensor"

typedef struct ctpy_dl_managed {
    ctpy_dl_tensor tensor;
    void *context; /* the producer's */
    void (*deleter)(struct ctpy_dl_managed *self);
} ctpy_dl_managed;

#endif
