/* The struct of FSDPUnit, and what its files call of each other. */
#ifndef BINDING_FSDP_UNIT_H
#define BINDING_FSDP_UNIT_H

#include "binding/comm/communicator.h"

#include "core/fsdp/unit.h"

typedef enum fsdp_state {
    FSDP_IDLE = 1, /* the values of TrainingState */
    FSDP_FORWARD,
    FSDP_BACKWARD_PRE,
    FSDP_BACKWARD_POST
} fsdp_state;

#define FSDP_NO_SEQUENCE UINT64_MAX /* also the number of leaves' nodes */
#define FSDP_NO_THREAD 0            /* no thread's number */
#define FSDP_NO_TASK (-1L)

/* A trainable parameter's place in its group, and its gradient in this backward. */
typedef struct fsdp_leaf {
    size_t group, at, n;
    bool filled; /* the flat gradient has values, the next gradient is added */
    bool seen;   /* a gradient has arrived since the unit was last complete */
    bool frozen; /* since the module was wrapped: no gradient arrives */
} fsdp_leaf;

/* Units in the order of a pass: lists, NULL before the first unit. */
typedef struct fsdp_order {
    PyObject *before, *now; /* of the last pass, and of this pass so far */
} fsdp_order;

typedef struct FSDPUnit {
    PyObject_HEAD
    ct_fsdp core;
    ct_fsdp_ledger ledger;     /* of a root: for all units below */
    PyObject *communicator;    /* of the sharding group; NULL before __init__ */
    PyObject *replicate_group; /* the Communicator of the replicate group, or NULL */
    PyObject *full, *grads;    /* MappedMemory */
    PyObject *secondary;       /* MappedMemory, or NULL: no secondary shards */
    PyObject *residual;        /* MappedMemory, or NULL: no error feedback */
    PyObject *file, *copy;     /* DiskMemory of the shards, MappedMemory; or NULL */
    PyObject *shards;          /* a tuple, one parameter a group */
    PyObject *gradients;       /* a dict of _new_gradient(); NULL: no offload */
    PyObject *grad_owners; /* a tuple: objects with the shards' grad; NULL: shards */
    PyObject *root;        /* the FSDPUnit above; NULL in a root */
    PyObject *units;       /* of a root: a list of all units, the root included */
    /* Of a root: the last unit of this forward and of the one before; compared only. */
    const void *last_inner, *last_before;
    fsdp_order forwards, backwards; /* of a root */
    PyObject *in_use;  /* of a root: the units gathered for the backward, in order */
    PyObject *ending;  /* of a root: a weak reference, alive until the backward ends */
    size_t resident;   /* of a root: the process's memory when the backward began */
    size_t read_ahead; /* how many units' shards in files are in memory at most */
    fsdp_leaf *leaves;
    size_t n_leaves, leaves_room, n_seen, n_frozen;
    /* In a backward: the first node of the oldest forward whose outputs have gradients,
     * or FSDP_NO_SEQUENCE. */
    uint64_t first_node;
    uint64_t thread; /* of these forwards, FSDP_NO_THREAD for several */
    long task;       /* autograd's, if thread is not the root's; else FSDP_NO_TASK */
    /* Of a root: the thread of the last forward below, and whether other threads had
     * forwards since the last backward. */
    uint64_t forward_thread;
    bool several_threads;
    int state; /* fsdp_state */
    char reshard_after_forward, require_sync, return_memory;
    char forward_prefetch, backward_pre, backward_post; /* when the next unit is
                                                           prefetched */
    bool entered;  /* a pre-backward hook has run in this backward */
    bool complete; /* all gradients have arrived in this backward */
    bool queued;   /* of a root: a backward is under way */
    bool compared; /* with the shards, after a forward with gradients */
} FSDPUnit;

/* The units of a root; 0 before set_units(). */
static inline Py_ssize_t
fsdp_count_units(const FSDPUnit *root)
{
    return root->units == NULL ? 0 : PyList_GET_SIZE(root->units);
}

static inline ctpy_state *
fsdp_state_borrow(FSDPUnit *self)
{
    return ctpy_state_borrow((PyObject *)self);
}

/* The unit itself where it has no root. */
static inline FSDPUnit *
fsdp_root_borrow(FSDPUnit *self)
{
    return self->root == NULL ? self : (FSDPUnit *)self->root;
}

static inline void
fsdp_order_forget(fsdp_order *order)
{
    Py_CLEAR(order->before);
    Py_CLEAR(order->now);
}

/* binding/fsdp/collectives.c */

/* A tensor in the memory of the unit's device, or with of_shard in host memory if
 * shards are offloaded; -1 with an exception that names `what`. */
int fsdp_span_from(FSDPUnit *self, PyObject *op, const char *what, int writable,
                   bool of_shard, ct_span *span);
int fsdp_use_stream(FSDPUnit *self); /* sets the core's stream to torch's current */

/* Around work on the unit's memory, without the GIL, on any thread: the unit's GPU is
 * the thread's current GPU. */
#define FSDP_BEGIN_WORK(self)                                                          \
    {                                                                                  \
        int gpu_ = fsdp_gpu(self);                                                     \
        Py_BEGIN_ALLOW_THREADS                                                         \
        fsdp_switch_gpu(self, &gpu_);
#define FSDP_END_WORK(self)                                                            \
    fsdp_switch_gpu(self, &gpu_);                                                      \
    Py_END_ALLOW_THREADS                                                               \
    }
int fsdp_gpu(const FSDPUnit *self);
/* Swaps *gpu and the thread's current GPU. */
void fsdp_switch_gpu(const FSDPUnit *self, int *gpu);

/* -1 with a RuntimeError that names the unit if its parameters have been used since
 * their release: results computed from them are wrong. */
int fsdp_check_unused(FSDPUnit *self);

int fsdp_gather(FSDPUnit *self);
int fsdp_begin_gather(FSDPUnit *self);   /* a prefetch, which fsdp_gather() ends */
void fsdp_drop_prefetch(FSDPUnit *self); /* keeps the exception */
int fsdp_begin_read(FSDPUnit *self);     /* of shards in a file, for fsdp_gather() */
void fsdp_drop_read(FSDPUnit *self);
void fsdp_release(FSDPUnit *self);
int fsdp_reduce(FSDPUnit *self);
int fsdp_await_copies(FSDPUnit *self);   /* of offloaded shards */
void fsdp_await_quietly(FSDPUnit *self); /* the same, keeps the exception */
int fsdp_settle(FSDPUnit *self);         /* the same, and ct_fsdp_settle */
void fsdp_drop_grads(FSDPUnit *self);

/* binding/fsdp/params.c */

/* 1, 0, or -1 with an exception. */
int fsdp_requires_grad(const ctpy_state *state, PyObject *tensor);

/* requires_grad may change before a forward and between it and its backward, of the
 * optimizer's parameter or of its view in the module. `tensors` has both for each
 * parameter, trained parameters first. */
int fsdp_note_frozen(FSDPUnit *self, PyObject *tensors);

/* fn(*args, **kwargs), or NULL with an exception, also where fn has changed a gathered
 * parameter. `attributes` has the __dict__, the name, the parameter and the data_ptr()
 * of each attribute that is a parameter. */
PyObject *fsdp_call(FSDPUnit *self, PyObject *fn, PyObject *args, PyObject *kwargs,
                    PyObject *attributes, bool with_grads);

#endif
