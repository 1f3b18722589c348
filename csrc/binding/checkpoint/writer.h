/* ctrainer._C.CheckpointWriter, for the two files that implement it. */
#ifndef CTPY_CHECKPOINT_H
#define CTPY_CHECKPOINT_H

#include "binding/runtime/ctpy.h"
#include "core/checkpoint/writer.h"

#include <stdbool.h>

typedef struct CheckpointWriter {
    PyObject_HEAD
    ct_writer *core; /* never NULL */
    bool busy;       /* a thread is in the core without the GIL */
} CheckpointWriter;

/* Claims the core for the calling thread, which may then release the GIL; NULL with a
 * RuntimeError when another one has it. */
ct_writer *ctpy_writer_enter(PyObject *op);

/* Gives it back; None, or NULL with the exception of the call that ended so. */
PyObject *ctpy_writer_leave(PyObject *op, ct_status status, const ct_error *err);

/* checkpoint_add.c: the methods that add files. */
PyObject *
CheckpointWriter_add_safetensors(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *CheckpointWriter_add_archive(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *CheckpointWriter_add_bytes(PyObject *op, PyObject *args);
extern const char CheckpointWriter_add_safetensors_doc[];
extern const char CheckpointWriter_add_archive_doc[];
extern const char CheckpointWriter_add_bytes_doc[];

#endif
