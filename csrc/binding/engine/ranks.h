/* Trainer on several ranks: its group, what ranks tell each other of an update.
 *
 * No rank decides alone whether a collective takes place: what decides (batches left,
 * a callback's wish, a signal) has been in the collective before. With one rank all of
 * these do nothing and cost nothing. */
#ifndef CTPY_TRAINER_RANKS_H
#define CTPY_TRAINER_RANKS_H

#include "binding/trainer/trainer.h"
#include "binding/trainer/update.h"
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
int ctpy_trainer_sum(PyObject *op, int64_t *values, size_t n);
int ctpy_trainer_min(PyObject *op, int64_t *values, size_t n);

/* binding/trainer/agree.c */

/* How long a run is, where loaders of different ranks are of different lengths: that of
 * the shortest, with as many epochs as it needs. Longer ones warn of what they do not
 * train on. Unless the arguments allow that, all ranks raise, naming each rank's rows
 * and batches. */
int ctpy_ranks_agree_length(PyObject *op, int64_t rows, int64_t *epochs,
                            int64_t *steps_in_epoch, int64_t *updates_in_epoch,
                            int64_t *max_steps);

/* Before an update: have all ranks a batch, and what do their labels count together,
 * for run->targets? Where one has more than another all raise, naming each rank's
 * number, unless the arguments allow that: then it warns of what is left over. */
int ctpy_ranks_begin(PyObject *op, ctpy_run *run, PyObject *batches, bool *enough);

/* Gradients that are not finite on one rank are so on all: all skip, or none. */
int ctpy_ranks_agree_finite(PyObject *op, bool *finite);

/* What the control of one rank asks for (to log, evaluate, save, stop) all do, and a
 * signal that one has got all have. *due: something is to be logged, evaluated or
 * saved, which other callbacks will see; false with one rank. */
int ctpy_ranks_agree(PyObject *op, bool *due);

/* ctpy_log_save_evaluate, where all ranks do what one is asked to. */
int ctpy_do_what_is_due(PyObject *op, ctpy_run *run, PyObject *learning_rate);

/* Has a signal asked the run to end, on all ranks? */
bool ctpy_ranks_stop(PyObject *op);

/* On several ranks: model.no_sync() entered, whose exchange of gradients then waits for
 * the last micro-batch of an update. NULL where there is none, or where the arguments
 * ask for an exchange after each. */
int ctpy_enter_no_sync(PyObject *op, PyObject *model, PyObject **context);

/* Replaces the gradients of an update by their mean over the ranks, where nothing
 * around the model has done so. 0, or -1 with an exception. */
int ctpy_trainer_average_grads(PyObject *op, ctpy_update *u);

#endif
