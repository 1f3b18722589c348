/* A unit's collectives: the gather of parameters and the reduction of gradients to the
 * ranks that own them.
 *
 * While the GIL is released the communicator counts as busy, so that close() raises,
 * and the shards' tensors are owned. Every error leaves the unit without a prefetch
 * and without gathered parameters of its own making. */
#include "binding/comm/memory.h"
#include "binding/fsdp/unit.h"
#include "binding/runtime/buffer.h"

#include "core/base/mapping.h"
#include "core/base/region.h"

/* ---- the device ------------------------------------------------------------------ */

int
fsdp_span_from(FSDPUnit *self, PyObject *op, const char *what, int writable,
               bool of_shard, ct_span *span)
{
    const bool on_host = of_shard && self->core.config.offload;
    return ctpy_span_on(fsdp_state_borrow(self), op, what, writable,
                        on_host ? CTPY_DL_CPU : self->core.device->dlpack, span);
}

int
fsdp_gpu(const FSDPUnit *self)
{
    return self->full == NULL ? 0 : ((MappedMemory *)self->full)->pages.ordinal;
}

void
fsdp_switch_gpu(const FSDPUnit *self, int *gpu)
{
    ct_error unused; /* the work fails, too */
    if (self->full != NULL) {
        (void)ct_device_switch(self->core.device, gpu, &unused);
    }
}

int
fsdp_use_stream(FSDPUnit *self)
{
    return ctpy_current_stream(fsdp_state_borrow(self), self->core.device->dlpack,
                               fsdp_gpu(self), &self->core.stream);
}

/* ---- checks ---------------------------------------------------------------------- */

/* Neither the user of released parameters nor the consequences are known: the next use
 * of the unit raises the error, once. */
int
fsdp_check_unused(FSDPUnit *self)
{
    PyObject *path = NULL;
    if (self->core.gathered || self->core.begun ||
        !ct_mapping_touched(self->core.full)) {
        return 0;
    }
    ct_mapping_release(self->core.full, NULL);
    if (ctpy_lookup((PyObject *)self, fsdp_state_borrow(self)->str_path, &path) < 0) {
        return -1;
    }
    const bool is_root = path == NULL || PyObject_Size(path) <= 0;
    PyObject *name = is_root ? PyUnicode_FromString("the root") : PyObject_Repr(path);
    if (name != NULL) {
        PyErr_Format(
            PyExc_RuntimeError,
            "parameters of the sharded module %U were read or written while they were "
            "released, when they are zeros: results and gradients of the last pass may "
            "be wrong. They are gathered in the forward and backward of that module "
            "alone. Return no views of parameters from it, return the tensors that a "
            "loss is made of rather than keeping them as attributes, wrap a module "
            "that uses its parameters together with it, and change values in "
            "summon_full_params()",
            name);
    }
    Py_XDECREF(name);
    Py_XDECREF(path);
    return -1;
}

/* Compares with the other ranks which unit does what, where such comparison is on and
 * the backend, NCCL, makes none. Collective then; 0, or -1 with the ValueError of
 * _check_order. */
static int
check_order(FSDPUnit *self, const char *what)
{
    const ct_comm *comm = ((const Communicator *)self->communicator)->comm;
    const int compares = comm != NULL && comm->ops->takes_device_memory
                             ? ctpy_comm_wants_comparison()
                             : 0;
    if (compares < 1) {
        return compares;
    }
    PyObject *text = PyUnicode_FromString(what);
    PyObject *answer =
        text == NULL
            ? NULL
            : ctpy_call_hook((PyObject *)self,
                             fsdp_state_borrow(self)->str__check_order, &text, 1);
    Py_XDECREF(answer);
    Py_XDECREF(text);
    return answer == NULL ? -1 : 0;
}

/* ---- gathering ------------------------------------------------------------------- */

typedef ct_status
gather_fn(ct_fsdp *unit, ct_comm *comm, const ct_span *shards, ct_error *err);

