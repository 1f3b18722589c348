/* ctrainer._C.Trainer: what the files of the type share.
 *
 * Everything that Python sees (model, args, state, control, optimizer, ...) lives in
 * the instance's __dict__, where users read, replace and delete it; C reads it by
 * interned name when it needs it and keeps no copy across a hook. The struct holds
 * only what Python has no name for. */
#ifndef CTPY_TRAINER_H
#define CTPY_TRAINER_H

#include "binding/ctpy.h"
#include "binding/signals.h"
#include "core/ct_step.h"

#include <stdbool.h>

typedef struct Trainer {
    PyObject_HEAD
    PyObject *signatures; /* dict: function -> what keywords it accepts; never NULL */
    /* The running sums of one logging window and of the run, in double. */
    double window_loss; /* since the last log */
    double total_loss;  /* of all windows logged so far; training_loss comes from it */
    int64_t window_start;    /* global_step at the last log */
    int64_t nonfinite_steps; /* updates skipped for Inf or NaN, since the last log */
    int64_t nonfinite_total; /* in the whole run */
    double grad_norm;        /* of the last update; NaN before the first */
    bool in_train;
} Trainer;

/* op.name(*args, **keywords): the hook of that name, by attribute lookup, so that an
 * override wins. args holds nargs positional values and then one for each name of the
 * tuple kwnames (NULL for none), at most CTPY_HOOK_MAX_ARGS in all. A keyword that the
 * override does not accept is left out, so that those written for older releases run
 * too. Returns a new reference or NULL. */
PyObject *ctpy_call_adapted(PyObject *op, PyObject *name, PyObject *const *args,
                            size_t nargs, PyObject *kwnames);

/* Attribute of op as a C value. Return 0, or -1 with an exception that names it. */
int ctpy_get_bool(PyObject *op, PyObject *name, int *value);
int ctpy_get_double(PyObject *op, PyObject *name, double *value);
int ctpy_get_int64(PyObject *op, PyObject *name, int64_t *value);
int ctpy_set_int64(PyObject *op, PyObject *name, int64_t value);
int ctpy_set_double(PyObject *op, PyObject *name, double value);

#define CTPY_METHOD(name, flags)                                                       \
    extern const char Trainer_##name##_doc[];                                          \
    PyObject *Trainer_##name CTPY_SIGNATURE_##flags;
#define CTPY_SIGNATURE_NOARGS (PyObject * op, PyObject * unused)
#define CTPY_SIGNATURE_O (PyObject * op, PyObject * arg)
#define CTPY_SIGNATURE_KEYWORDS (PyObject * op, PyObject * args, PyObject * kwargs)
#include "binding/trainer_methods.def"
#undef CTPY_METHOD

#endif
