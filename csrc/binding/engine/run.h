/* The structures of a run: Trainer, of the object, and ctpy_run, of one train().
 * Training, evaluation and checkpoints share both; attributes that Python sees are in
 * the instance's __dict__. */
#ifndef BINDING_ENGINE_RUN_H
#define BINDING_ENGINE_RUN_H

#include "binding/runtime/ctpy.h"
#include "core/base/owner.h"

typedef struct Trainer {
    PyObject_HEAD
#define CTPY_OBJECT(name) PyObject *name;
#define CTPY_VALUE(type, name) type name;
#include "binding/engine/fields.def"
#undef CTPY_VALUE
#undef CTPY_OBJECT
    PyObject *signatures; /* dict: function -> what keywords it accepts; never NULL */
    double share;         /* of the current micro-batch in its update; 0 outside one */
    int agreed_signal;    /* that all ranks know of; 0: none */
    bool dummy_batch;     /* a batch that runs again for the other ranks' collectives */
    bool in_update;       /* between the first micro-batch and the end of an update */
} Trainer;

/* One train(), made by the loop. */
typedef struct ctpy_run {
    PyObject_HEAD
#define CTPY_OBJECT(name) PyObject *name;
#define CTPY_VALUE(type, name) type name;
#include "binding/engine/run.def"
#undef CTPY_VALUE
#undef CTPY_OBJECT
    ct_owner owner;       /* the process that trains, not a child of its own */
    int64_t accumulation; /* micro-batches an update */
    int64_t targets;      /* of the update, on all of several ranks; -1: unknown */
    bool layer_norms_due; /* in the update that is under way, to be logged */
} ctpy_run;

/* An object of a run that may be None. */
static inline PyObject *
ctpy_or_none(PyObject *value)
{
    return value == NULL ? Py_None : value;
}

/* An object of fields.def, a new reference; NULL, without an exception, for None. */
static inline PyObject *
ctpy_field(PyObject *value)
{
    return value == Py_None ? NULL : Py_XNewRef(value);
}

#endif
