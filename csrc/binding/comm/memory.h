/* ctrainer._C.MappedMemory, for the binding's own files. */
#ifndef CTPY_MAPPED_MEMORY_H
#define CTPY_MAPPED_MEMORY_H

#include "binding/runtime/ctpy.h"
#include "core/device/device.h"

typedef struct MappedMemory {
    PyObject_HEAD
    ct_mapping pages;
    const ct_device *device;
} MappedMemory;

/* mapped_memory_dlpack.c */
PyObject *MappedMemory_dlpack(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *MappedMemory_dlpack_device(PyObject *op, PyObject *unused);
extern const char MappedMemory_dlpack_doc[], MappedMemory_dlpack_device_doc[];

#endif
