/* What training and evaluation share: the structures Trainer, of the object, and
 * ctpy_run, of one train(); calls of hooks, targets and ranks. Attributes that Python
 * sees are in the instance's __dict__.
 *
 * No rank decides alone whether a collective takes place: the reasons (batches left, a
 * callback's wish, a signal) have been in the collective before. With a single rank
 * the functions of ranks do nothing and cost nothing. */
#ifndef BINDING_ENGINE_RUN_H
#define BINDING_ENGINE_RUN_H

#include "binding/runtime/ctpy.h"
#include "core/base/owner.h"
#include "core/base/wait.h"
#include "core/comm/comm.h"

typedef struct Trainer {
    PyObject_HEAD
#define CTPY_OBJECT(name) PyObject *name;
#define CTPY_VALUE(type, name) type name;
#include "binding/engine/fields.def"
    PyObject *signatures;  /* dict: function -> what keywords it accepts; never NULL */
    ct_deadline leaves_at; /* by a signal to some ranks alone; 0: none */
    int agreed_signal;     /* that all ranks know of; 0: none */
} Trainer;

/* One train(), made by _inner_training_loop(). */
typedef struct ctpy_run {
    PyObject_HEAD
#define CTPY_OBJECT(name) PyObject *name;
#define CTPY_VALUE(type, name) type name;
#include "binding/engine/run.def"
    ct_owner owner;  /* the process that trains, not a child of its own */
    int64_t targets; /* of the update, on all of several ranks; -1: unknown */
} ctpy_run;

/* An object of fields.def, a new reference; NULL, without an exception, for None. */
static inline PyObject *
ctpy_field(PyObject *value)
{
    return value == Py_None ? NULL : Py_XNewRef(value);
}

/* ---- hooks of every age, and the adapter ---- */

/* op.name(*args, **keywords): the hook of that name, by attribute lookup, so that an
 * override wins. args holds nargs positional values and then one for each name of the
 * tuple kwnames (NULL for none), at most CTPY_HOOK_MAX_ARGS in all. A keyword that the
 * override does not accept is left out, so that overrides for older releases run too.
 * Returns a new reference or NULL. */
PyObject *ctpy_call_adapted(PyObject *op, PyObject *name, PyObject *const *args,
                            size_t nargs, PyObject *kwnames);

/* adapter.name(*args): what only the framework can do. */
PyObject *
ctpy_ask_adapter(PyObject *op, PyObject *name, PyObject *const *args, size_t n);

/* ---- loss_scaler.c ---- */

/* The scale after an update without and with an overflow. 1; 0 where an overflow would
 * raise, or for an object that is not exactly a LossScaler. */
bool ctpy_scaler_foresee(ctpy_state *state, PyObject *scaler, double *clean,
                         double *overflow);

/* ---- targets ---- */

/* Targets of a batch: labels that are not -100; -1 for a batch without labels to count,
 * with *failed set on error. */
int64_t ctpy_count_targets(PyObject *op, PyObject *batch, int *failed);

/* The same of a list of batches; -1 for an empty list too. */
int64_t ctpy_count_batches(PyObject *op, PyObject *batches, int *failed);

/* ---- the group of ranks ---- */

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

/* For a host that has waited for its GPU: -1 with an exception where a collective of
 * the GPUs has failed, so that the streams continued with wrong values. */
int ctpy_trainer_check_collectives(PyObject *op);

#endif
