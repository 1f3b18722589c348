/* ctrainer._C.BMUF: an optimizer with local steps, synchronized at the ends of blocks.
 *
 * ctrainer.BMUF, its public class, has the hooks that are called here. A pass works on
 * tensors without the GIL; meanwhile `busy` keeps other threads out, and the
 * communicator stays open, also while the average of a block is pending.
 *
 * Hooks run between passes and may raise or replace anything: tensors are read anew for
 * every pass, and owned while the core works on their memory. */
#include "binding/comm/communicator.h"
#include "binding/runtime/buffer.h"

#include "core/base/alloc.h"
#include "core/bmuf/bmuf.h"
#include "core/comm/staged.h"
#include "core/device/device.h"

#include <math.h>
#include <string.h>

typedef struct BMUF {
    PyObject_HEAD
    PyObject *inner;        /* the optimizer; NULL before __init__ */
    PyObject *communicator; /* a Communicator */
    ct_bmuf core;
    ctpy_target target; /* where the tensors are */
    double block_lr;    /* as given; SlowMo's config.lr follows the optimizer's */
    int64_t num_updates;
    bool average_sync;
    bool slowmo;
    bool started; /* the core has a global model of these parameters */
    bool busy;    /* a pass is under way without the GIL */
    bool holds;   /* the communicator, which stays open while collectives run */
} BMUF;

/* Tensors of Python as the core's list, with references. All zeros is empty. */
typedef struct bmuf_tensors {
    PyObject *sources, *copies; /* tuples; copies may be NULL */
    ct_bmuf_tensor *tensors;
    ct_bmuf_list list;
    ctpy_target target; /* none without tensors */
} bmuf_tensors;

/* A function of the core that works on a list. */
typedef ct_status
bmuf_pass(ct_bmuf *bmuf, ct_comm *comm, const ct_bmuf_list *list, ct_error *err);

/* ---- lifetime -------------------------------------------------------------------- */

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

/* The core is valid from here on, as dealloc frees it even if __init__ never runs. */
static PyObject *
BMUF_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyObject *op = type->tp_alloc(type, 0);
    if (op != NULL) {
        BMUF *self = (BMUF *)op;
        self->target = (ctpy_target){&ct_device_cpu, CTPY_DL_CPU, 0, NULL};
        ct_bmuf_init(&self->core, self->target.device, NULL);
    }
    return op;
}

static Communicator *
group_of(const BMUF *self)
{
    return (Communicator *)self->communicator;
}

/* Keeps the communicator open exactly while collectives of a pending block run. */
static void
hold_group(BMUF *self)
{
    const bool wanted = self->core.is_under_way;
    /* Counted once, however often this is called. */
    if (wanted != self->holds) {
        group_of(self)->busy += wanted ? 1 : -1;
        self->holds = wanted;
    }
}

/* Waits for the collectives of a pending block and drops its average. */
static void
abandon(BMUF *self)
{
    if (self->holds) {
        ct_comm *comm = group_of(self)->comm;
        Py_BEGIN_ALLOW_THREADS
        ct_bmuf_abandon(&self->core, comm);
        Py_END_ALLOW_THREADS
        hold_group(self);
    }
    self->core.is_pending = false;
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
        abandon(self);
    }
    Py_CLEAR(self->inner);
    Py_CLEAR(self->communicator);
    return 0;
}

static void
BMUF_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    (void)BMUF_clear(op);
    Py_BEGIN_ALLOW_THREADS /* waits for the device */
    ct_bmuf_fini(&((BMUF *)op)->core);
    Py_END_ALLOW_THREADS
    ctpy_leaf_dealloc(op);
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

/* RuntimeError, naming `what`, before __init__ and while a pass is under way. Passes
 * share the core's buffers, so a second thread cannot enter meanwhile. */
