/* A unit's collectives: the gather of parameters, its prefetch, and the reduction of
 * gradients to the ranks that own them.
 *
 * While the GIL is released the communicator counts as busy, so that close() raises,
 * and the shards' tensors are owned. Every error leaves the unit without a prefetch
 * and without gathered parameters of its own making. */
#include "binding/comm/memory.h"
#include "binding/fsdp/unit.h"
#include "binding/runtime/buffer.h"
#include "binding/runtime/dlpack_abi.h"

#include "core/base/mapping.h"
#include "core/base/region.h"

/* ---- the unit, its root and its state -------------------------------------------- */

ctpy_state *
fsdp_state_borrow(FSDPUnit *self)
{
    return ctpy_state_borrow((PyObject *)self);
}

FSDPUnit *
fsdp_root_borrow(FSDPUnit *self)
{
    return self->root == NULL ? self : (FSDPUnit *)self->root;
}

int
fsdp_expect(FSDPUnit *self, unsigned states)
{
    const bool known = self->state >= FSDP_IDLE && self->state <= FSDP_BACKWARD_POST;
    if (known && (states >> self->state & 1) != 0) {
        return 0;
    }
    PyObject *wanted = PyList_New(0);
    for (int s = FSDP_IDLE; wanted != NULL && s <= FSDP_BACKWARD_POST; s++) {
        PyObject *number = (states >> s & 1) != 0 ? PyLong_FromLong(s) : NULL;
        if (number != NULL && PyList_Append(wanted, number) < 0) {
            Py_CLEAR(wanted);
        }
        Py_XDECREF(number);
    }
    PyObject *answer =
        wanted == NULL
            ? NULL
            : ctpy_call_hook((PyObject *)self,
                             fsdp_state_borrow(self)->str_assert_state, &wanted, 1);
    if (answer != NULL) {
        PyErr_Format(PyExc_ValueError, "the unit is in state %d", self->state);
    }
    Py_XDECREF(answer);
    Py_XDECREF(wanted);
    return -1;
}

/* ---- the device ------------------------------------------------------------------ */

static bool
is_on_cuda(const FSDPUnit *self)
{
    return self->core.device->dlpack == CTPY_DL_CUDA;
}

int
fsdp_span_from(FSDPUnit *self, PyObject *op, const char *what, int writable,
               bool of_shard, ct_span *span)
{
    const bool on_host = of_shard && self->core.config.offload;
    return ctpy_span_on(fsdp_state_borrow(self), op, what, writable,
                        is_on_cuda(self) && !on_host, span);
}

int
fsdp_use_stream(FSDPUnit *self)
{
    const ctpy_dlpack_api *api = fsdp_state_borrow(self)->dlpack;
    if (!is_on_cuda(self)) {
        return 0;
    }
    if (api == NULL || api->current_work_stream == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this torch has no function for its current stream: sharding "
                        "on a GPU needs torch 2.10 or newer");
        return -1;
    }
    const int ordinal = ((MappedMemory *)self->full)->pages.ordinal;
    return api->current_work_stream(CTPY_DL_CUDA, ordinal, &self->core.stream);
}

PyObject *
fsdp_new_memory(FSDPUnit *self, PyObject *plugin, size_t bytes, int watched)
{
    const ctpy_state *state = fsdp_state_borrow(self);
    PyObject *args = Py_BuildValue("(n)", (Py_ssize_t)bytes);
    PyObject *kwargs = Py_BuildValue("{s:i,s:O}", "watched", watched, "plugin", plugin);
    PyObject *memory =
        args == NULL || kwargs == NULL
            ? NULL
            : PyObject_Call((PyObject *)state->MappedMemory, args, kwargs);
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    return memory;
}

