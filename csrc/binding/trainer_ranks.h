/* Trainer on several ranks: its group, what ranks tell each other of an update.
 *
 * No rank decides alone whether a collective takes place: what decides (batches left,
 * a callback's wish, a signal) has been in the collective before. With one rank all of
 * these do nothing and cost nothing. */
#ifndef CTPY_TRAINER_RANKS_H
#define CTPY_TRAINER_RANKS_H

#include "binding/trainer.h"
#include "binding/trainer_update.h"
#include "core/ct_comm.h"

/* The group that the trainer's ranks form, from _join_ranks() when it is first asked
 * for; alive as long as the trainer keeps it. NULL with an exception. */
ct_comm *ctpy_trainer_comm_borrow(PyObject *op);

/* The getter of Trainer._communicator. */
PyObject *ctpy_trainer_get_communicator(PyObject *op, void *closure);

/* How many ranks there are; -1 with an exception. */
int ctpy_trainer_world_size(PyObject *op);

/* Reduces n numbers in place over the ranks, without the GIL. 0, or -1 with an
 * exception. */
int ctpy_trainer_reduce(PyObject *op, double *values, size_t n, ct_reduce_op how);
int ctpy_trainer_sum(PyObject *op, int64_t *values, size_t n);

/* Replaces the gradients of an update by their mean over the ranks, where nothing
 * around the model has done so. 0, or -1 with an exception. */
int ctpy_trainer_average_grads(PyObject *op, ctpy_update *u);

#endif
