/* Agreement between the ranks of a trainer before, in and after an update. With one
 * rank every function here does nothing and costs nothing. */
#ifndef BINDING_TRAINER_AGREE_H
#define BINDING_TRAINER_AGREE_H

#include "binding/engine/ranks.h"
#include "binding/trainer/trainer.h"

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

/* ctpy_log_save_evaluate, where all ranks do what one is asked to. */
int ctpy_do_what_is_due(PyObject *op, ctpy_run *run, PyObject *learning_rate);

/* Has a signal asked the run to end, on all ranks? */
bool ctpy_ranks_stop(PyObject *op);

/* On several ranks: model.no_sync() entered, whose exchange of gradients then waits for
 * the last micro-batch of an update. NULL where there is none, or where the arguments
 * ask for an exchange after each. */
int ctpy_enter_no_sync(PyObject *op, PyObject *model, PyObject **context);

#endif
