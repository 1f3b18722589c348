/* What the files of Trainer's checkpoints share. */
#ifndef CTPY_TRAINER_CKPT_H
#define CTPY_TRAINER_CKPT_H

#include "binding/trainer/trainer.h"

/* The writer of this trainer, made at its first save; borrowed. NULL with an exception.
 */
PyObject *ctpy_ckpt_writer_borrow(PyObject *op);

/* Calls writer.name() and says whether that went well. */
int ctpy_ckpt_tell_writer(PyObject *op, const char *name);

/* "checkpoint-N" in folder, N being the state's step. */
PyObject *ctpy_ckpt_path(PyObject *op, PyObject *folder);

/* Opens a save on the ranks that write, and tells the others its folder. All ranks call
 * it, and all fail where one does. */
int ctpy_ckpt_begin(PyObject *op, PyObject *trial);

/* Commits the open save when all ranks have come here well, or drops it: then with an
 * exception, this rank's own if one is set. */
int ctpy_ckpt_end(PyObject *op);

#endif
