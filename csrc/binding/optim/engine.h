/* The insides of OptimEngine, for the files that implement it. */
#ifndef BINDING_OPTIM_ENGINE_H
#define BINDING_OPTIM_ENGINE_H

#include "binding/optim/optim.h"
#include "binding/runtime/buffer.h"

#include "core/optim/optim.h"

#include <stdbool.h>

/* ---- each kind's keys in param_groups and in state[param] ------------------------ */

/* From the lists of core/optim/kinds.h. */

/* A key of a param_group, and the offset of its member of ct_optim_group. */
typedef struct optim_field {
    const char *key;
    size_t member;
    ct_option_type type;
} optim_field;

/* A key of state[param]. */
typedef struct optim_value {
    const char *key, *place; /* place: for messages */
    int array;               /* the core's state[array]; -1: no array */
    ct_state_shape shape;
    int n_arrays; /* state[array] and the following, one behind the other */
} optim_value;

enum {
    OPTIM_MAX_VALUES = 1 + CT_OPTIM_MAX_STATES
};

typedef struct optim_spec {
    const optim_field *fields;
    size_t n_fields;
    const optim_value *values; /* the count first, if any */
    size_t n_values;           /* <= OPTIM_MAX_VALUES */
    int traits;                /* of ct_optim_trait */
} optim_spec;

/* By kind; the last is of the options that every kind has. */
extern const optim_spec optim_specs[CT_OPTIM_KIND_COUNT + 1];

/* The i-th of the spec's keys: of its fields, then of its values. */
static inline PyObject *
optim_key_borrow(const ctpy_state *state, const optim_spec *spec, size_t i)
{
    PyObject *keys = PyTuple_GET_ITEM(state->optim_keys, spec - optim_specs);
    return PyTuple_GET_ITEM(keys, (Py_ssize_t)i);
}

/* ---- OptimEngine ----------------------------------------------------------------- */

/* The part of a sharded parameter, from its `_part`; {0} for a whole parameter. */
typedef struct optim_part {
    PyObject
        *communicator; /* owned; NULL where a single rank has the whole parameter */
    size_t begin, whole, ndim, rows, cols; /* as in ct_optim_param */
} optim_part;

/* The objects of one parameter. All are owned, so neither another thread nor a hook can
 * free the memory under a pass without the GIL. */
typedef struct optim_slot {
    PyObject *param;
    PyObject *data; /* param itself, or the array of a NumPy parameter */
    PyObject *grad; /* during an update; NULL: no gradient */
    ctpy_view grad_view;
    const void *shape; /* of data's last view; to prefetch, never read */
    PyObject *state;   /* the dict state[param], or NULL before there is one */
    PyObject *values[OPTIM_MAX_VALUES]; /* of that dict, in the order of the spec */
    PyObject *master;                   /* state[param]["master_param"], or NULL */
    void *step;                         /* memory of state[param]["step"], or NULL */
    ct_dtype step_dtype;
    bool fresh;              /* the state was made for this update */
    bool maps_checked;       /* of these values */
    optim_part part;         /* of kinds that look at whole parameters */
    size_t number, numbered; /* as in ct_optim_param; of stochastic rounding */
    uint32_t group;
    Py_ssize_t index;   /* in its group */
    Py_ssize_t average; /* index in the engine's average; -1: not averaged */
    bool average_known;
} optim_slot;

/* An entry of the wrapper's state when slots[].state was set: compared, never used. */
typedef struct optim_entry {
    const PyObject *key, *value;
} optim_entry;

/* A tensor and its shape when an update viewed it: to prefetch, never read. */
typedef struct optim_viewed {
    const void *object, *shape;
} optim_viewed;

