/* The insides of BMUF, for the files that implement it. */
#ifndef CTPY_BMUF_H
#define CTPY_BMUF_H

#include "binding/comm/communicator.h"
#include "core/bmuf/bmuf.h"

typedef struct BMUF {
    PyObject_HEAD
    PyObject *inner;        /* the optimizer; NULL before __init__ */
    PyObject *communicator; /* a Communicator */
    ct_bmuf core;
    ct_bmuf_config config;  /* as given */
    ct_bmuf_config meeting; /* of the block that ends: SlowMo's follow the rate */
    int64_t num_updates;
    bool average_sync;
    bool slowmo;
    bool started; /* the global model is one of these parameters */
    bool busy;    /* a pass is under way without the GIL */
    bool holds;   /* the communicator, which stays open while a block is away */
    int root;     /* of a new group: whose model and momentum all take over */
} BMUF;

/* Tensors of Python as the core's list; owns what it borrows from. Zeros is empty. */
typedef struct bmuf_tensors {
    PyObject *sources, *copies; /* sequences of PySequence_Fast */
    ct_bmuf_tensor *tensors;
    ct_bmuf_list list;
} bmuf_tensors;

/* binding/bmuf/bmuf_tensors.c: `sources`, and one by one the copies of lower precision, None or a
 * tensor; copies may be NULL. 0, or -1 with an exception that names the one at fault
 * and nothing to release. */
int bmuf_tensors_read(ctpy_state *state, PyObject *sources, PyObject *copies,
                      bmuf_tensors *t);
void bmuf_tensors_free(bmuf_tensors *t);

/* What works on a list without the GIL. */
typedef ct_status
bmuf_pass(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err);

/* binding/bmuf/bmuf_sync.c: calls the hook of that name, which gives tensors and their copies or
 * None, and runs the pass over them; and decides what a block is computed with. */
int bmuf_run(BMUF *self, PyObject *hook, bmuf_pass *pass);
int bmuf_settle(BMUF *self, ctpy_state *state);

/* binding/bmuf/bmuf_sync.c: what a block that is over has to do besides. */
int bmuf_after_block(BMUF *self, ctpy_state *state);

/* binding/bmuf/bmuf_flight.c: blocks whose average is taken later. */
int bmuf_depart(BMUF *self, ctpy_state *state);
bool bmuf_is_due(const BMUF *self);
int bmuf_arrive(BMUF *self, ctpy_state *state);
void bmuf_land(BMUF *self); /* waits and forgets */
PyObject *BMUF_finish(PyObject *op, PyObject *unused);
extern const char BMUF_finish_doc[];

/* binding/bmuf/bmuf_sync.c: a RuntimeError, "what" in it, while a pass is under way; what follows an
 * update; and what the face calls. */
int bmuf_check_idle(const BMUF *self, const char *what);
int bmuf_after_update(BMUF *self);
PyObject *BMUF_average_moments(PyObject *op, PyObject *unused);
PyObject *BMUF_start(PyObject *op, PyObject *unused);
PyObject *BMUF_adopt(PyObject *op, PyObject *args);
extern const char BMUF_average_moments_doc[], BMUF_start_doc[], BMUF_adopt_doc[];

/* binding/bmuf/bmuf_state.c: what is saved besides the inner optimizer's state. */
PyObject *BMUF_save_blocks(PyObject *op, PyObject *args);
PyObject *BMUF_load_blocks(PyObject *op, PyObject *args);
PyObject *BMUF_save_residual(PyObject *op, PyObject *arg);
PyObject *BMUF_load_residual(PyObject *op, PyObject *arg);
PyObject *BMUF_save_left(PyObject *op, PyObject *arg);
PyObject *BMUF_load_left(PyObject *op, PyObject *arg);
extern const char BMUF_save_left_doc[], BMUF_load_left_doc[];
extern const char BMUF_save_blocks_doc[], BMUF_load_blocks_doc[];
extern const char BMUF_save_residual_doc[], BMUF_load_residual_doc[];

#endif
