/* ctrainer._C.MappedMemory, for the binding's own files. */
#ifndef CTPY_MAPPED_MEMORY_H
#define CTPY_MAPPED_MEMORY_H

#include "binding/ctpy.h"
#include "core/ct_mapping.h"

typedef struct MappedMemory {
    PyObject_HEAD
    ct_mapping pages;
} MappedMemory;

#endif
