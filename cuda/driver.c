/* Finds the driver's functions through the CUDA runtime, once per process. */
#include "driver.h"

#include "status.h"

#include <pthread.h>
#include <string.h>

static ct_driver table;
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct symbol {
    const char *name;
    size_t offset; /* of the function pointer in the table */
} symbol;

static const symbol symbols[] = {
#define CT_SYMBOL(name, field, params) {"cu" #name, offsetof(ct_driver, field)},
    CT_EACH_DRIVER_FUNCTION(CT_SYMBOL)
#undef CT_SYMBOL
};

/* POSIX lets an object pointer hold a function's address; ISO C has no such cast. */
static ct_status
look_up(ct_driver *driver, const symbol *wanted, ct_error *err)
{
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *address = NULL;
    const cudaError_t result = cudaGetDriverEntryPointByVersion(
        wanted->name, &address, CUDART_VERSION, cudaEnableDefault, &found);
    if (result == cudaSuccess && found == cudaDriverEntryPointSuccess) {
        memcpy((char *)driver + wanted->offset, (const void *)&address, sizeof address);
        return CT_OK;
    }
    (void)cudaGetLastError(); /* or the next launch would report the error */
    return ct_fail(
        err, CT_EDEVICE,
        "NVIDIA's driver has no %s of CUDA %d.%d, which maps a GPU's memory; "
        "update the driver",
        wanted->name, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

static ct_status
fill(ct_driver *driver, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < sizeof symbols / sizeof *symbols; i++) {
        status = look_up(driver, &symbols[i], err);
    }
    return status;
}

ct_status
ct_driver_borrow(const ct_driver **driver, ct_error *err)
{
    ct_status status = CT_OK;
    (void)pthread_mutex_lock(&table_lock);
    if (table.reserve == NULL) {
        ct_driver found = {.reserve = NULL};
        status = fill(&found, err);
        if (status == CT_OK) {
            table = found;
        }
    }
    (void)pthread_mutex_unlock(&table_lock);
    *driver = &table;
    return status;
}

ct_status
ct_driver_check(CUresult result, const char *what, ct_error *err)
{
    if (result == CUDA_SUCCESS) {
        return CT_OK;
    }
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        return ct_fail(err, CT_ENOMEM, "cannot %s: the GPU's memory is used up", what);
    }
    return ct_fail(err, CT_EDEVICE, "cannot %s: the CUDA driver gives error %d", what,
                   (int)result);
}
