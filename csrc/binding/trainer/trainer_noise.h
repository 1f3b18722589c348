/* The trainer's gradient noise scale. */
#ifndef CTPY_TRAINER_NOISE_H
#define CTPY_TRAINER_NOISE_H

#include "binding/trainer/trainer.h"

/* At the start of an update whose noise is due. */
int ctpy_noise_begin(PyObject *op, PyObject *batches);

/* After a micro-batch's backward; its share of the update's loss. */
int ctpy_noise_see(PyObject *op, double share);

/* With the L2 norm of the whole update's gradients, unscaled: 1 and *scale; 0 when the
 * update says nothing: it has one micro-batch, or a norm is not finite. */
int ctpy_noise_add(PyObject *op, double norm, double loss_scale, double *scale);

/* Gives the memory back; averages stay. */
void ctpy_noise_end(PyObject *op);

#endif
