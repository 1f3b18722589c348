/* The insides of FSDPUnit, for the files that implement it. */
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

#define FSDP_NO_SEQUENCE UINT64_MAX /* which no node has but those of leaves */
#define FSDP_NO_THREAD 0            /* which no thread has */
#define FSDP_NO_TASK (-1L)

/* A trainable parameter's place in its group, and what is there of its gradient. */
typedef struct fsdp_leaf {
    size_t group, at, n;
    bool filled; /* there is a gradient, which the next one is added to */
    bool seen;   /* it has arrived since the unit was last complete */
    bool frozen; /* since the module was wrapped: none arrives */
} fsdp_leaf;

/* Units in the order in which a pass came to them: lists, NULL before the first one. */
typedef struct fsdp_order {
    PyObject *before, *now; /* in the pass before, and so far in this one */
} fsdp_order;

typedef struct FSDPUnit {
    PyObject_HEAD
    ct_fsdp core;
    ct_fsdp_ledger ledger;  /* of a root: of all units below it */
    PyObject *communicator; /* NULL before __init__ */
    PyObject *replicas; /* the Communicator of those with the same shards, or NULL */
    PyObject *full, *grads; /* MappedMemory */
    PyObject *residual;     /* the same, or NULL: what codes miss is forgotten */
    PyObject *shards;       /* a tuple, one parameter a group */
    PyObject *grad_owners;  /* a tuple: whose grad is the shard's; NULL: the shards */
    PyObject *root;         /* the FSDPUnit above, itself in a root; NULL: not known */
    PyObject *units;        /* of a root: a list of those below and itself */
    /* Of a root: the unit whose forward ended last, in this forward and in the one
     * before. They are only compared. */
    const void *last_inner, *last_before;
    fsdp_order forwards, backwards; /* of a root */
    PyObject *in_use; /* of a root: the units gathered for the backward, as entered */
    PyObject *ending; /* of a root: a weak reference, alive while a backward may end */
    size_t resident;  /* of a root: what the process had when the backward began */
    fsdp_leaf *leaves;
    size_t n_leaves, leaves_room, n_seen, n_frozen;
    /* In a backward the least of autograd's sequence numbers at which a forward began
     * whose outputs' gradients have come, or FSDP_NO_SEQUENCE. */
    uint64_t first_node;
    uint64_t thread; /* of these forwards, FSDP_NO_THREAD where there are several */
    long task; /* of autograd, where thread is not the root's; else FSDP_NO_TASK */
    /* Of a root: the thread of the last forward below, and whether others have had
     * some since the last backward ended. */
    uint64_t forward_thread;
    bool several_threads;
    int state; /* fsdp_state */
    char reshard_after_forward, require_sync, return_memory;
    /* Whether the gather of the unit that comes next begins when this one is there, in
     * forward and backward, and when its backward has ended. */
    char forward_prefetch, backward_pre, backward_post;
    bool entered;  /* a pre-backward hook has run in this backward */
    bool complete; /* no gradient is missing in this backward */
    bool queued;   /* of a root: a backward is under way */
} FSDPUnit;

/* fsdp.c: where a unit goes from here if it is in one of the states (bits 1 << state);
 * else -1 with the ValueError of assert_state. */
int fsdp_expect(FSDPUnit *self, unsigned states);
ctpy_state *fsdp_state_borrow(FSDPUnit *self);
FSDPUnit *fsdp_root_borrow(FSDPUnit *self); /* itself where that is not known */

/* binding/fsdp/collectives.c: a tensor in the memory of the unit's device; -1 with an
 * exception that names `what`. And where torch works now, for what the unit does there.
 */
int fsdp_span_from(FSDPUnit *self, PyObject *op, const char *what, int writable,
                   ct_span *span);
int fsdp_use_stream(FSDPUnit *self);
/* A shard or the gradient of one, which may be offloaded. */
int fsdp_shard_from(FSDPUnit *self, PyObject *op, const char *what, int writable,
                    ct_span *span);
PyObject *fsdp_new_memory(FSDPUnit *self, PyObject *plugin, size_t bytes, int watched);
/* Memory that stays there, of zeros. */
PyObject *fsdp_new_zeros(FSDPUnit *self, PyObject *plugin, size_t bytes);
void fsdp_discard_cache(FSDPUnit *root); /* without the GIL: it waits for a device */

/* binding/fsdp/unit.c */
extern PyMemberDef fsdp_members[];
extern PyGetSetDef fsdp_getset[];

/* binding/fsdp/collectives.c */
int fsdp_gather(FSDPUnit *self);
int fsdp_reduce(FSDPUnit *self);
void fsdp_release(FSDPUnit *self);
bool fsdp_has_grads(const FSDPUnit *self);
/* Lets go of what only lies ready, of units and of malloc: before memory is shortest.
 */
void fsdp_return_memory(FSDPUnit *root);
/* The same where the process is nearly as large as when the backward began. */
void fsdp_return_growth(FSDPUnit *root);
void fsdp_drop_grads(FSDPUnit *self);
/* -1 with a RuntimeError that names the unit, or any below the root, where parameters
 * have been used since they were released: what was computed of them is wrong. */
int fsdp_check_unused(FSDPUnit *self);
int fsdp_check_all_unused(FSDPUnit *root);
PyObject *FSDPUnit_gather(PyObject *op, PyObject *unused);
PyObject *FSDPUnit_release(PyObject *op, PyObject *unused);
extern const char FSDPUnit_gather_doc[], FSDPUnit_release_doc[];

/* binding/fsdp/collectives.c */
void fsdp_order_begin(fsdp_order *order); /* of a pass */
void fsdp_order_forget(fsdp_order *order);
/* Notes that this unit's turn has come. What was begun for another one is dropped. */
int fsdp_order_reach(FSDPUnit *self, fsdp_order *order);
/* Begins the gather of the unit whose turn was next in the pass before, where that has
 * gone the same way and nothing else is begun: one unit more than are needed. A
 * collective, to be called where all ranks do. 0, or -1 with nothing begun. */
int fsdp_prefetch(FSDPUnit *self, const fsdp_order *order);
/* gathered, or -1 with an exception */
void fsdp_drop_prefetch(FSDPUnit *self); /* keeps the exception */
void fsdp_drop_prefetches(FSDPUnit *root);

/* binding/fsdp/passes.c */
PyObject *FSDPUnit_forward(PyObject *op, PyObject *args);
PyObject *FSDPUnit_set_units(PyObject *op, PyObject *units);
PyObject *FSDPUnit_forget_root(PyObject *op, PyObject *unused);
PyObject *FSDPUnit_recover(PyObject *op, PyObject *unused);
extern const char FSDPUnit_forward_doc[], FSDPUnit_set_units_doc[],
    FSDPUnit_forget_root_doc[], FSDPUnit_recover_doc[];

/* What torch's other hooks call. */
PyObject *FSDPUnit_take_grad(PyObject *op, PyObject *const *args, Py_ssize_t n);
PyObject *FSDPUnit_input_done(PyObject *op, PyObject *grad);
PyObject *FSDPUnit_finish(PyObject *op, PyObject *unused);
extern const char FSDPUnit_take_grad_doc[], FSDPUnit_input_done_doc[],
    FSDPUnit_finish_doc[];

/* binding/fsdp/unit.c */
PyObject *FSDPUnit_clip(PyObject *op, PyObject *args);

#endif
