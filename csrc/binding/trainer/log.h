/* Means of the sums of losses that a trainer keeps. */
#ifndef CTPY_TRAINER_LOSS_H
#define CTPY_TRAINER_LOSS_H

#include "binding/trainer/trainer.h"

/* The mean of n losses that are `sum` on this rank, over the losses of all ranks; NaN
 * where there is none. All ranks call it. 0, or -1 with an exception. */
int ctpy_trainer_mean_loss(PyObject *op, double sum, int64_t n, double *mean);

#endif