typedef struct OptimEngine {
    PyObject_HEAD
    ctpy_state *state;  /* the module's, which the type keeps alive */
    ct_optim_kind kind; /* of the groups without a 'kind' */
    ct_optim *core;
    ctpy_target target; /* of the first gradient */
    optim_slot *slots;  /* as many as core has parameters, in the same order */
    size_t n_slots, slots_capacity;
    optim_entry *known;
    size_t n_known, known_capacity;
    optim_viewed *viewed; /* by the last updates, in the order of their views */
    size_t n_viewed, viewed_capacity;
    size_t views;      /* of this update so far */
    PyObject *average; /* a WeightAverage, or NULL */
    PyObject *disk;    /* a DiskMemory with state, or NULL */
    PyObject *shards;  /* a list of DiskMemory with parameters, or NULL */
    bool averages;     /* the next update writes the average, too */
    bool parts_asked;  /* of these slots, which are parts */
    int busy;          /* > 0: a pass or a plan is under way; nothing may be changed */
    bool measured;     /* the last update measured its gradients */
    bool enqueued;     /* the result of the last update is still on the device */
    PyObject *groups;  /* param_groups at the last update, or NULL before the first */
    ct_step_result result;   /* of the last update */
    bool capturing;          /* the current update is of a graph */
    ct_step_config captured; /* of the update in a graph */
    double captured_scale;   /* the loss scale in there; 0: no update was captured */
    bool captured_norm;      /* the graph has the norm */
} OptimEngine;

/* Raises `type` with a message "param_groups[g]['params'][i]WHAT FORMAT". Returns -1.
 */
int optim_fail(PyObject *type, const optim_slot *slot, const char *what,
               const char *format, ...);

/* Views op, which is `what` of the slot, on the device of the gradients, and prefetches
 * the tensors that were viewed next in the last update. */
int optim_view(OptimEngine *self, const optim_slot *slot, const char *what,
               PyObject *op, ctpy_view *view);

/* Drops the slots from the n-th on. */
void optim_drop_slots(OptimEngine *self, size_t n);

/* Makes a slot for each parameter of `groups`, a list; equal slots stay. */
int optim_plan_slots(OptimEngine *self, PyObject *groups);

/* Reads the hyperparameters of every group of `groups`, a list, into the core. */
int optim_read_groups(OptimEngine *self, PyObject *groups);

/* Reads the arguments of step() from max_norm on, seven. The exception names the
 * argument at fault. */
int
optim_parse_options(PyObject *const *args, ct_step_config *config, double *loss_scale);

/* Writes the live options after an update into the wrapper's groups. */
int optim_write_groups(OptimEngine *self, PyObject *groups);

/* Finds the entries of the wrapper's state; makes and reads the state of one slot,
 * whose parameter is `view`; notes the entries after that. */
int optim_sync_state(OptimEngine *self, PyObject *wrapper);
int optim_plan_state(OptimEngine *self, PyObject *wrapper, optim_slot *slot,
                     ct_optim_param *param, const ctpy_view *view);
int optim_remember_state(OptimEngine *self, PyObject *wrapper);
/* Checks that `what` of the slot, seen as view, is like its parameter. */
int optim_check_like(const optim_slot *slot, const ctpy_view *param,
                     const ctpy_view *view, const char *what);
/* Writes the step counts of the parameters of an update, made or taken back. */
int optim_count_steps(OptimEngine *self);

/* ---- parts.c --------------------------------------------------------------------- */

/* An empty side counts as 1: no rule works on an empty parameter, and some divide by
 * the sides. */
static inline size_t
optim_side(int64_t length)
{
    return length > 0 ? (size_t)length : 1;
}

/* Reads the dimensions of the slot's parameter from its attribute, where the view knows
 * no shape. */
int
optim_ask_for_shape(OptimEngine *self, const optim_slot *slot, ct_optim_param *param);

/* Reads which parameters are parts, for the groups that look at whole parameters and
 * for random bits; a ValueError for a flat parameter. */
int optim_read_parts(OptimEngine *self);

/* Passes the files of the slots' parameters to the core, and keeps the files alive. */
int optim_read_files(OptimEngine *self);

/* Sets an empty gradient for parts without elements on this rank where another rank has
 * a gradient, among the slots with the communicator of slots[first]; slots before
 * `first` have other communicators. has: memory of a number for each slot. Collective.
 */
int optim_reduce_presence(OptimEngine *self, size_t first, double *has);

/* ---- update.c -------------------------------------------------------------------- */

/* RuntimeError with `what` while a step is under way. */
int optim_check_idle(const OptimEngine *self, const char *what);

/* Waits for the result of an enqueued update, and takes the counts of a skipped update
 * back. */
int optim_await(OptimEngine *self);

/* Both phases at once: gradients are read once. */
int optim_update(OptimEngine *self, PyObject *wrapper, ct_step_config *config,
                 double loss_scale);

/* Before a graph with an update is replayed: sends the constants of the next update to
 * the device, and counts the update. */
int optim_prepare_replay(OptimEngine *self, PyObject *wrapper);

#endif
