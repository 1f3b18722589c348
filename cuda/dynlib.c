/* Opens cuBLAS and NCCL: loaded libraries first, then wheels, then the loader's path.
 */
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include "dynlib.h"

#include "core/base/alloc.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

/* A block of n consecutive strings with terminators. */
static char *path;
static size_t path_n;

ct_status
ct_dynlib_set_path(const char *const *folders, size_t n, ct_error *err)
{
    size_t bytes = 1;
    for (size_t i = 0; i < n; i++) {
        bytes += strlen(folders[i]) + 1;
    }
    char *block = ct_alloc(bytes);
    if (block == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a search path of %zu bytes",
                       bytes);
    }
    char *next = block;
    for (size_t i = 0; i < n; i++) {
        const size_t length = strlen(folders[i]) + 1;
        memcpy(next, folders[i], length);
        next += length;
    }
    ct_free(path);
    path = block;
    path_n = n;
    return CT_OK;
}

static void *
open_wheel(const ct_dynlib_spec *spec)
{
    const char *folder = path;
    for (size_t i = 0; i < path_n; i++) {
        char file[PATH_MAX];
        const int length =
            snprintf(file, sizeof file, "%s/%s/%s", folder, spec->folder, spec->file);
        void *library = length > 0 && (size_t)length < sizeof file
                            ? dlopen(file, RTLD_NOW | RTLD_LOCAL)
                            : NULL;
        if (library != NULL) {
            return library;
        }
        folder += strlen(folder) + 1;
    }
    return NULL;
}

static void *
open_library(const ct_dynlib_spec *spec)
{
    void *library = dlopen(spec->file, RTLD_NOLOAD | RTLD_NOW);
    if (library == NULL) {
        library = open_wheel(spec);
    }
    return library != NULL ? library : dlopen(spec->file, RTLD_NOW | RTLD_LOCAL);
}

/* POSIX lets an object pointer hold a function's address; ISO C has no such cast. */
static void
set(void *table, const ct_dynlib_symbol *symbol, const void *address)
{
    memcpy((char *)table + symbol->offset, (const void *)&address, sizeof address);
}

ct_status
ct_dynlib_load(const ct_dynlib_spec *spec, const ct_dynlib_symbol *symbols, size_t n,
               void *table, ct_error *err)
{
    void *library = open_library(spec);
    if (library == NULL) {
        const char *why = dlerror();
        return ct_fail(err, CT_EDEVICE,
                       "cannot find %s: not loaded in this process, not in %s of %zu "
                       "folders of sys.path, not on the loader's path (%s); install "
                       "it with: pip install '%s'",
                       spec->file, spec->folder, path_n,
                       why == NULL ? "no reason given" : why, spec->install);
    }
    for (size_t i = 0; i < n; i++) {
        const void *address = dlsym(library, symbols[i].name);
        set(table, &symbols[i], address);
        if (address == NULL) {
            for (size_t k = 0; k < i; k++) {
                set(table, &symbols[k], NULL);
            }
            (void)dlclose(library);
            return ct_fail(err, CT_EDEVICE,
                           "%s has no function %s: it is too old; update it with: "
                           "pip install -U '%s'",
                           spec->file, symbols[i].name, spec->install);
        }
    }
    return CT_OK;
}
