/* The insides of GradReducer, for the files that implement it. */
#ifndef BINDING_DDP_REDUCER_H
#define BINDING_DDP_REDUCER_H

#include "binding/comm/communicator.h"

#include "core/ddp/reducer.h"

#include <stdbool.h>
#include <stdint.h>

/* Every Python object that a reducer holds. */
#define GRAD_REDUCER_OBJECTS(X)                                                        \
    X(communicator)                                                                    \
    X(params)         /* tuple */                                                      \
    X(names)          /* tuple of str */                                               \
    X(allocate)       /* allocate(params) -> (flat tensor, views of it like them) */   \
    X(queue_callback) /* None: nothing is hooked */                                    \
    X(memory)         /* list of the buckets' flat tensors */                          \
    X(views)          /* list by parameter; None where it is alone */                  \
    X(given)          /* list by parameter: what lies in the exchange, or None */      \
    X(hooks)          /* list of GradHook */                                           \
    X(handles)        /* list of what removes them */

typedef struct GradReducer {
    PyObject_HEAD
#define FIELD(name) PyObject *name;
    GRAD_REDUCER_OBJECTS(FIELD)
#undef FIELD
    ct_reducer core;
    int64_t *used;  /* by parameter: whether a rank has a gradient for it */
    bool *absent;   /* by parameter: it was given for want of a gradient */
    int *owners;    /* by parameter: who gets its average; NULL: all ranks */
    bool *averaged; /* by parameter that this rank owns: its gradient is an average */
    size_t dropped; /* turns of this pass whose gradients others have */
    bool grads_are_views, find_unused, static_graph;
    bool usage_known;  /* `used` holds for every pass */
    bool syncs;        /* the next backward pass is exchanged */
    bool queued;       /* autograd will tell the end of the pass */
    bool busy;         /* a call is under way without the GIL */
    bool joining;      /* ranks may run out of data */
    bool throws_early; /* then all raise, rather than go on */
    bool keeps_divisor;
    int root; /* a rank that had data in the last pass */
} GradReducer;

/* Called by autograd: with a parameter when its gradient is there, with the gradient of
 * an output when a pass begins, with nothing when it ends. */
typedef struct GradHook {
    PyObject_HEAD
    GradReducer *reducer; /* borrowed; NULL when it has gone */
    Py_ssize_t index;     /* a parameter's, or one of those below */
} GradHook;

enum {
    GRAD_HOOK_OUTPUT = -1,
    GRAD_HOOK_END = -2
};

/* grad_hook.c: a new hook, which hooks keeps until the reducer goes; borrowed, NULL
 * with an exception. */
PyObject *grad_hook_add(GradReducer *self, Py_ssize_t index);

/* binding/ddp/pass.c: what happens in a backward pass. 0 or -1. */
void grad_reducer_abandon(GradReducer *self);
PyObject *GradReducer_reduce(PyObject *op, PyObject *unused);
extern const char GradReducer_reduce_doc[];

/* binding/ddp/pass.c: brings tensors to the core. `give` announces param's gradient;
 * `give_absent` what it has though autograd brought none, or zeros. */
const char *grad_reducer_name(const GradReducer *self, Py_ssize_t param);

/* binding/ddp/pass.c: with owners, given as a sequence of ranks, or None. The
 * others' gradients are dropped as soon as they have been sent, and at the end of a
 * pass. Before a further pass adds to averages they are made what the ranks would have
 * given: times the number of ranks, for that pass's average to be of the sum. */
int grad_reducer_read_owners(GradReducer *self, PyObject *given);

/* binding/ddp/pass.c: before a forward pass, what the ranks are about to do; 0 or -1.
 */
PyObject *GradReducer_join(PyObject *op, PyObject *args);
PyObject *GradReducer_shadow(PyObject *op, PyObject *args);
extern const char GradReducer_join_doc[], GradReducer_shadow_doc[];

/* binding/ddp/pass.c */
PyObject *GradReducer_before_forward(PyObject *op, PyObject *args);
PyObject *GradReducer_after_forward(PyObject *op, PyObject *output);
extern const char GradReducer_before_forward_doc[], GradReducer_after_forward_doc[];

#endif
