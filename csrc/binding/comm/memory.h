/* ctrainer._C.MappedMemory, for the binding's own files. */
#ifndef BINDING_COMM_MEMORY_H
#define BINDING_COMM_MEMORY_H

#include "binding/runtime/ctpy.h"

#include "core/device/device.h"

typedef struct MappedMemory {
    PyObject_HEAD
    ct_mapping pages;
    const ct_device *device;
    const ct_device *pinned; /* the device of pinned memory of the host; or NULL */
} MappedMemory;

#endif
