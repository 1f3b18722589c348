/* fairseq's meters and metrics: what their files share. */
#ifndef CTPY_METERS_H
#define CTPY_METERS_H

#include "binding/ctpy.h"

/* meter.update(value, weight) of an AverageMeter. 0, or -1 and nothing has changed. */
int ctpy_average_update(PyObject *op, PyObject *value, PyObject *weight);

#endif
