/* The GradReducer of ctrainer._C, for the files of the type. */
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
    X(allocate)       /* allocate(params) -> (flat tensor, views like params) */       \
    X(queue_callback) /* None: nothing is hooked */                                    \
    X(memory)         /* list of the buckets' flat tensors */                          \
    X(views)          /* list by parameter; None for a bucket of one */                \
    X(exchanged)      /* list by parameter: the exchanged tensor, or None */           \
    X(hooks)          /* list of GradHook */                                           \
    X(handles)        /* list of the hooks' handles, with remove() */

typedef struct GradReducer {
    PyObject_HEAD
#define FIELD(name) PyObject *name;
    GRAD_REDUCER_OBJECTS(FIELD)
#undef FIELD
    ct_reducer core;
    ctpy_target target; /* of the parameters, their gradients and the buckets */
    ct_staged staged;   /* the communicator, for the memory of a device */
    int64_t *used;      /* by parameter: whether any rank has a gradient */
    bool *absent;       /* by parameter: no gradient on this rank in this pass */
    int *owners;    /* by parameter: the rank that gets the average; NULL: all ranks */
    bool *averaged; /* by parameter of this rank: the gradient is an average */
    size_t dropped; /* turns of this pass with gradients sent and dropped */
    bool grads_are_views, find_unused, static_graph;
    bool usage_known;  /* `used` holds for every pass */
    bool syncs;        /* the next backward pass is exchanged */
    bool queued;       /* autograd will call the end hook */
    bool busy;         /* a call is under way without the GIL */
    bool joining;      /* ranks may run out of data */
    bool throws_early; /* and then all raise, rather than continue */
    bool keeps_divisor;
    int root; /* a rank that had data in the last pass */
} GradReducer;

/* Called by autograd: with a parameter after the accumulation of the gradient, with the
 * gradient of an output when a pass begins, without arguments when a pass ends. */
typedef struct GradHook {
    PyObject_HEAD
    GradReducer *reducer; /* borrowed; NULL after the reducer is closed */
    Py_ssize_t index;     /* a parameter's, or a constant below */
} GradHook;

enum {
    GRAD_HOOK_OUTPUT = -1,
    GRAD_HOOK_END = -2
};

static inline const char *
grad_reducer_name(const GradReducer *self, Py_ssize_t param)
{
    return PyUnicode_AsUTF8(PyTuple_GET_ITEM(self->names, param));
}

/* The group that the core calls: the communicator's for the memory of the gradients, or
 * a staged group. */
static inline ct_comm *
grad_reducer_group(GradReducer *self, ct_comm *comm)
{
    ct_comm *found = ctpy_comm_for(comm, &self->target);
    return found != NULL ? found : &self->staged.base;
}

/* The memory of the tensor `text`, on the parameters' device. 0, or -1 with an
 * exception. */
static inline int
grad_reducer_view(GradReducer *self, PyObject *tensor, const char *text,
                  ctpy_view *view)
{
    return ctpy_view_at(ctpy_state_borrow((PyObject *)self), tensor, text,
                        &self->target, view);
}

/* binding/ddp/pass.c: hooks the parameters; the reducer owns the hooks. */
int grad_reducer_add_hooks(GradReducer *self);

/* binding/ddp/pass.c: drops a pass after waiting for its collectives. */
void grad_reducer_abandon(GradReducer *self);

#endif
