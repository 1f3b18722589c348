/* The functions of CUDA's driver that map memory, found through the runtime: a build
 * links no driver, and a machine without a driver can load the plugin. */
#ifndef CT_CUDA_DRIVER_H
#define CT_CUDA_DRIVER_H

#include "core/base/status.h"

#include <cuda.h>

/* Name without the prefix cu, field, parameters. */
#define CT_EACH_DRIVER_FUNCTION(X)                                                     \
    X(MemAddressReserve, reserve,                                                      \
      (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                \
    X(MemAddressFree, unreserve, (CUdeviceptr, size_t))                                \
    X(MemGetAllocationGranularity, granularity,                                        \
      (size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags))       \
    X(MemCreate, create,                                                               \
      (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,            \
       unsigned long long))                                                            \
    X(MemRelease, release, (CUmemGenericAllocationHandle))                             \
    X(MemMap, map,                                                                     \
      (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)) \
    X(MemUnmap, unmap, (CUdeviceptr, size_t))                                          \
    X(MemSetAccess, set_access, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))

typedef struct ct_driver {
#define CT_FIELD(name, field, params) CUresult(*field) params;
    CT_EACH_DRIVER_FUNCTION(CT_FIELD)
#undef CT_FIELD
} ct_driver;

/* Found at the first call and kept. CT_EDEVICE names a function missing in the driver.
 */
CT_NODISCARD ct_status ct_driver_borrow(const ct_driver **driver, ct_error *err);

/* CT_ENOMEM if the device is out of memory, else CT_EDEVICE with the driver's number.
 */
CT_NODISCARD ct_status ct_driver_check(CUresult result, const char *what,
                                       ct_error *err);

#endif
