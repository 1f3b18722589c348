/* Trainer on several ranks: its group, what ranks tell each other of an update.
 *
 * No rank decides alone whether a collective takes place: what decides (batches left,
 * a callback's wish, a signal) has been in the collective before. With one rank all of
 * these do nothing and cost nothing. */
#ifndef BINDING_ENGINE_RANKS_H
#define BINDING_ENGINE_RANKS_H

#include "binding/engine/run.h"

#include "core/comm/comm.h"

/* The group that the trainer's ranks form, from _join_ranks() when it is first asked
 * for; alive as long as the trainer keeps it. NULL with an exception. */
ct_comm *ctpy_trainer_comm_borrow(PyObject *op);

/* Leaves the group, if the trainer has joined it, after a failure: what the others wait
 * for then fails too. Keeps no exception and sets none. */
void ctpy_ranks_leave(PyObject *op);

/* The getter of Trainer._communicator. */
PyObject *ctpy_trainer_get_communicator(PyObject *op, void *closure);

/* How many ranks there are; -1 with an exception. */
int ctpy_trainer_world_size(PyObject *op);

/* Whether the trainer has joined no other rank, so far or any more; asks nobody and
 * leaves an exception that is set as it is. */
bool ctpy_trainer_is_alone(const PyObject *op);

/* Reduces n numbers in place over the ranks, without the GIL. 0, or -1 with an
 * exception. */
int ctpy_trainer_reduce(PyObject *op, double *values, size_t n, ct_reduce_op how);
int ctpy_trainer_reduce_span(PyObject *op, const ct_span *span, ct_reduce_op how);
int ctpy_trainer_sum(PyObject *op, int64_t *values, size_t n);
int ctpy_trainer_min(PyObject *op, int64_t *values, size_t n);

/* Steps that all ranks take together, and fail together. */

/* Tells the others how this rank has fared in what it was doing: with an exception set
 * that it failed, else what they get of it, bytes (NULL: none). Returns the payloads of
 * all ranks, a list in rank order; NULL with an exception when any has failed: this
 * rank's own, or a RuntimeError that names the rank, `doing` and its error. Alone it is
 * the list of its own payload. */
PyObject *ctpy_account(PyObject *op, const char *doing, PyObject *payload);

/* Puts "doing: " before the text of the RuntimeError or ValueError that is set. */
void ctpy_name_doing(const char *doing);

#endif