static int
check_idle(const BMUF *self, const char *what)
{
    if (self->inner == NULL || self->busy) {
        PyErr_Format(PyExc_RuntimeError,
                     self->busy ? "%s while another thread synchronizes a block"
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
    /* Before anything changes: a second __init__ that fails leaves a working object. */
    if (ct_bmuf_check(&config, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    if (self->inner != NULL && check_idle(self, "__init__()") < 0) {
        return -1;
    }
    if (self->communicator != NULL) {
        /* The old group's collectives still write to the core's buffers. */
        abandon(self);
    }
    Py_XSETREF(self->inner, Py_NewRef(inner));
    Py_XSETREF(self->communicator, Py_NewRef(communicator));
    self->core.config = config;
    self->block_lr = config.lr;
    self->average_sync = average;
    self->slowmo = slowmo;
    self->num_updates = 0;
    self->started = false;
    return 0;
}

/* ---- tensors, and passes over them ----------------------------------------------- */

static void
tensors_free(bmuf_tensors *t)
{
    ct_free(t->tensors);
    Py_XDECREF(t->copies);
    Py_XDECREF(t->sources);
    *t = (bmuf_tensors){0};
}

/* The tensor's memory, where that of the first one is, and may be written to. */
static int
read_span(ctpy_state *state, bmuf_tensors *t, PyObject *op, const char *what,
          Py_ssize_t index, ct_span *span)
{
    char text[64];
    (void)PyOS_snprintf(text, sizeof text, "%s %zd", what, index);
    ctpy_view view;
    if (ctpy_view_at(state, op, text, &t->target, &view) < 0) {
        return -1;
    }
    if (view.readonly) {
        return ctpy_reject_readonly(text);
    }
    *span = view.span;
    return 0;
}

static int
read_tensor(ctpy_state *state, bmuf_tensors *t, Py_ssize_t i)
{
    ct_bmuf_tensor *tensor = &t->tensors[i];
    PyObject *source = PyTuple_GET_ITEM(t->sources, i);
    PyObject *copy = t->copies == NULL ? Py_None : PyTuple_GET_ITEM(t->copies, i);
    *tensor = (ct_bmuf_tensor){.span = {.dtype = CT_F32}};
    if (read_span(state, t, source, "parameter", i, &tensor->span) < 0) {
        return -1;
    }
    if (copy == Py_None) {
        return 0;
    }
    if (read_span(state, t, copy, "copy of parameter", i, &tensor->copy) < 0) {
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
    const Py_ssize_t n = PyTuple_GET_SIZE(t->sources);
    if (t->copies != NULL && PyTuple_GET_SIZE(t->copies) != n) {
        PyErr_Format(PyExc_ValueError,
                     "%zd parameters and %zd copies; expected as many", n,
                     PyTuple_GET_SIZE(t->copies));
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

/* Into tuples, so that no other thread takes tensors out during a pass. */
static int
tensors_read(ctpy_state *state, PyObject *sources, PyObject *copies, bmuf_tensors *t)
{
    *t = (bmuf_tensors){.sources = PySequence_Tuple(sources)};
    if (t->sources != NULL && copies != NULL) {
        t->copies = PySequence_Tuple(copies);
    }
    if (t->sources == NULL || (copies != NULL && t->copies == NULL) ||
        read_all(state, t) < 0) {
        tensors_free(t);
        return -1;
    }
    return 0;
}

/* The core works where the tensors are: a model that has moved begins without blocks.
 */
static void
follow_tensors(BMUF *self, const bmuf_tensors *t)
{
    const ctpy_target *new = &t->target;
    if (new->device == NULL) {
        return;
    }
    if (new->device != self->target.device || new->ordinal != self->target.ordinal) {
        const ct_bmuf_config config = self->core.config;
        const int root = self->core.root;
        abandon(self); /* what is under way has the old memory */
        ct_bmuf_fini(&self->core);
        ct_bmuf_init(&self->core, new->device, new->stream);
        self->core.config = config;
        self->core.root = root;
    }
    self->core.stream = new->stream;
    self->target = *new;
}

/* The pass over a group for memory of the device: collectives of a group for the
 * host's are staged. */
static ct_status
run_on_device(BMUF *self, ct_comm *comm, const bmuf_tensors *t, bmuf_pass *pass,
              ct_error *err)
{
    const ctpy_target *target = &self->target;
    int ordinal = target->ordinal;
    ct_staged staged;
    ct_error unused;
    if (target->device == &ct_device_cpu) {
        return pass(&self->core, comm, &t->list, err);
    }
    ct_comm *there = ctpy_comm_at(comm, target, &staged);
    ct_status status = ct_device_switch(target->device, &ordinal, err);
    if (status == CT_OK) {
        status = pass(&self->core, there, &t->list, err);
        (void)ct_device_switch(target->device, &ordinal, &unused);
    }
    ct_staged_fini(&staged);
    return status;
}

static int
run_over(BMUF *self, const bmuf_tensors *t, bmuf_pass *pass)
{
    ct_comm *comm =
        ctpy_comm_borrow(ctpy_state_borrow((PyObject *)self), self->communicator);
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    /* The GIL is released below, and the attribute may be replaced meanwhile. */
    PyObject *group = Py_NewRef(self->communicator);
    follow_tensors(self, t);
    self->busy = true;
    PyThreadState *thread = ctpy_comm_enter(group);
    const ct_status status = run_on_device(self, comm, t, pass, &err);
    ctpy_comm_leave(group, thread);
    self->busy = false;
    Py_DECREF(group);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* Runs a pass over the tensors of the hook `name`, a pair: tensors, and the model's
 * copies or None. */
static int
run(BMUF *self, PyObject *name, bmuf_pass *pass)
{
    PyObject *found = PyObject_CallMethodNoArgs((PyObject *)self, name);
    PyObject *sources, *copies;
    bmuf_tensors t;
    int result = -1;
    if (found == NULL) {
        return -1;
    }
    if (PyArg_ParseTuple(found, "OO", &sources, &copies) &&
        tensors_read(ctpy_state_borrow((PyObject *)self), sources,
                     copies == Py_None ? NULL : copies, &t) == 0) {
        result = run_over(self, &t, pass);
        tensors_free(&t);
    }
    Py_DECREF(found);
    return result;
}

static int
call_hook(BMUF *self, PyObject *name)
{
    return ctpy_drop_steal(PyObject_CallMethodNoArgs((PyObject *)self, name));
}

/* ---- synchronization after an update --------------------------------------------- */

static int
end_warmup(BMUF *self, ctpy_state *state)
{
    if (run(self, state->str__synced_tensors, ct_bmuf_take_over) < 0) {
        return -1;
    }
    /* Before the hooks, which may save the values of the block. */
    self->started = true;
    return call_hook(self, self->average_sync ? state->str_average_params
                                              : state->str__reset_optimizer) < 0
               ? -1
               : call_hook(self, state->str__after_sync);
}

/* Sets the constants of the block that ends: SlowMo divides by the optimizer's lr. */
static int
set_constants(BMUF *self, ctpy_state *state)
{
    if (!self->slowmo) {
        return 0;
    }
    PyObject *answer = PyObject_CallMethodNoArgs(self->inner, state->str_get_lr);
    const double lr = answer == NULL ? -1.0 : PyFloat_AsDouble(answer);
    Py_XDECREF(answer);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (!(lr > 0.0 && isfinite(lr))) {
        /* For the message: PyErr_Format has no format for doubles. */
        answer = PyFloat_FromDouble(lr);
        PyErr_Format(PyExc_ValueError,
                     "the optimizer's lr is %R where a block of SlowMo ends, which "
                     "divides by it; expected a finite one above 0",
                     answer);
        Py_XDECREF(answer);
        return -1;
    }
    self->core.config.lr = 1.0 / lr;
    self->core.config.reach = self->block_lr * lr;
    return 0;
}

/* Runs the pass that applies a block's average, and the hooks after it. */
static int
apply_average(BMUF *self, ctpy_state *state, bmuf_pass *pass)
{
    if (set_constants(self, state) < 0) {
        return -1;
    }
    const int result = run(self, state->str__synced_tensors, pass);
    /* Whatever the result: the pass has ended the collectives, or begun some. */
    hold_group(self);
    return result < 0 || (self->average_sync &&
                          call_hook(self, state->str_average_params) < 0)
               ? -1
               : call_hook(self, state->str__after_sync);
}

static int
end_block(BMUF *self, ctpy_state *state)
{
    if (self->core.config.overlap == 0) {
        return apply_average(self, state, ct_bmuf_synchronize);
    }
    const int result = run(self, state->str__synced_tensors, ct_bmuf_begin);
    hold_group(self);
    return result;
}

/* overlap updates after the block's end, or where the count was set to another block's
 * end meanwhile. */
static bool
is_due(const BMUF *self)
{
    const ct_bmuf_config *config = &self->core.config;
    const int64_t since = self->num_updates % config->sync_iter;
    return self->core.is_pending && (since == 0 || since >= config->overlap);
}

static int
after_update(BMUF *self)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    const ct_comm *comm = ctpy_comm_borrow(state, self->communicator);
    if (comm == NULL) {
        return -1;
    }
    /* A rank alone is its own average. */
    if (comm->world_size < 2) {
        return 0;
    }
    /* First: the end of another block needs the buffers of the pending block. */
    if (is_due(self) && apply_average(self, state, ct_bmuf_finish) < 0) {
        return -1;
    }
    switch (ct_bmuf_after(&self->core.config, self->num_updates)) {
    case CT_BMUF_WARMUP_END:
        return end_warmup(self, state);
    case CT_BMUF_BLOCK_END:
        return end_block(self, state);
    case CT_BMUF_NOTHING:
        break;
    }
    return 0;
}

PyDoc_STRVAR(
    step_doc,
    "step($self, /, *args, **kwargs)\n--\n\n"
    "Call the optimizer's step(*args, **kwargs), and synchronize with the other ranks\n"
    "where a block ends.\n\n"
    "Returns what it returned. An update that raises is not counted. Raises\n"
    "RuntimeError naming the rank when another fails or stays away.");

static PyObject *
BMUF_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    BMUF *self = (BMUF *)op;
    ctpy_state *state = ctpy_state_borrow(op);
    if (check_idle(self, "step()") < 0) {
        return NULL;
    }
    PyObject *step = PyObject_GetAttr(self->inner, state->str_step);
    PyObject *answer = step == NULL ? NULL : PyObject_Call(step, args, kwargs);
    Py_XDECREF(step);
    if (answer != NULL) {
        /* Only after success: a step that raised may be repeated. */
        self->num_updates++;
        if (after_update(self) < 0) {
            Py_CLEAR(answer);
        }
    }
    return answer;
}

PyDoc_STRVAR(
    count_update_doc,
    "count_update($self, /)\n--\n\n"
    "Count an update that was made elsewhere, or skipped after an overflow,\n"
    "and synchronize with the other ranks where a block ends: they count on it.");

static PyObject *
BMUF_count_update(PyObject *op, PyObject *Py_UNUSED(unused))
{
    BMUF *self = (BMUF *)op;
    if (check_idle(self, "count_update()") < 0) {
        return NULL;
    }
    /* Blocks end by this count, so a rank with an overflow counts like the others. */
    self->num_updates++;
    return after_update(self) < 0 ? NULL : Py_NewRef(Py_None);
}

static const char BMUF_finish_doc[] =
    "finish($self, /)\n--\n\n"
    "Apply the average of a block that ended less than overlap_steps updates ago: all\n"
    "ranks call it, after the last update for example. Without such a block nothing\n"
    "happens.";

static PyObject *
BMUF_finish(PyObject *op, PyObject *Py_UNUSED(unused))
{
    BMUF *self = (BMUF *)op;
    if (check_idle(self, "finish()") < 0 ||
        (self->core.is_pending &&
         apply_average(self, ctpy_state_borrow(op), ct_bmuf_finish) < 0)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(get_num_updates_doc, "get_num_updates($self, /)\n--\n\n"
                                  "Return how many updates have been counted.");

static PyObject *
BMUF_get_num_updates(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLongLong(((BMUF *)op)->num_updates);
}

PyDoc_STRVAR(set_num_updates_doc,
             "set_num_updates($self, num_updates, /)\n--\n\n"
             "Set the number of updates to num_updates, 0 or more.");

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

/* ---- the beginning of blocks, and moments ---------------------------------------- */

static const char BMUF_average_moments_doc[] =
    "_average_moments($self, /)\n--\n\n"
    "Replace the tensors of _moments() by their averages over all "
    "ranks.";

static PyObject *
BMUF_average_moments(PyObject *op, PyObject *Py_UNUSED(unused))
{
    BMUF *self = (BMUF *)op;
    return check_idle(self, "_average_moments()") < 0 ||
                   run(self, ctpy_state_borrow(op)->str__moments, ct_bmuf_average) < 0
               ? NULL
               : Py_NewRef(Py_None);
}

static ct_status
pass_start(ct_bmuf *bmuf, ct_comm *comm, const ct_bmuf_list *list, ct_error *err)
{
    (void)comm;
    return ct_bmuf_start(bmuf, list, err);
}

static const char BMUF_start_doc[] =
    "_start($self, /)\n--\n\n"
    "Take the parameters for the global model and begin a block.";

static PyObject *
BMUF_start(PyObject *op, PyObject *Py_UNUSED(unused))
{
    BMUF *self = (BMUF *)op;
    ctpy_state *state = ctpy_state_borrow(op);
    if (check_idle(self, "_start()") < 0) {
        return NULL;
    }
    /* The pending average is of parameters that are no longer the model's. */
    abandon(self);
    if (run(self, state->str__synced_tensors, pass_start) < 0) {
        return NULL;
    }
    self->started = true;
    Py_RETURN_NONE;
}

static const char BMUF_adopt_doc[] =
    "_adopt($self, communicator, root, num_updates, /)\n--\n\n"
    "Continue in another group, from the root's parameters and momentum, after\n"
    "num_updates.";

static PyObject *
BMUF_adopt(PyObject *op, PyObject *args)
{
    BMUF *self = (BMUF *)op;
    ctpy_state *state = ctpy_state_borrow(op);
    PyObject *communicator;
    long long updates;
    int root;
    if (!PyArg_ParseTuple(args, "OiL:_adopt", &communicator, &root, &updates) ||
        check_idle(self, "regroup()") < 0) {
        return NULL;
    }
    /* The old group's ranks are needed for that average. */
    if (self->core.is_pending) {
        PyErr_SetString(PyExc_RuntimeError,
                        "regroup() before the average of the block that ended has been "
                        "taken: call finish() first, on all ranks");
        return NULL;
    }
    if (ctpy_comm_borrow(state, communicator) == NULL) {
        return NULL;
    }
    Py_XSETREF(self->communicator, Py_NewRef(communicator));
    self->core.root = root;
    if (run(self, state->str__synced_tensors, ct_bmuf_adopt) < 0) {
        return NULL;
    }
    self->started = true;
    self->num_updates = updates;
    return call_hook(self, state->str__after_sync) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- saving and loading ---------------------------------------------------------- */

static int
check_started(const BMUF *self)
{
    if (self->busy || !self->started || self->core.config.momentum == 0.0) {
        PyErr_SetString(PyExc_RuntimeError,
                        self->busy ? "a block is being synchronized by another thread"
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
    if (tensors_read(ctpy_state_borrow((PyObject *)self), tensors, NULL, &t) < 0) {
        return -1;
    }
    const ct_device *device = self->target.device;
    if (t.target.device != NULL &&
        (t.target.device != device || t.target.ordinal != self->target.ordinal)) {
        PyErr_Format(PyExc_ValueError,
                     "the values of a block are on %s, its parameters on %s: move the "
                     "values there",
                     t.target.device->name, device->name);
        tensors_free(&t);
        return -1;
    }
    ct_error unused;
    int ordinal = self->target.ordinal;
    status = ct_device_switch(device, &ordinal, &err);
    if (status == CT_OK) {
        /* The GIL is released below. */
        self->busy = true;
        Py_BEGIN_ALLOW_THREADS
        status = copy(&self->core, flat, &t.list, &err);
        Py_END_ALLOW_THREADS
        self->busy = false;
        (void)ct_device_switch(device, &ordinal, &unused);
    }
    tensors_free(&t);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* The values of a block by name, one for each element of the parameters. NULL with an
 * exception. */
static ct_bmuf_flat *
values_of(BMUF *self, const char *name)
{
    struct {
        const char *name;
        ct_bmuf_flat *flat;
    } const known[] = {
        {"model",    &self->core.global  },
        {"momentum", &self->core.momentum},
        {"pending",  &self->core.pending },
        {"residual", &self->core.residual},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(known[i].name, name) == 0) {
            return known[i].flat;
        }
    }
    PyErr_Format(PyExc_ValueError, "a block has no values named '%.50s'", name);
    return NULL;
}

static PyObject *
copy_values(PyObject *op, PyObject *args, const char *format, copy_fn *copy)
{
    BMUF *self = (BMUF *)op;
    const char *name;
    PyObject *tensors;
    if (!PyArg_ParseTuple(args, format, &name, &tensors) || check_started(self) < 0) {
        return NULL;
    }
    const ct_bmuf_flat *flat = values_of(self, name);
    /* Without quantized deltas the buffer is empty. */
    if (flat == &self->core.residual && !ct_bmuf_is_quantized(&self->core.config)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "there is no residual: delta_bits is 32, so parameter deltas "
                        "are not quantized");
        return NULL;
    }
    return flat == NULL || copy_one(self, flat, tensors, copy) < 0 ? NULL
                                                                   : Py_NewRef(Py_None);
}

static const char BMUF_save_values_doc[] =
    "_save_values($self, name, tensors, /)\n--\n\n"
    "Copy values of blocks into tensors as long as the parameters, float64 or float32\n"
    "as their blocks are computed in.\n\n"
    "name: 'model', the global one; 'momentum', that of blocks; 'residual', the\n"
    "error-feedback residual of this rank's quantized deltas; 'pending', the "
    "parameters\n"
    "at the end of the block whose average is pending.";

static PyObject *
BMUF_save_values(PyObject *op, PyObject *args)
{
    return copy_values(op, args, "sO:_save_values", ct_bmuf_save);
}

static const char BMUF_load_values_doc[] =
    "_load_values($self, name, tensors, /)\n--\n\n"
    "Copy values back from tensors of _save_values(); after 'pending' the block's\n"
    "average is pending again.";

static PyObject *
BMUF_load_values(PyObject *op, PyObject *args)
{
    return copy_values(op, args, "sO:_load_values", ct_bmuf_load);
}

/* ---- attributes and tables ------------------------------------------------------- */

static PyObject *
BMUF_get_use_nbm(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((BMUF *)op)->core.config.look == CT_BLOCK_NBM);
}

static PyObject *
BMUF_get_world_size(PyObject *op, void *Py_UNUSED(closure))
{
    BMUF *self = (BMUF *)op;
    if (check_idle(self, "world_size") < 0) {
        return NULL;
    }
    const ct_comm *comm = ctpy_comm_borrow(ctpy_state_borrow(op), self->communicator);
    return comm == NULL ? NULL : PyLong_FromLong(comm->world_size);
}

static PyGetSetDef BMUF_getset[] = {
    {"use_nbm",    BMUF_get_use_nbm,    NULL, "Nesterov's block momentum.",        NULL},
    {"world_size", BMUF_get_world_size, NULL, "Number of ranks that synchronize.",
     NULL                                                                              },
    {NULL,         NULL,                NULL, NULL,                                NULL},
};

static PyMemberDef BMUF_members[] = {
    {"_optimizer", T_OBJECT_EX, offsetof(BMUF, inner), READONLY,
     "The optimizer that updates."},
    {"communicator", T_OBJECT_EX, offsetof(BMUF, communicator), READONLY,
     "The ranks that synchronize."},
    {"sync_iter", T_LONGLONG, offsetof(BMUF, core.config.sync_iter), READONLY,
     "Updates in a block."},
    {"warmup_iteration", T_LONGLONG, offsetof(BMUF, core.config.warmup), READONLY,
     "Updates before the first synchronization."},
    {"block_momentum", T_DOUBLE, offsetof(BMUF, core.config.momentum), READONLY,
     "Momentum of blocks; 0: the models are averaged."},
    {"block_lr", T_DOUBLE, offsetof(BMUF, block_lr), READONLY,
     "Learning rate of blocks."},
    {"overlap_steps", T_LONGLONG, offsetof(BMUF, core.config.overlap), READONLY,
     "Updates from the end of a block to the use of its average."},
    {"is_pending", T_BOOL, offsetof(BMUF, core.is_pending), READONLY,
     "Whether a block has ended whose average has not been applied yet."},
    {"delta_bits", T_INT, offsetof(BMUF, core.config.delta_bits), READONLY,
     "Bits of an element of the parameter delta: 32, or 8 or 4, quantized."},
    {"average_sync", T_BOOL, offsetof(BMUF, average_sync), READONLY,
     "Whether the optimizers' moments are averaged at the ends of blocks."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef BMUF_methods[] = {
    {"_adopt",           BMUF_adopt,                             METH_VARARGS,                 BMUF_adopt_doc          },
    {"_average_moments", BMUF_average_moments,                   METH_NOARGS,                  BMUF_average_moments_doc},
    {"_load_values",     BMUF_load_values,                       METH_VARARGS,                 BMUF_load_values_doc    },
    {"_save_values",     BMUF_save_values,                       METH_VARARGS,                 BMUF_save_values_doc    },
    {"_start",           BMUF_start,                             METH_NOARGS,                  BMUF_start_doc          },
    {"get_num_updates",  BMUF_get_num_updates,                   METH_NOARGS,                  get_num_updates_doc     },
    {"set_num_updates",  BMUF_set_num_updates,                   METH_O,                       set_num_updates_doc     },
    {"finish",           BMUF_finish,                            METH_NOARGS,                  BMUF_finish_doc         },
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
