/* Libraries found at run time: cuBLAS and NCCL.
 *
 * Searched in this order: the libraries already loaded (torch's, to share them),
 * the wheels of NVIDIA under the folders of set_path, the loader's own path.
 * A build needs neither the libraries nor their headers. */
#ifndef CT_CUDA_DYNLIB_H
#define CT_CUDA_DYNLIB_H

#include "core/base/status.h"

#include <stddef.h>

CT_BEGIN_DECLS

typedef struct ct_dynlib_spec {
    const char *file;    /* "libcublas.so.13" */
    const char *folder;  /* below a folder of the path: "nvidia/cu13/lib" */
    const char *install; /* requirement for pip: "nvidia-cublas>=13,<14" */
} ct_dynlib_spec;

/* A function of the library, and the pointer to fill in. */
typedef struct ct_dynlib_symbol {
    const char *name;
    size_t offset; /* of the function pointer in the caller's table */
} ct_dynlib_symbol;

/* Replaces the folders to search for wheels; the strings are copied. CT_ENOMEM leaves
 * the old folders. Not to be called while a library is being opened. */
CT_NODISCARD ct_status ct_dynlib_set_path(const char *const *folders, size_t n,
                                          ct_error *err);

/* Opens the library and fills in the function pointers of table, all or none.
 * CT_EDEVICE names the searched folders and the package to install. The library stays
 * loaded. */
CT_NODISCARD ct_status ct_dynlib_load(const ct_dynlib_spec *spec,
                                      const ct_dynlib_symbol *symbols, size_t n,
                                      void *table, ct_error *err);

CT_END_DECLS

#endif
