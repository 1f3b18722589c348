/* What happens at the ends of blocks. */
#include "binding/bmuf/bmuf.h"

#include <math.h>

int
bmuf_check_idle(const BMUF *self, const char *what)
{
    if (self->inner == NULL || self->busy) {
        PyErr_Format(PyExc_RuntimeError,
                     self->busy ? "%s while another thread synchronises a block"
                                : "%s before BMUF.__init__() was called",
                     what);
        return -1;
    }
    return 0;
}

/* ---- passes ------------------------------------------------------------------------
 */

static int
run_over(BMUF *self, const bmuf_tensors *t, bmuf_pass *pass)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    ct_comm *comm = ctpy_comm_borrow(state, self->communicator);
    ct_status status;
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    Communicator *group = (Communicator *)Py_NewRef(self->communicator);
    group->busy++;
    self->busy = true;
    Py_BEGIN_ALLOW_THREADS
    status = pass(self, comm, &t->list, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    group->busy--;
    Py_DECREF(group);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* The hook gives a pair: tensors, and copies of theirs or None. */
int
bmuf_run(BMUF *self, PyObject *name, bmuf_pass *pass)
{
    PyObject *found = PyObject_CallMethodNoArgs((PyObject *)self, name);
    PyObject *sources, *copies;
    bmuf_tensors t;
    int result = -1;
    if (found == NULL) {
        return -1;
    }
    if (!PyArg_ParseTuple(found, "OO", &sources, &copies) ||
        bmuf_tensors_read(ctpy_state_borrow((PyObject *)self), sources,
                          copies == Py_None ? NULL : copies, &t) < 0) {
        Py_DECREF(found);
        return -1;
    }
    result = run_over(self, &t, pass);
    bmuf_tensors_free(&t);
    Py_DECREF(found);
    return result;
}

static ct_status
pass_start(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    (void)comm;
    return ct_bmuf_start(&self->core, &self->config, list, err);
}

static ct_status
pass_take_over(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    return ct_bmuf_take_over(&self->core, &self->config, comm, list, err);
}

static ct_status
pass_meet(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    return ct_bmuf_meet(&self->core, &self->meeting, comm, list, err);
}

static ct_status
pass_average(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    return ct_bmuf_average(&self->core, comm, list, err);
}

/* ---- the ends of blocks ------------------------------------------------------------
 */

static int
call_hook(BMUF *self, PyObject *name)
{
    PyObject *answer = PyObject_CallMethodNoArgs((PyObject *)self, name);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

const char BMUF_average_moments_doc[] =
    "_average_moments($self, /)\n--\n\n"
    "Replace the tensors that _moments() gives by their averages over all "
    "ranks.";

PyObject *
BMUF_average_moments(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *state = ctpy_state_borrow(op);
    return bmuf_check_idle((BMUF *)op, "_average_moments()") < 0 ||
                   bmuf_run((BMUF *)op, state->str__moments, pass_average) < 0
               ? NULL
               : Py_NewRef(Py_None);
}

const char BMUF_start_doc[] =
    "_start($self, /)\n--\n\n"
    "Take the parameters for the global model and begin a block.";

PyObject *
BMUF_start(PyObject *op, PyObject *Py_UNUSED(unused))
{
    BMUF *self = (BMUF *)op;
    ctpy_state *state = ctpy_state_borrow(op);
    if (bmuf_check_idle(self, "_start()") < 0) {
        return NULL;
    }
    bmuf_land(self);
    if (bmuf_run(self, state->str__synced_tensors, pass_start) < 0) {
        return NULL;
    }
    self->started = true;
    Py_RETURN_NONE;
}

static ct_status
pass_adopt(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    return ct_bmuf_adopt(&self->core, &self->config, comm, self->root, list, err);
}

static int
check_landed(const BMUF *self)
{
    if (self->core.is_away) {
        PyErr_SetString(PyExc_RuntimeError,
                        "regroup() before the average of the block that ended has been "
                        "taken: call finish() first, on all ranks");
        return -1;
    }
    return 0;
}

const char BMUF_adopt_doc[] =
    "_adopt($self, communicator, root, num_updates, /)\n--\n\n"
    "Go on in another group, from the root's parameters and momentum, after\n"
    "num_updates.";

PyObject *
BMUF_adopt(PyObject *op, PyObject *args)
{
    BMUF *self = (BMUF *)op;
    ctpy_state *state = ctpy_state_borrow(op);
    PyObject *communicator;
    long long updates;
    int root;
    if (!PyArg_ParseTuple(args, "OiL:_adopt", &communicator, &root, &updates) ||
        bmuf_check_idle(self, "regroup()") < 0 || check_landed(self) < 0 ||
        ctpy_comm_borrow(state, communicator) == NULL) {
        return NULL;
    }
    Py_XSETREF(self->communicator, Py_NewRef(communicator));
    self->root = root;
    if (bmuf_run(self, state->str__synced_tensors, pass_adopt) < 0) {
        return NULL;
    }
    self->started = true;
    self->num_updates = updates;
    return call_hook(self, state->str__after_sync) < 0 ? NULL : Py_NewRef(Py_None);
}

static int
end_warmup(BMUF *self, ctpy_state *state)
{
    if (bmuf_run(self, state->str__synced_tensors, pass_take_over) < 0) {
        return -1;
    }
    self->started = true;
    return call_hook(self, self->average_sync ? state->str_average_params
                                              : state->str__reset_optimizer) < 0
               ? -1
               : call_hook(self, state->str__after_sync);
}

/* What this block is computed with: SlowMo divides by the optimizer's rate. */
int
bmuf_settle(BMUF *self, ctpy_state *state)
{
    self->meeting = self->config;
    if (!self->slowmo) {
        return 0;
    }
    PyObject *answer = PyObject_CallMethodNoArgs(self->inner, state->str_get_lr);
    const double rate = answer == NULL ? -1.0 : PyFloat_AsDouble(answer);
    Py_XDECREF(answer);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (!(rate > 0.0 && isfinite(rate))) {
        answer = PyFloat_FromDouble(rate);
        PyErr_Format(PyExc_ValueError,
                     "the optimizer's lr is %R where a block of SlowMo ends, which "
                     "divides by it; expected a finite one above 0",
                     answer);
        Py_XDECREF(answer);
        return -1;
    }
    self->meeting.lr = 1.0 / rate;
    self->meeting.reach = self->config.lr * rate;
    return 0;
}

int
bmuf_after_block(BMUF *self, ctpy_state *state)
{
    return self->average_sync && call_hook(self, state->str_average_params) < 0
               ? -1
               : call_hook(self, state->str__after_sync);
}

static int
end_block(BMUF *self, ctpy_state *state)
{
    if (self->config.overlap > 0) {
        return bmuf_depart(self, state);
    }
    return bmuf_settle(self, state) < 0 ||
                   bmuf_run(self, state->str__synced_tensors, pass_meet) < 0
               ? -1
               : bmuf_after_block(self, state);
}

int
bmuf_after_update(BMUF *self)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    const ct_comm *comm = ctpy_comm_borrow(state, self->communicator);
    if (comm == NULL) {
        return -1;
    }
    if (comm->world_size < 2) {
        return 0;
    }
    if (bmuf_is_due(self) && bmuf_arrive(self, state) < 0) {
        return -1;
    }
    switch (ct_bmuf_after(&self->config, self->num_updates)) {
    case CT_BMUF_WARMUP_END:
        return end_warmup(self, state);
    case CT_BMUF_BLOCK_END:
        return end_block(self, state);
    case CT_BMUF_NOTHING:
        break;
    }
    return 0;
}