/* New host memory is zero; device memory is undefined. */
PyObject *
fsdp_new_zeros(FSDPUnit *self, PyObject *plugin, size_t bytes)
{
    ct_error err;
    PyObject *memory = fsdp_new_memory(self, plugin, bytes, 0);
    if (memory == NULL || fsdp_use_stream(self) < 0) {
        Py_XDECREF(memory);
        return NULL;
    }
    ct_mapping *pages = &((MappedMemory *)memory)->pages;
    const ct_span all = {pages->data, pages->bytes, CT_U8};
    pages->stream = self->core.stream;
    ct_status status = ct_mapping_obtain(pages, pages->bytes, NULL, &err);
    if (status == CT_OK && pages->ops != NULL) {
        status = self->core.device->zero(self->core.stream, &all, 1, &err);
    }
    if (status != CT_OK) {
        Py_DECREF(memory);
        return ctpy_raise(&err);
    }
    return memory;
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

int
fsdp_check_all_unused(FSDPUnit *root)
{
    PyObject *units = Py_XNewRef(root->units);
    const Py_ssize_t n = fsdp_count_units(root);
    int result = units == NULL ? fsdp_check_unused(root) : 0;
    for (Py_ssize_t i = 0; result == 0 && i < n; i++) {
        result = fsdp_check_unused((FSDPUnit *)PyList_GET_ITEM(units, i));
    }
    Py_XDECREF(units);
    return result;
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
        Py_BEGIN_ALLOW_THREADS
        status = gather(&self->core, comm, spans, &err);
        Py_END_ALLOW_THREADS
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
    Py_BEGIN_ALLOW_THREADS
    status = ct_fsdp_gather(&self->core, communicator->comm, NULL, &err);
    Py_END_ALLOW_THREADS
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

void
fsdp_drop_prefetch(FSDPUnit *self)
{
    Communicator *communicator = (Communicator *)self->communicator;
    PyObject *type, *value, *trace;
    if (!self->core.begun) {
        return;
    }
    PyErr_Fetch(&type, &value, &trace);
    Py_BEGIN_ALLOW_THREADS
    ct_fsdp_cancel_gather(&self->core, communicator->comm);
    Py_END_ALLOW_THREADS
    communicator->busy--;
    PyErr_Restore(type, value, trace);
}

void
fsdp_release(FSDPUnit *self)
{
    fsdp_drop_prefetch(self);
    ct_fsdp_release(&self->core);
}

void
fsdp_discard_cache(FSDPUnit *root)
{
    Py_BEGIN_ALLOW_THREADS
    ct_block_cache_discard(&root->ledger.cache);
    Py_END_ALLOW_THREADS
}

void
fsdp_return_memory(FSDPUnit *root)
{
    if (root->return_memory) {
        fsdp_discard_cache(root);
        ct_malloc_trim();
        root->resident = ct_memory_resident();
    }
}

/* The backward frees the activations, but in pieces that malloc may keep. Free pieces
 * are harmless while the next unit's gradients fit below the size of the process at the
 * start of the backward: about half of the units' peak are gradients. */
void
fsdp_return_growth(FSDPUnit *root)
{
    const size_t room = root->ledger.peak / 2;
    if (root->return_memory && ct_memory_resident() + room > root->resident) {
        ct_malloc_trim();
    }
}

const char FSDPUnit_gather_doc[] =
    "gather($self, /)\n--\n\n"
    "Bring the unit's parameters together from all ranks. Collective.\n\n"
    "Raises what the communicator does; then nothing is gathered.";

PyObject *
FSDPUnit_gather(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return fsdp_gather((FSDPUnit *)op) < 0 ? NULL : Py_NewRef(Py_None);
}

const char FSDPUnit_release_doc[] =
    "release($self, /)\n--\n\n"
    "Release the memory of the gathered parameters, which then read as zeros.";

PyObject *
FSDPUnit_release(PyObject *op, PyObject *Py_UNUSED(unused))
{
    fsdp_release((FSDPUnit *)op);
    Py_RETURN_NONE;
}

/* ---- prefetching ----------------------------------------------------------------- */

void
fsdp_order_begin(fsdp_order *order)
{
    Py_XSETREF(order->before, order->now);
    order->now = NULL;
}

void
fsdp_order_forget(fsdp_order *order)
{
    Py_CLEAR(order->before);
    Py_CLEAR(order->now);
}

static PyObject *
last_borrow(PyObject *list)
{
    const Py_ssize_t n = list == NULL ? 0 : PyList_GET_SIZE(list);
    return n == 0 ? NULL : PyList_GET_ITEM(list, n - 1);
}

void
fsdp_drop_prefetches(FSDPUnit *root)
{
    PyObject *units = Py_XNewRef(root->units);
    const Py_ssize_t n = root->ledger.begun == 0 ? 0 : fsdp_count_units(root);
    for (Py_ssize_t i = 0; i < n; i++) {
        fsdp_drop_prefetch((FSDPUnit *)PyList_GET_ITEM(units, i));
    }
    Py_XDECREF(units);
}

int
fsdp_order_reach(FSDPUnit *self, fsdp_order *order)
{
    if (last_borrow(order->now) == (PyObject *)self) {
        return 0;
    }
    if (!self->core.begun) {
        fsdp_drop_prefetches(fsdp_root_borrow(self));
    }
    if (order->now == NULL) {
        order->now = PyList_New(0);
    }
    return order->now == NULL ? -1 : PyList_Append(order->now, (PyObject *)self);
}

/* NULL where the last pass ended here or was at another unit. */
static FSDPUnit *
next_borrow(const fsdp_order *order)
{
    const Py_ssize_t n = order->now == NULL ? 0 : PyList_GET_SIZE(order->now);
    const bool repeats =
        n != 0 && order->before != NULL && n < PyList_GET_SIZE(order->before) &&
        PyList_GET_ITEM(order->before, n - 1) == PyList_GET_ITEM(order->now, n - 1);
    return repeats ? (FSDPUnit *)PyList_GET_ITEM(order->before, n) : NULL;
}

/* Quantized gathers cannot be begun; a lone gather has nobody to wait for. A unit of
 * another root, or without shards, is gathered when needed, or raises then. */
static bool
can_begin(FSDPUnit *self, FSDPUnit *root)
{
    const ct_fsdp_config *config = &self->core.config;
    return !self->core.gathered && config->gather_bits == 0 && !config->lone_gather &&
           self->core.n_groups != 0 && self->shards != NULL &&
           fsdp_root_borrow(self) == root;
}

int
fsdp_prefetch(FSDPUnit *self, const fsdp_order *order)
{
    FSDPUnit *root = fsdp_root_borrow(self);
    FSDPUnit *next = next_borrow(order);
    if (next == NULL || root->ledger.begun != 0 || !can_begin(next, root)) {
        return 0;
    }
    Py_INCREF((PyObject *)next);
    const int result = gather_by(next, ct_fsdp_begin_gather);
    Py_DECREF((PyObject *)next);
    return result;
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

bool
fsdp_has_grads(const FSDPUnit *self)
{
    bool found = false;
    for (size_t g = 0; !found && g < self->core.n_groups; g++) {
        found = group_has_grads(self, g);
    }
    return found;
}

void
fsdp_drop_grads(FSDPUnit *self)
{
    for (size_t i = 0; i < self->n_leaves; i++) {
        self->leaves[i].filled = false;
    }
    ct_fsdp_drop_grads(&self->core);
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
    Communicator *replicas = (Communicator *)self->replicas;
    ct_comm *comm = ctpy_comm_borrow(state, (PyObject *)communicator);
    ct_comm *others = NULL;
    ct_span span;
    ct_status status = CT_OK;
    ct_error err;
    const bool ready =
        comm != NULL &&
        fsdp_span_from(self, grad, "the gradient of a shard", 1, true, &span) == 0 &&
        (replicas == NULL ||
         (others = ctpy_comm_borrow(state, (PyObject *)replicas)) != NULL);
    if (ready) {
        self->core.replicas = others;
        communicator->busy++;
        if (replicas != NULL) {
            replicas->busy++;
        }
        Py_BEGIN_ALLOW_THREADS
        status =
            ct_fsdp_reduce(&self->core, comm, group, presence, &span, add != 0, &err);
        Py_END_ALLOW_THREADS
        if (replicas != NULL) {
            replicas->busy--;
        }
        communicator->busy--;
        self->core.replicas = NULL;
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
