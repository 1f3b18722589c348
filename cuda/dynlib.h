/* Libraries found at run time: cuBLAS and NCCL.
 *
 * Looked for in this order: what the process has loaded already (torch's, so that both
 * use one), the wheels of NVIDIA under the folders of set_path, the loader's own path.
 * A build needs neither the libraries nor their headers. */
#ifndef CT_CUDA_DYNLIB_H
#define CT_CUDA_DYNLIB_H

#include "core/base/status.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_dynlib_spec {
    const char *file;    /* "libcublas.so.13" */
    const char *folder;  /* below a folder of the path: "nvidia/cu13/lib" */
    const char *install; /* what to tell pip: "nvidia-cublas>=13,<14" */
} ct_dynlib_spec;

/* A function of the library, and where its address goes. */
typedef struct ct_dynlib_symbol {
    const char *name;
    size_t offset; /* of the function pointer in the caller's table */
} ct_dynlib_symbol;

/* Replaces the folders below which wheels are looked for; the strings are copied.
 * CT_ENOMEM leaves the old ones. Not to be called while a library is being opened. */
CT_NODISCARD ct_status ct_dynlib_set_path(const char *const *folders, size_t n,
                                          ct_error *err);

/* Opens the library and fills in the function pointers of table, all of them or none.
 * CT_EDEVICE says where it was looked for and what to install. The library stays
 * loaded. */
CT_NODISCARD ct_status ct_dynlib_load(const ct_dynlib_spec *spec,
                                      const ct_dynlib_symbol *symbols, size_t n,
                                      void *table, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
