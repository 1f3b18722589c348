/* Trainer on several ranks: the group, its sums, and failures that all ranks raise.
 *
 * No rank decides alone whether a collective takes place: the reasons (batches left, a
 * callback's wish, a signal) have been in the collective before. With a single rank
 * these functions do nothing and cost nothing. */
#ifndef BINDING_ENGINE_RANKS_H
#define BINDING_ENGINE_RANKS_H

#include "binding/engine/run.h"

#include "core/comm/comm.h"

/* The group of the trainer's ranks, from _join_ranks() at the first call; owned by the
 * trainer. NULL with an exception. */
ct_comm *ctpy_trainer_comm_borrow(PyObject *op);

/* The getter of Trainer._communicator. */
PyObject *ctpy_trainer_get_communicator(PyObject *op, void *closure);

/* How many ranks there are; -1 with an exception. */
int ctpy_trainer_world_size(PyObject *op);

/* Whether the trainer is in no group of several ranks, not yet or no longer. Calls no
 * Python and leaves the exception that is set. */
bool ctpy_trainer_is_alone(const PyObject *op);

/* Reduces n numbers in place over the ranks, without the GIL. 0, or -1 with an
 * exception. */
int ctpy_trainer_reduce(PyObject *op, double *values, size_t n, ct_reduce_op how);
int ctpy_trainer_reduce_span(PyObject *op, const ct_span *span, ct_reduce_op how);
int ctpy_trainer_sum(PyObject *op, int64_t *values, size_t n);

/* Puts "doing: " before the text of the RuntimeError or ValueError that is set. */
void ctpy_name_doing(const char *doing);

#endif
