/* ctrainer._C.BMUF: workers that train apart and meet at the ends of blocks. */
#include "binding/comm/communicator.h"
#include "binding/runtime/buffer.h"

#include "core/base/alloc.h"
#include "core/bmuf/bmuf.h"
#include "core/device/device.h"

#include <math.h>
#include <string.h>

typedef struct BMUF {
    PyObject_HEAD
    PyObject *inner;        /* the optimizer; NULL before __init__ */
    PyObject *communicator; /* a Communicator */
    ct_bmuf core;
    ct_bmuf_config config;       /* as given */
    ct_bmuf_config block_config; /* of the block that ends: SlowMo's follow the rate */
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

/* What works on a list without the GIL. */
typedef ct_status
bmuf_pass(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err);

PyDoc_STRVAR(
    BMUF_doc,
    "BMUF(optimizer, communicator, *, global_sync_iter=50, block_lr=1.0,\n"
    "     block_momentum=0.875, look='plain', average_sync=False,\n"
    "     warmup_iterations=500, delta_bits=32, overlap_steps=0)\n--\n\n"
    "Blocks of updates over an optimizer; ctrainer.BMUF is its public class, which "
    "has\n"
    "the hooks _synced_tensors(), _moments(), average_params(), _reset_optimizer() "
    "and\n"
    "_after_sync().");

static Communicator *
group_of(const BMUF *self)
{
    return (Communicator *)self->communicator;
}

/* An open communicator is not closed while it works for us. */
static void
hold_group(BMUF *self)
{
    const bool wanted = self->core.is_under_way;
    if (wanted != self->holds) {
        group_of(self)->busy += wanted ? 1 : -1;
        self->holds = wanted;
    }
}

static void
bmuf_abandon(BMUF *self)
{
    if (self->holds) {
        ct_comm *comm = group_of(self)->comm;
        Py_BEGIN_ALLOW_THREADS
        ct_bmuf_abandon(&self->core, comm);
        Py_END_ALLOW_THREADS
        hold_group(self);
    }
    self->core.is_away = false;
}

/* binding/bmuf/bmuf.c: blocks whose average is taken later. */
void bmuf_abandon(BMUF *self); /* waits and forgets */

static const char BMUF_average_moments_doc[] =
    "_average_moments($self, /)\n--\n\n"
    "Replace the tensors that _moments() gives by their averages over all "
    "ranks.";

static const char BMUF_start_doc[] =
    "_start($self, /)\n--\n\n"
    "Take the parameters for the global model and begin a block.";

static const char BMUF_save_blocks_doc[] =
    "_save_blocks($self, model, momentum, /)\n--\n\n"
    "Copy the global model and the momentum of blocks into tensors as long as the\n"
    "parameters, float64 or float32 as their blocks are computed in.";

static const char BMUF_save_residual_doc[] =
    "_save_residual($self, residual, /)\n--\n\n"
    "Copy what this rank's codes of distances have missed into tensors like those of\n"
    "_save_blocks().";

static const char BMUF_save_left_doc[] =
    "_save_left($self, left, /)\n--\n\n"
    "Copy the parameters as they were when the block ended whose average has not been\n"
    "taken yet into tensors like those of _save_blocks().";

/* ---- lifetime ----------------------------------------------------------------------
 */

static PyObject *
BMUF_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyObject *op = type->tp_alloc(type, 0);
    if (op != NULL) {
        ct_bmuf_init(&((BMUF *)op)->core, &ct_device_cpu, NULL);
    }
    return op;
}

static int
BMUF_traverse(PyObject *op, visitproc visit, void *arg)
{
    BMUF *self = (BMUF *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->inner);
    Py_VISIT(self->communicator);
    return 0;
}

static int
BMUF_clear(PyObject *op)
{
    BMUF *self = (BMUF *)op;
    if (self->communicator != NULL) {
        bmuf_abandon(self);
    }
    Py_CLEAR(self->inner);
    Py_CLEAR(self->communicator);
    return 0;
}

static void
BMUF_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)BMUF_clear(op);
    ct_bmuf_fini(&((BMUF *)op)->core);
    type->tp_free(op);
    Py_DECREF(type);
}