static int
read_shards(FSDPUnit *self, ct_span *spans)
{
    for (size_t i = 0; i < self->core.n_groups; i++) {
        if (fsdp_span_from(self, PyTuple_GET_ITEM(self->shards, (Py_ssize_t)i),
                           "the shard of a parameter", 0, true, &spans[i]) < 0) {
            return -1;
        }
    }
    return fsdp_use_stream(self);
}

static int
gather_from(FSDPUnit *self, const ct_span *spans, gather_fn *gather)
{
    Communicator *communicator = (Communicator *)Py_NewRef(self->communicator);
    PyObject *shards = Py_NewRef(self->shards); /* whose memory is read */
    ct_comm *comm = ctpy_comm_borrow(fsdp_state_borrow(self), (PyObject *)communicator);
    ct_status status = CT_OK;
    ct_error err;
    if (comm != NULL) {
        communicator->busy++;
        FSDP_BEGIN_WORK(self)
        status = gather(&self->core, comm, spans, &err);
        FSDP_END_WORK(self)
        communicator->busy -= !self->core.begun; /* else it is under way */
    }
    Py_DECREF(shards);
    Py_DECREF((PyObject *)communicator);
    return comm == NULL ? -1 : status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
gather_by(FSDPUnit *self, gather_fn *gather)
{
    if (fsdp_check_unused(self) < 0 || check_order(self, "gathers") < 0) {
        return -1;
    }
    ct_span *spans = PyMem_New(ct_span, self->core.n_groups);
    if (spans == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const int result =
        read_shards(self, spans) < 0 ? -1 : gather_from(self, spans, gather);
    PyMem_Free(spans);
    return result;
}

static int
end_prefetch(FSDPUnit *self)
{
    Communicator *communicator = (Communicator *)self->communicator;
    ct_status status;
    ct_error err;
    FSDP_BEGIN_WORK(self)
    status = ct_fsdp_gather(&self->core, communicator->comm, NULL, &err);
    FSDP_END_WORK(self)
    communicator->busy--;
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

int
fsdp_gather(FSDPUnit *self)
{
    if (self->core.gathered || self->core.n_groups == 0) {
        return 0;
    }
    if (self->core.begun) {
        return end_prefetch(self);
    }
    if (self->shards == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the unit has no shards: set shards first");
        return -1;
    }
    return gather_by(self, ct_fsdp_gather);
}

int
fsdp_begin_gather(FSDPUnit *self)
{
    return gather_by(self, ct_fsdp_begin_gather);
}

void
fsdp_drop_prefetch(FSDPUnit *self)
{
    Communicator *communicator = (Communicator *)self->communicator;
    PyObject *type, *value, *trace;
    if (!self->core.begun) {
        return;
    }
    PyErr_Fetch(&type, &value, &trace);
    FSDP_BEGIN_WORK(self)
    ct_fsdp_cancel_gather(&self->core, communicator->comm);
    FSDP_END_WORK(self)
    communicator->busy--;
    PyErr_Restore(type, value, trace);
}

int
fsdp_begin_read(FSDPUnit *self)
{
    ct_status status;
    ct_error err;
    Py_BEGIN_ALLOW_THREADS
    status = ct_fsdp_begin_read(&self->core, &err);
    Py_END_ALLOW_THREADS
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

void
fsdp_drop_read(FSDPUnit *self)
{
    if (self->core.file.held) {
        Py_BEGIN_ALLOW_THREADS
        ct_fsdp_drop_read(&self->core);
        Py_END_ALLOW_THREADS
    }
}

void
fsdp_release(FSDPUnit *self)
{
    fsdp_drop_prefetch(self);
    FSDP_BEGIN_WORK(self) /* memory that is watched waits for its last use */
    ct_fsdp_release(&self->core);
    FSDP_END_WORK(self)
}

/* ---- reducing -------------------------------------------------------------------- */

static bool
group_has_grads(const FSDPUnit *self, size_t group)
{
    bool found = false;
    for (size_t i = 0; !found && i < self->n_leaves; i++) {
        found = self->leaves[i].filled && self->leaves[i].group == group;
    }
    return found;
}

void
fsdp_drop_grads(FSDPUnit *self)
{
    for (size_t i = 0; i < self->n_leaves; i++) {
        self->leaves[i].filled = false;
    }
    FSDP_BEGIN_WORK(self)
    ct_fsdp_drop_grads(&self->core);
    FSDP_END_WORK(self)
}

int
fsdp_await_copies(FSDPUnit *self)
{
    ct_status status;
    ct_error err;
    if (self->core.copied == NULL) {
        return 0;
    }
    FSDP_BEGIN_WORK(self)
    status = ct_fsdp_await_copies(&self->core, &err);
    FSDP_END_WORK(self)
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

void
fsdp_await_quietly(FSDPUnit *self)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (fsdp_await_copies(self) < 0) {
        PyErr_Clear(); /* the device's next work fails, too */
    }
    PyErr_Restore(type, value, trace);
}

int
fsdp_settle(FSDPUnit *self)
{
    ctpy_state *state = fsdp_state_borrow(self);
    ct_comm *comm;
    ct_error err;
    if (fsdp_await_copies(self) < 0) {
        return -1;
    }
    if (!self->core.reducing) {
        return 0;
    }
    comm = ctpy_comm_borrow(state, self->communicator);
    return comm == NULL || fsdp_use_stream(self) < 0          ? -1
           : ct_fsdp_settle(&self->core, comm, &err) == CT_OK ? 0
                                                              : ctpy_raise_int(&err);
}

/* The gradient of a shard, made if there is none; *add if there is one. */
static PyObject *
shard_grad(FSDPUnit *self, PyObject *owner, size_t group, int *add)
{
    ctpy_state *state = fsdp_state_borrow(self);
    PyObject *grad = PyObject_GetAttr(owner, state->str_grad);
    *add = grad != NULL && !Py_IsNone(grad);
    if (grad == NULL || *add) {
        return grad;
    }
    Py_DECREF(grad);
    PyObject *index = PyLong_FromSize_t(group);
    grad = index == NULL
               ? NULL
               : ctpy_call_hook((PyObject *)self, state->str__new_gradient, &index, 1);
    Py_XDECREF(index);
    return grad;
}

static int
reduce_into(FSDPUnit *self, size_t group, ct_fsdp_presence *presence, PyObject *grad,
            int add)
{
    ctpy_state *state = fsdp_state_borrow(self);
    Communicator *communicator = (Communicator *)Py_NewRef(self->communicator);
    Communicator *replicate_group = (Communicator *)self->replicate_group;
    ct_comm *comm = ctpy_comm_borrow(state, (PyObject *)communicator);
    ct_comm *others = NULL;
    ct_span span;
    ct_status status = CT_OK;
    ct_error err;
    const bool ready =
        comm != NULL &&
        fsdp_span_from(self, grad, "the gradient of a shard", 1, true, &span) == 0 &&
        (replicate_group == NULL ||
         (others = ctpy_comm_borrow(state, (PyObject *)replicate_group)) != NULL);
    if (ready) {
        self->core.replicate_group = others;
        communicator->busy++;
        if (replicate_group != NULL) {
            replicate_group->busy++;
        }
        FSDP_BEGIN_WORK(self)
        status =
            ct_fsdp_reduce(&self->core, comm, group, presence, &span, add != 0, &err);
        FSDP_END_WORK(self)
        if (replicate_group != NULL) {
            replicate_group->busy--;
        }
        communicator->busy--;
        self->core.replicate_group = NULL;
    }
    Py_DECREF((PyObject *)communicator);
    return !ready ? -1 : status == CT_OK ? 0 : ctpy_raise_int(&err);
}

/* Clears missing gradients and the padding: these pages were another unit's. Parameters
 * are in the order of their places. */
static ct_status
clear_gaps(FSDPUnit *self, size_t group, ct_error *err)
{
    size_t end = 0; /* of what is filled so far */
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < self->n_leaves; i++) {
        const fsdp_leaf *leaf = &self->leaves[i];
        if (leaf->group == group && leaf->filled) {
            status = ct_fsdp_clear_grads(&self->core, group, end, leaf->at - end, err);
            end = leaf->at + leaf->n;
        }
    }
    const size_t left = self->core.groups[group].n - end;
    return status == CT_OK ? ct_fsdp_clear_grads(&self->core, group, end, left, err)
                           : status;
}

/* The group's parameters, with the gradients that this rank has. NULL with an
 * exception. */
static ct_fsdp_param *
new_params(const FSDPUnit *self, size_t group, size_t *n)
{
    ct_fsdp_param *params = PyMem_New(ct_fsdp_param, self->n_leaves + 1);
    *n = 0;
    for (size_t i = 0; params != NULL && i < self->n_leaves; i++) {
        const fsdp_leaf *leaf = &self->leaves[i];
        if (leaf->group == group) {
            params[(*n)++] = (ct_fsdp_param){leaf->at, leaf->n, leaf->filled};
        }
    }
    if (params == NULL) {
        PyErr_NoMemory();
    }
    return params;
}

/* The numbers of the group's parameters of which no rank has a gradient, as a list. For
 * a parameter without elements on this rank only this rank's gradient counts. */
static PyObject *
missing_numbers(const ct_fsdp_presence *presence)
{
    PyObject *missing = PyList_New(0);
    for (size_t i = 0; missing != NULL && i < presence->n; i++) {
        PyObject *number = presence->params[i].there ? NULL : PyLong_FromSize_t(i);
        const bool failed = !presence->params[i].there &&
                            (number == NULL || PyList_Append(missing, number) < 0);
        Py_XDECREF(number);
        if (failed) {
            Py_CLEAR(missing);
        }
    }
    return missing;
}

/* Views of parameters keep None for a missing gradient, as plain modules do. A group of
 * a single parameter is reduced only with a gradient. */
static int
accumulate(FSDPUnit *self, PyObject *owner, const ct_fsdp_presence *presence,
           PyObject *grad, int add)
{
    ctpy_state *state = fsdp_state_borrow(self);
    if (self->grad_owners == NULL) {
        return add ? 0 : PyObject_SetAttr(owner, state->str_grad, grad);
    }
    PyObject *args[] = {grad, missing_numbers(presence)};
    PyObject *done =
        args[1] == NULL ? NULL : ctpy_call_hook(owner, state->str_receive, args, 2);
    Py_XDECREF(args[1]);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int
reduce_group(FSDPUnit *self, size_t group)
{
    int add, result = -1;
    ct_error err;
    PyObject *owners = self->grad_owners == NULL ? self->shards : self->grad_owners;
    PyObject *owner = Py_NewRef(PyTuple_GET_ITEM(owners, (Py_ssize_t)group));
    PyObject *grad = shard_grad(self, owner, group, &add);
    ct_fsdp_presence presence = {NULL, 0};
    presence.params = grad == NULL ? NULL : new_params(self, group, &presence.n);
    if (presence.params != NULL && fsdp_use_stream(self) == 0) {
        const bool asks = self->grad_owners != NULL && presence.n > 1;
        result = clear_gaps(self, group, &err) != CT_OK
                     ? ctpy_raise_int(&err)
                     : reduce_into(self, group, asks ? &presence : NULL, grad, add);
    }
    result = result < 0 ? -1 : accumulate(self, owner, &presence, grad, add);
    PyMem_Free(presence.params);
    Py_XDECREF(grad);
    Py_DECREF(owner);
    return result;
}

int
fsdp_reduce(FSDPUnit *self)
{
    int result = 0;
    for (size_t g = 0; result == 0 && g < self->core.n_groups; g++) {
        if (group_has_grads(self, g)) {
            result = check_order(self, "reduces");
            result = result < 0 ? result : reduce_group(self, g);
        }
    }
    fsdp_drop_grads(self);
    return result;
}
