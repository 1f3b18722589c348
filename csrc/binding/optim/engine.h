/* The insides of OptimEngine, for the files that implement it. */
#ifndef BINDING_OPTIM_ENGINE_H
#define BINDING_OPTIM_ENGINE_H

#include "binding/optim/grads.h"
#include "binding/optim/groups.h"
#include "binding/runtime/buffer.h"

#include <stdbool.h>

/* What a parameter's `_part` says of it; {0} where it is whole. */
typedef struct optim_part {
    PyObject
        *communicator; /* owned: a Communicator; NULL where its only rank has all */
    size_t begin, whole, ndim, rows, cols; /* as in ct_optim_param */
} optim_part;

/* What belongs to one parameter. All objects are owned, so neither another thread nor
 * a hook can free what a pass without the GIL works on. */
typedef struct optim_slot {
    PyObject *param;
    PyObject *data; /* param itself, or the array of a NumPy parameter */
    PyObject *grad; /* during an update; NULL: no gradient */
    ctpy_view grad_view;
    PyObject *state; /* the dict state[param], or NULL before there is one */
    PyObject *values[OPTIM_MAX_VALUES]; /* what the kind keeps there, as in its spec */
    PyObject *master;                   /* state[param]["master_param"], or NULL */
    void *step; /* memory of state[param]["step"]; NULL where the kind has none */
    ct_dtype step_dtype;
    bool fresh;      /* the state was made for an update that has not been done yet */
    optim_part part; /* of kinds that look at whole parameters */
    uint32_t group;
    Py_ssize_t index;   /* in its group */
    Py_ssize_t average; /* its place in the engine's average, -1 without one */
    bool average_known;
} optim_slot;

/* An entry of the wrapper's state when slots[].state was set: compared, never used. */
typedef struct optim_entry {
    const PyObject *key, *value;
} optim_entry;

typedef struct OptimEngine {
    PyObject_HEAD
    ctpy_state *state;  /* the module's, which the type keeps alive */
    ct_optim_kind kind; /* of the groups that do not name one */
    ct_optim *core;
    optim_slot *slots; /* as many as core has parameters, in the same order */
    size_t n_slots, slots_capacity;
    optim_entry *known;
    size_t n_known, known_capacity;
    PyObject *average; /* a WeightAverage, or NULL */
    bool averages;     /* the next update takes part in it */
    bool parts_asked;  /* whether a parameter is a part of one: these slots are not */
    int busy;          /* > 0: a pass or a plan is under way; nothing may be changed */
    bool measured;     /* the last update knew the norm of its gradients */
    ct_step_result result; /* of the last update */
} OptimEngine;

/* Reads the hyperparameters of every group of `groups`, a list, into the core. */
int optim_read_groups(OptimEngine *self, PyObject *groups);

/* Writes what an update has changed in the groups into the wrapper's. */
int optim_write_groups(OptimEngine *self, PyObject *wrapper);

/* binding/optim/state.c: finds out which parameters are parts of one, where their group
 * looks at whole ones; a ValueError where it cannot be told of what. */
int optim_read_parts(OptimEngine *self);
/* Parts without elements here get an empty gradient where any rank has one of the
 * parameter: all ranks update the same ones. Collective where there are parts. */
int optim_share_presence(OptimEngine *self);
/* Tells the core what is here of a parameter whose memory and shape it knows. */
int optim_plan_part(OptimEngine *self, const optim_slot *slot, ct_optim_param *param);
/* Keeps the groups of all parts from being closed, or no longer. */
void optim_hold_groups(OptimEngine *self, bool held);
/* The parts of it in binding/optim/state.c: find the entries of the wrapper's state;
 * make and read that of one slot, whose parameter is seen as `view`; note what is
 * known. */
int optim_sync_state(OptimEngine *self, PyObject *wrapper);
int optim_plan_state(OptimEngine *self, PyObject *wrapper, optim_slot *slot,
                     ct_optim_param *param, const ctpy_view *view);
/* The dimensions of a parameter, for the kinds that ask for them. */
int optim_plan_shape(OptimEngine *self, const optim_slot *slot, ct_optim_param *param,
                     const ctpy_view *view);
int optim_remember_state(OptimEngine *self, PyObject *wrapper);
/* Checks that `what` of the slot, seen as view, is like its parameter. */
int optim_check_like(const optim_slot *slot, const ctpy_view *param,
                     const ctpy_view *view, const char *what);
/* Writes the new step counts after an update. */
int optim_count_steps(OptimEngine *self);

#endif