static int
parse_look(const char *name, ct_block_look *look, bool *slowmo)
{
    static const char *const names[] = {[CT_BLOCK_PLAIN] = "plain",
                                        [CT_BLOCK_NBM] = "nbm",
                                        [CT_BLOCK_NESTEROV] = "nesterov"};
    *slowmo = strcmp(name, "slowmo") == 0;
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, names[i]) == 0) {
            *look = (ct_block_look)i;
            return 0;
        }
    }
    if (*slowmo) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "look is '%.100s'; expected plain, nbm, nesterov or slowmo", name);
    return -1;
}

/* binding/bmuf/bmuf.c: a RuntimeError, "what" in it, while a pass is under way; what
 * follows an update; and what the wrapper calls. */
static int
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

static int
BMUF_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"optimizer",
                            "communicator",
                            "global_sync_iter",
                            "block_lr",
                            "block_momentum",
                            "look",
                            "average_sync",
                            "warmup_iterations",
                            "delta_bits",
                            "overlap_steps",
                            NULL};
    BMUF *self = (BMUF *)op;
    PyObject *inner, *communicator;
    const char *look = "plain";
    long long every = 50, warmup = 500, overlap = 0;
    int average = 0;
    bool slowmo = false;
    ct_bmuf_config config = {
        .lr = 1.0, .momentum = 0.875, .reach = 1.0, .delta_bits = 32};
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$LddspLiL:BMUF", names, &inner,
                                     &communicator, &every, &config.lr,
                                     &config.momentum, &look, &average, &warmup,
                                     &config.delta_bits, &overlap) ||
        parse_look(look, &config.look, &slowmo) < 0 ||
        ctpy_comm_borrow(ctpy_state_borrow(op), communicator) == NULL) {
        return -1;
    }
    config.sync_iter = every;
    config.warmup = warmup;
    config.overlap = overlap;
    if (ct_bmuf_check(&config, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    if (self->inner != NULL && bmuf_check_idle(self, "__init__()") < 0) {
        return -1;
    }
    if (self->communicator != NULL) {
        bmuf_abandon(self);
    }
    Py_XSETREF(self->inner, Py_NewRef(inner));
    Py_XSETREF(self->communicator, Py_NewRef(communicator));
    self->config = config;
    self->average_sync = average;
    self->slowmo = slowmo;
    self->num_updates = 0;
    self->started = false;
    return 0;
}

/* ---- updates ------------------------------------------------------------------------
 */

PyDoc_STRVAR(
    step_doc,
    "step($self, /, *args, **kwargs)\n--\n\n"
    "Call the optimizer's step(), and synchronise with the other ranks where a "
    "block ends.\n\n"
    "Returns what it returned. An update that raises is not counted. Raises\n"
    "RuntimeError naming the rank when another fails or stays away.");

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

static void
bmuf_tensors_free(bmuf_tensors *t)
{
    ct_free(t->tensors);
    Py_XDECREF(t->copies);
    Py_XDECREF(t->sources);
    *t = (bmuf_tensors){0};
}

static int
read_span(ctpy_state *state, PyObject *op, const char *what, Py_ssize_t index,
          ct_span *span)
{
    char text[64];
    (void)PyOS_snprintf(text, sizeof text, "%s %zd", what, index);
    const ctpy_place place = {.what = text, .group = -1};
    ctpy_view view;
    if (ctpy_view_of(state, op, &place, &view) < 0) {
        return -1;
    }
    if (view.readonly) {
        PyErr_Format(PyExc_ValueError, "%s is read-only", text);
        return -1;
    }
    *span = view.span;
    return 0;
}

static int
read_tensor(ctpy_state *state, const bmuf_tensors *t, Py_ssize_t i)
{
    ct_bmuf_tensor *tensor = &t->tensors[i];
    PyObject *source = PySequence_Fast_GET_ITEM(t->sources, i);
    PyObject *copy =
        t->copies == NULL ? Py_None : PySequence_Fast_GET_ITEM(t->copies, i);
    *tensor = (ct_bmuf_tensor){.span = {.dtype = CT_F32}};
    if (read_span(state, source, "parameter", i, &tensor->span) < 0) {
        return -1;
    }
    if (copy == Py_None) {
        return 0;
    }
    if (read_span(state, copy, "copy of parameter", i, &tensor->copy) < 0) {
        return -1;
    }
    if (tensor->copy.n != tensor->span.n) {
        PyErr_Format(PyExc_ValueError, "parameter %zd has %zu elements, its copy %zu",
                     i, tensor->span.n, tensor->copy.n);
        return -1;
    }
    return 0;
}

static int
read_all(ctpy_state *state, bmuf_tensors *t)
{
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(t->sources);
    if (t->copies != NULL && PySequence_Fast_GET_SIZE(t->copies) != n) {
        PyErr_Format(PyExc_ValueError,
                     "%zd parameters and %zd copies; expected as many", n,
                     PySequence_Fast_GET_SIZE(t->copies));
        return -1;
    }
    t->tensors = ct_calloc((size_t)n + 1, sizeof *t->tensors);
    if (t->tensors == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (read_tensor(state, t, i) < 0) {
            return -1;
        }
    }
    t->list = (ct_bmuf_list){t->tensors, (size_t)n};
    return 0;
}

/* Tuples, so that nobody can take what is worked on out of them. */
static int
bmuf_tensors_read(ctpy_state *state, PyObject *sources, PyObject *copies,
                  bmuf_tensors *t)
{
    *t = (bmuf_tensors){.sources = PySequence_Tuple(sources)};
    if (t->sources != NULL && copies != NULL) {
        t->copies = PySequence_Tuple(copies);
    }
    if (t->sources == NULL || (copies != NULL && t->copies == NULL) ||
        read_all(state, t) < 0) {
        bmuf_tensors_free(t);
        return -1;
    }
    return 0;
}

/* The hook gives a pair: tensors, and copies of theirs or None. */
static int
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
pass_take_over(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    return ct_bmuf_take_over(&self->core, &self->config, comm, list, err);
}

static int
call_hook(BMUF *self, PyObject *name)
{
    PyObject *answer = PyObject_CallMethodNoArgs((PyObject *)self, name);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
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

static ct_status
pass_synchronize(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    return ct_bmuf_synchronize(&self->core, &self->block_config, comm, list, err);
}

/* What this block is computed with: SlowMo divides by the optimizer's rate. */
static int
bmuf_settle(BMUF *self, ctpy_state *state)
{
    self->block_config = self->config;
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
    self->block_config.lr = 1.0 / rate;
    self->block_config.reach = self->config.lr * rate;
    return 0;
}

/* binding/bmuf/bmuf.c: what a block that is over has to do besides. */
static int
bmuf_after_block(BMUF *self, ctpy_state *state)
{
    return self->average_sync && call_hook(self, state->str_average_params) < 0
               ? -1
               : call_hook(self, state->str__after_sync);
}

static ct_status
pass_begin(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    return ct_bmuf_begin(&self->core, comm, list, err);
}

static int
bmuf_begin(BMUF *self, ctpy_state *state)
{
    const int result = bmuf_run(self, state->str__synced_tensors, pass_begin);
    hold_group(self);
    return result;
}

static int
end_block(BMUF *self, ctpy_state *state)
{
    if (self->config.overlap > 0) {
        return bmuf_begin(self, state);
    }
    return bmuf_settle(self, state) < 0 ||
                   bmuf_run(self, state->str__synced_tensors, pass_synchronize) < 0
               ? -1
               : bmuf_after_block(self, state);
}

/* So many updates after the block has ended, or where the count has been moved on. */
static bool
bmuf_is_due(const BMUF *self)
{
    const int64_t since = self->num_updates % self->config.sync_iter;
    return self->core.is_away && (since == 0 || since >= self->config.overlap);
}

static ct_status
pass_finish(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    return ct_bmuf_finish(&self->core, &self->block_config, comm, list, err);
}

static int
bmuf_finish(BMUF *self, ctpy_state *state)
{
    if (bmuf_settle(self, state) < 0) {
        return -1;
    }
    const int result = bmuf_run(self, state->str__synced_tensors, pass_finish);
    hold_group(self);
    return result < 0 ? -1 : bmuf_after_block(self, state);
}

static int
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
    if (bmuf_is_due(self) && bmuf_finish(self, state) < 0) {
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

static PyObject *
BMUF_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    BMUF *self = (BMUF *)op;
    ctpy_state *state = ctpy_state_borrow(op);
    if (bmuf_check_idle(self, "step()") < 0) {
        return NULL;
    }
    PyObject *step = PyObject_GetAttr(self->inner, state->str_step);
    PyObject *answer = step == NULL ? NULL : PyObject_Call(step, args, kwargs);
    Py_XDECREF(step);
    if (answer != NULL) {
        self->num_updates++;
        if (bmuf_after_update(self) < 0) {
            Py_CLEAR(answer);
        }
    }
    return answer;
}

PyDoc_STRVAR(
    count_update_doc,
    "count_update($self, /)\n--\n\n"
    "Count an update that was made elsewhere, or skipped after an overflow,\n"
    "and synchronise with the other ranks where a block ends: they count on it.");

static PyObject *
BMUF_count_update(PyObject *op, PyObject *Py_UNUSED(unused))
{
    BMUF *self = (BMUF *)op;
    if (bmuf_check_idle(self, "count_update()") < 0) {
        return NULL;
    }
    self->num_updates++;
    return bmuf_after_update(self) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- what Python sees --------------------------------------------------------------
 */

PyDoc_STRVAR(get_num_updates_doc, "get_num_updates($self, /)\n--\n\n"
                                  "Return how many updates have been counted.");

static PyObject *
BMUF_get_num_updates(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLongLong(((BMUF *)op)->num_updates);
}

PyDoc_STRVAR(set_num_updates_doc, "set_num_updates($self, num_updates, /)\n--\n\n"
                                  "Set the number of updates, 0 or more.");

static PyObject *
BMUF_set_num_updates(PyObject *op, PyObject *arg)
{
    const long long n = PyLong_AsLongLong(arg);
    if (n == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (n < 0) {
        PyErr_Format(PyExc_ValueError, "num_updates must be at least 0, got %lld", n);
        return NULL;
    }
    ((BMUF *)op)->num_updates = n;
    Py_RETURN_NONE;
}

static PyObject *
BMUF_get_use_nbm(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((BMUF *)op)->config.look == CT_BLOCK_NBM);
}

static PyObject *
BMUF_get_world_size(PyObject *op, void *Py_UNUSED(closure))
{
    BMUF *self = (BMUF *)op;
    if (bmuf_check_idle(self, "world_size") < 0) {
        return NULL;
    }
    const ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), self->communicator);
    return comm == NULL ? NULL : PyLong_FromLong(comm->world_size);
}

static int
check_started(const BMUF *self)
{
    if (self->busy || !self->started || self->config.momentum == 0.0) {
        PyErr_SetString(PyExc_RuntimeError,
                        self->busy ? "a block is being synchronised by another thread"
                                   : "there are no blocks to save or load: "
                                     "block_momentum is 0, or training has not begun");
        return -1;
    }
    return 0;
}

typedef ct_status copy_fn(ct_bmuf *bmuf, const ct_bmuf_flat *flat,
                          const ct_bmuf_list *list, ct_error *err);

static int
copy_one(BMUF *self, const ct_bmuf_flat *flat, PyObject *tensors, copy_fn *copy)
{
    bmuf_tensors t;
    ct_status status;
    ct_error err;
    if (bmuf_tensors_read(ctpy_state_borrow((PyObject *)self), tensors, NULL, &t) < 0) {
        return -1;
    }
    self->busy = true;
    Py_BEGIN_ALLOW_THREADS
    status = copy(&self->core, flat, &t.list, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    bmuf_tensors_free(&t);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static PyObject *
copy_both(PyObject *op, PyObject *args, const char *format, copy_fn *copy)
{
    BMUF *self = (BMUF *)op;
    PyObject *global, *momentum;
    if (!PyArg_ParseTuple(args, format, &global, &momentum) ||
        check_started(self) < 0 ||
        copy_one(self, &self->core.global, global, copy) < 0 ||
        copy_one(self, &self->core.momentum, momentum, copy) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* binding/bmuf/bmuf.c: what is saved besides the inner optimizer's state. */
static PyObject *
BMUF_save_blocks(PyObject *op, PyObject *args)
{
    return copy_both(op, args, "OO:_save_blocks", ct_bmuf_save);
}

static PyObject *
BMUF_load_blocks(PyObject *op, PyObject *args)
{
    return copy_both(op, args, "OO:_load_blocks", ct_bmuf_load);
}

static PyObject *
copy_residual(PyObject *op, PyObject *tensors, copy_fn *copy)
{
    BMUF *self = (BMUF *)op;
    if (check_started(self) < 0) {
        return NULL;
    }
    if (!ct_bmuf_is_coded(&self->config)) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "there is no residual: delta_bits is 32, and nothing is missed");
        return NULL;
    }
    return copy_one(self, &self->core.residual, tensors, copy) < 0 ? NULL
                                                                   : Py_NewRef(Py_None);
}

static PyObject *
BMUF_save_residual(PyObject *op, PyObject *arg)
{
    return copy_residual(op, arg, ct_bmuf_save);
}

static PyObject *
BMUF_load_residual(PyObject *op, PyObject *arg)
{
    return copy_residual(op, arg, ct_bmuf_load);
}

static PyObject *
BMUF_save_left(PyObject *op, PyObject *arg)
{
    BMUF *self = (BMUF *)op;
    if (check_started(self) < 0 ||
        copy_one(self, &self->core.left, arg, ct_bmuf_save) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static ct_status
load_left(ct_bmuf *bmuf, const ct_bmuf_flat *flat, const ct_bmuf_list *list,
          ct_error *err)
{
    (void)flat;
    return ct_bmuf_load_left(bmuf, list, err);
}

static PyObject *
BMUF_load_left(PyObject *op, PyObject *arg)
{
    BMUF *self = (BMUF *)op;
    if (check_started(self) < 0 ||
        copy_one(self, &self->core.left, arg, load_left) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static ct_status
pass_average(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    return ct_bmuf_average(&self->core, comm, list, err);
}

static PyObject *
BMUF_average_moments(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *state = ctpy_state_borrow(op);
    return bmuf_check_idle((BMUF *)op, "_average_moments()") < 0 ||
                   bmuf_run((BMUF *)op, state->str__moments, pass_average) < 0
               ? NULL
               : Py_NewRef(Py_None);
}

static ct_status
pass_start(BMUF *self, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    (void)comm;
    return ct_bmuf_start(&self->core, &self->config, list, err);
}

static PyObject *
BMUF_start(PyObject *op, PyObject *Py_UNUSED(unused))
{
    BMUF *self = (BMUF *)op;
    ctpy_state *state = ctpy_state_borrow(op);
    if (bmuf_check_idle(self, "_start()") < 0) {
        return NULL;
    }
    bmuf_abandon(self);
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
check_finished(const BMUF *self)
{
    if (self->core.is_away) {
        PyErr_SetString(PyExc_RuntimeError,
                        "regroup() before the average of the block that ended has been "
                        "taken: call finish() first, on all ranks");
        return -1;
    }
    return 0;
}

static PyObject *
BMUF_adopt(PyObject *op, PyObject *args)
{
    BMUF *self = (BMUF *)op;
    ctpy_state *state = ctpy_state_borrow(op);
    PyObject *communicator;
    long long updates;
    int root;
    if (!PyArg_ParseTuple(args, "OiL:_adopt", &communicator, &root, &updates) ||
        bmuf_check_idle(self, "regroup()") < 0 || check_finished(self) < 0 ||
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

static PyObject *
BMUF_finish(PyObject *op, PyObject *Py_UNUSED(unused))
{
    BMUF *self = (BMUF *)op;
    if (bmuf_check_idle(self, "finish()") < 0 ||
        (self->core.is_away && bmuf_finish(self, ctpy_state_borrow(op)) < 0)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* What BMUF saves besides the state of the optimizer within. */

static const char BMUF_load_blocks_doc[] =
    "_load_blocks($self, model, momentum, /)\n--\n\n"
    "Take what _save_blocks() gave.";

static const char BMUF_load_residual_doc[] =
    "_load_residual($self, residual, /)\n--\n\n"
    "Take what _save_residual() gave.";

static const char BMUF_load_left_doc[] =
    "_load_left($self, left, /)\n--\n\n"
    "Take what _save_left() gave, and that average later.";

/* What happens at the ends of blocks. */

/* ---- the ends of blocks ------------------------------------------------------------
 */

static const char BMUF_adopt_doc[] =
    "_adopt($self, communicator, root, num_updates, /)\n--\n\n"
    "Go on in another group, from the root's parameters and momentum, after\n"
    "num_updates.";

/* Blocks whose average is taken some updates after they have ended. */

static const char BMUF_finish_doc[] =
    "finish($self, /)\n--\n\n"
    "Take the average of a block that ended less than overlap_steps updates ago: all\n"
    "ranks call it, as after the last update. Without such a block nothing happens.";

/* Tensors of Python as what blocks work on. */

static PyGetSetDef BMUF_getset[] = {
    {"use_nbm",    BMUF_get_use_nbm,    NULL, "Nesterov's block momentum.",  NULL},
    {"world_size", BMUF_get_world_size, NULL, "Ranks that meet, 1: nobody.", NULL},
    {NULL,         NULL,                NULL, NULL,                          NULL},
};

static PyMemberDef BMUF_members[] = {
    {"_optimizer", T_OBJECT_EX, offsetof(BMUF, inner), READONLY,
     "The optimizer that updates."},
    {"communicator", T_OBJECT_EX, offsetof(BMUF, communicator), READONLY,
     "The group of those who meet."},
    {"sync_iter", T_LONGLONG, offsetof(BMUF, config.sync_iter), READONLY,
     "Updates in a block."},
    {"warmup_iteration", T_LONGLONG, offsetof(BMUF, config.warmup), READONLY,
     "Updates before the workers first meet."},
    {"block_momentum", T_DOUBLE, offsetof(BMUF, config.momentum), READONLY,
     "Momentum of blocks; 0: the models are averaged."},
    {"block_lr", T_DOUBLE, offsetof(BMUF, config.lr), READONLY,
     "Learning rate of blocks."},
    {"overlap_steps", T_LONGLONG, offsetof(BMUF, config.overlap), READONLY,
     "Updates after the end of a block in which its average is taken."},
    {"is_away", T_BOOL, offsetof(BMUF, core.is_away), READONLY,
     "Whether a block has ended whose average has not been taken yet."},
    {"delta_bits", T_INT, offsetof(BMUF, config.delta_bits), READONLY,
     "Bits in which distances travel: 32, or quantized to 8 or 4."},
    {"average_sync", T_BOOL, offsetof(BMUF, average_sync), READONLY,
     "Whether the optimizers' moments are averaged where workers meet."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef BMUF_methods[] = {
    {"_adopt",           BMUF_adopt,                             METH_VARARGS,                 BMUF_adopt_doc          },
    {"_average_moments", BMUF_average_moments,                   METH_NOARGS,                  BMUF_average_moments_doc},
    {"_load_blocks",     BMUF_load_blocks,                       METH_VARARGS,                 BMUF_load_blocks_doc    },
    {"_load_residual",   BMUF_load_residual,                     METH_O,                       BMUF_load_residual_doc  },
    {"_save_residual",   BMUF_save_residual,                     METH_O,                       BMUF_save_residual_doc  },
    {"_save_blocks",     BMUF_save_blocks,                       METH_VARARGS,                 BMUF_save_blocks_doc    },
    {"_start",           BMUF_start,                             METH_NOARGS,                  BMUF_start_doc          },
    {"get_num_updates",  BMUF_get_num_updates,                   METH_NOARGS,                  get_num_updates_doc     },
    {"set_num_updates",  BMUF_set_num_updates,                   METH_O,                       set_num_updates_doc     },
    {"finish",           BMUF_finish,                            METH_NOARGS,                  BMUF_finish_doc         },
    {"_load_left",       BMUF_load_left,                         METH_O,                       BMUF_load_left_doc      },
    {"_save_left",       BMUF_save_left,                         METH_O,                       BMUF_save_left_doc      },
    {"count_update",     BMUF_count_update,                      METH_NOARGS,                  count_update_doc        },
    {"step",             (PyCFunction)(void (*)(void))BMUF_step, METH_VARARGS | METH_KEYWORDS,
     step_doc                                                                                                          },
    {NULL,               NULL,                                   0,                            NULL                    },
};

static PyType_Slot BMUF_slots[] = {
    {Py_tp_doc,      (void *)BMUF_doc},
    {Py_tp_new,      BMUF_new        },
    {Py_tp_init,     BMUF_init       },
    {Py_tp_traverse, BMUF_traverse   },
    {Py_tp_clear,    BMUF_clear      },
    {Py_tp_dealloc,  BMUF_dealloc    },
    {Py_tp_methods,  BMUF_methods    },
    {Py_tp_getset,   BMUF_getset     },
    {Py_tp_members,  BMUF_members    },
    {0,              NULL            },
};

PyType_Spec BMUF_spec = {
    .name = "ctrainer._C.BMUF",
    .basicsize = sizeof(BMUF),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = BMUF_slots,
};
