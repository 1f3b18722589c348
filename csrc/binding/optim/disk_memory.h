/* ctrainer._C.DiskMemory, for the binding's own files. */
#ifndef BINDING_OPTIM_DISK_MEMORY_H
#define BINDING_OPTIM_DISK_MEMORY_H

#include "binding/runtime/ctpy.h"

#include "core/base/disk_memory.h"

typedef struct DiskMemory {
    PyObject_HEAD
    ct_disk_memory core;
} DiskMemory;

#endif
