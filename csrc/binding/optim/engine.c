/* ctrainer._C.OptimEngine: the update behind the wrappers of ctrainer.optim.
 *
 * A wrapper is a torch.optim.Optimizer, or an object with param_groups, state and
 * _new_state(param, group). The engine belongs to one wrapper and keeps nothing that is
 * not in the wrapper's dicts, but for caches: users, schedulers and load_state_dict()
 * may change the dicts between two updates, and the next update sees the change. */
#include "binding/optim/engine.h"

#include "binding/comm/communicator.h"
#include "binding/optim/disk_memory.h"
#include "binding/optim/weight_average.h"

#include "core/base/alloc.h"

#include <string.h>

/* ---- life ------------------------------------------------------------------------ */

static PyObject *
reject_kind(const char *name)
{
    PyObject *kinds = PyUnicode_FromString("");
    for (int k = 0; kinds != NULL && k < CT_OPTIM_KIND_COUNT; k++) {
        PyObject *more = PyUnicode_FromFormat("%U%s'%s'", kinds, k == 0 ? "" : ", ",
                                              ct_optim_kind_name((ct_optim_kind)k));
        Py_SETREF(kinds, more);
    }
    if (kinds != NULL) {
        PyErr_Format(PyExc_ValueError, "kind is '%.100s'; expected one of %U", name,
                     kinds);
    }
    Py_XDECREF(kinds);
    return NULL;
}

PyDoc_STRVAR(
    OptimEngine_doc,
    "OptimEngine(kind)\n--\n\n"
    "Updates the parameters of an optimizer wrapper. kind is that of the groups\n"
    "that have no 'kind' of their own: 'adamw', 'sgd', ...");

static PyObject *
OptimEngine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"kind", NULL};
    const char *name;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:OptimEngine", names, &name)) {
        return NULL;
    }
    const ct_optim_kind kind = ct_optim_kind_from_name(name);
    if (kind == CT_OPTIM_KIND_COUNT) {
        return reject_kind(name);
    }
    OptimEngine *self = (OptimEngine *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->state = ctpy_state_borrow((PyObject *)self);
        self->kind = kind;
        self->core = ct_optim_new(&ct_device_cpu);
        self->target = (ctpy_target){&ct_device_cpu, CTPY_DL_CPU, 0, NULL};
        self->result = (ct_step_result){.clip_coef = 1.0, .finite = true};
        if (self->core == NULL) {
            Py_DECREF(self);
            return PyErr_NoMemory();
        }
    }
    return (PyObject *)self;
}

static int
OptimEngine_traverse(PyObject *op, visitproc visit, void *arg)
{
    OptimEngine *self = (OptimEngine *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->average);
    Py_VISIT(self->disk);
    Py_VISIT(self->shards);
    for (size_t k = 0; k < self->n_slots; k++) {
        const optim_slot *slot = &self->slots[k];
        Py_VISIT(slot->param);
        Py_VISIT(slot->data);
        Py_VISIT(slot->grad);
        Py_VISIT(slot->state);
        Py_VISIT(slot->master);
        Py_VISIT(slot->part.communicator);
        for (int i = 0; i < OPTIM_MAX_VALUES; i++) {
            Py_VISIT(slot->values[i]);
        }
    }
    return 0;
}

static int
OptimEngine_clear(PyObject *op)
{
    optim_drop_slots((OptimEngine *)op, 0);
    Py_CLEAR(((OptimEngine *)op)->average);
    ct_optim_set_disk(((OptimEngine *)op)->core, NULL, 0);
    Py_CLEAR(((OptimEngine *)op)->disk);
    Py_CLEAR(((OptimEngine *)op)->shards);
    return 0;
}

static void
OptimEngine_dealloc(PyObject *op)
{
    OptimEngine *self = (OptimEngine *)op;
    PyObject_GC_UnTrack(op);
    (void)OptimEngine_clear(op);
    ct_free(self->slots);
    ct_free(self->known);
    ct_free(self->viewed);
    ct_optim_free(self->core);
    ctpy_leaf_dealloc(op);
}

/* ---- shape, and parts of sharded parameters -------------------------------------- */

/* The attribute `_part` of a parameter describes the part on this rank
 * (ctrainer/fsdp/layout.py, Part); `_is_part` marks a flat parameter. */

/* An empty side counts as 1: no rule works on an empty parameter, and some divide by
 * the sides. */
static size_t
side(int64_t length)
{
    return length > 0 ? (size_t)length : 1;
}

/* The dimensions and the number of elements of a shape, a tuple. */
static int
read_shape(PyObject *shape, optim_part *part)
{
    int64_t last[2] = {1, 1};
    part->ndim = (size_t)PyTuple_GET_SIZE(shape);
    part->whole = 1;
    for (size_t i = 0; i < part->ndim; i++) {
        last[0] = last[1];
        last[1] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, (Py_ssize_t)i));
        if (last[1] < 0) {
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_ValueError, "_part has a shape of %R", shape);
            }
            return -1;
        }
        part->whole *= (size_t)last[1];
    }
    part->rows = side(last[0]);
    part->cols = side(last[1]);
    return 0;
}

/* From the attribute, where the view knows no shape. */
static int
ask_for_shape(OptimEngine *self, const optim_slot *slot, ct_optim_param *param)
{
    optim_part found = {.communicator = NULL};
    PyObject *attribute = PyObject_GetAttr(slot->data, self->state->str_shape);
    PyObject *shape = attribute == NULL ? NULL : PySequence_Tuple(attribute);
    const int result = shape == NULL ? -1 : read_shape(shape, &found);
    param->ndim = found.ndim;
    param->rows = found.rows;
    param->cols = found.cols;
    Py_XDECREF(shape);
    Py_XDECREF(attribute);
    return result;
}

/* Fills in the dimensions of a parameter, for the kinds that look at them. */
static int
plan_shape(OptimEngine *self, const optim_slot *slot, ct_optim_param *param,
           const ctpy_view *view)
{
    const ct_optim_kind kind = ct_optim_groups_borrow(self->core)[slot->group].kind;
    const int ndim = view->ndim;
    param->ndim = param->rows = param->cols = 1;
    if ((optim_specs[kind].traits & CT_TRAIT_SHAPED) == 0) {
        return 0;
    }
    if (view->strides != NULL) {
        return optim_fail(PyExc_ValueError, slot, "",
                          "is transposed or channels-last in memory, and %s looks at "
                          "rows and columns: make it contiguous, or use another "
                          "optimizer",
                          ct_optim_kind_name(kind));
    }
    if (view->shape == NULL) {
        return ask_for_shape(self, slot, param);
    }
    param->ndim = (size_t)ndim;
    param->cols = ndim > 0 ? side(view->shape[ndim - 1]) : 1;
    param->rows = ndim > 1 ? side(view->shape[ndim - 2]) : 1;
    return 0;
}

/* An attribute of the slot's parameter, None where it is missing; a new reference. */
static PyObject *
attribute(const optim_slot *slot, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(slot->param, name);
    if (found == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        found = Py_NewRef(Py_None);
    }
    return found;
}

/* A flat parameter holds several parameters, whose norms and shapes are lost. */
static int
reject_flat(const OptimEngine *self, const optim_slot *slot)
{
    PyObject *answer = attribute(slot, self->state->str__is_part);
    const int several = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (several > 0) {
        const ct_optim_group *groups = ct_optim_groups_borrow(self->core);
        return optim_fail(
            PyExc_ValueError, slot, "",
            "is a flat parameter, several that are sharded as one, and %s "
            "looks at each by itself, its norm or its rows and columns: "
            "shard with use_orig_params=True, or use an optimizer that "
            "works element by element, such as AdamW",
            ct_optim_kind_name(groups[slot->group].kind));
    }
    return several;
}

static int
read_part(OptimEngine *self, optim_slot *slot, PyObject *described)
{
    PyObject *communicator, *shape;
    Py_ssize_t begin;
    optim_part part = {.communicator = NULL};
    if (!PyTuple_Check(described) ||
        !PyArg_ParseTuple(described, "OnO!:_part", &communicator, &begin, &PyTuple_Type,
                          &shape)) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError,
                         "_part of param_groups[%u]['params'][%zd] is a %.200s; "
                         "expected a tuple of a Communicator, an int and a shape",
                         slot->group, slot->index, Py_TYPE(described)->tp_name);
        }
        return -1;
    }
    const ct_comm *comm = ctpy_comm_borrow(self->state, communicator);
    if (comm == NULL || read_shape(shape, &part) < 0) {
        return -1;
    }
    if (begin < 0 || (size_t)begin > part.whole) {
        PyErr_Format(
            PyExc_ValueError,
            "_part of param_groups[%u]['params'][%zd] begins at element %zd of "
            "%zu",
            slot->group, slot->index, begin, part.whole);
        return -1;
    }
    part.begin = (size_t)begin;
    part.communicator = comm->world_size > 1 ? Py_NewRef(communicator) : NULL;
    slot->part = part;
    return 0;
}

/* The numbers of the slot's elements in the whole or flat parameter. A NumPy parameter
 * is counted by the gradient. */
static int
read_numbers(OptimEngine *self, optim_slot *slot)
{
    PyObject *numbers = attribute(slot, self->state->str__numbers);
    Py_ssize_t begin = 0, whole = 0;
    int result = numbers == NULL ? -1 : 0;
    if (result == 0 && !Py_IsNone(numbers)) {
        result = PyArg_ParseTuple(numbers, "nn:_numbers", &begin, &whole) ? 0 : -1;
    }
    else if (result == 0 && PyObject_HasAttrString(slot->param, "numel")) {
        PyObject *count = PyObject_CallMethod(slot->param, "numel", NULL);
        whole = count == NULL ? -1 : PyLong_AsSsize_t(count);
        result = whole < 0 ? -1 : 0;
        Py_XDECREF(count);
    }
    slot->number = (size_t)begin;
    slot->numbered = (size_t)whole;
    Py_XDECREF(numbers);
    return result;
}

/* Reads which parameters are parts, for the groups that look at whole parameters and
 * for random bits; a ValueError for a flat parameter. */
static int
read_parts(OptimEngine *self)
{
    const ct_optim_group *groups = ct_optim_groups_borrow(self->core);
    int result = 0;
    for (size_t k = 0; result == 0 && k < self->n_slots; k++) {
        optim_slot *slot = &self->slots[k];
        if (read_numbers(self, slot) < 0) {
            return -1;
        }
        Py_CLEAR(slot->part.communicator);
        slot->part = (optim_part){.communicator = NULL};
        if (ct_optim_group_is_whole(&groups[slot->group])) {
            PyObject *described = attribute(slot, self->state->str__part);
            result = described == NULL      ? -1
                     : Py_IsNone(described) ? reject_flat(self, slot)
                                            : read_part(self, slot, described);
            Py_XDECREF(described);
        }
    }
    return result;
}

/* The files of the slots' parameters, each once: their attribute `_shard_file`
 * (ctrainer/fsdp/layout.py). A new list; NULL with an exception. */
static PyObject *
find_files(OptimEngine *self)
{
    PyObject *files = PyList_New(0);
    for (size_t k = 0; files != NULL && k < self->n_slots; k++) {
        PyObject *file = attribute(&self->slots[k], self->state->str__shard_file);
        int known = file == NULL ? -1 : 1;
        if (file != NULL && PyObject_TypeCheck(file, self->state->DiskMemory)) {
            known = PySequence_Contains(files, file);
        }
        if (known < 0 || (known == 0 && PyList_Append(files, file) < 0)) {
            Py_CLEAR(files);
        }
        Py_XDECREF(file);
    }
    return files;
}

static int
read_files(OptimEngine *self)
{
    PyObject *files = find_files(self);
    const Py_ssize_t n = files == NULL ? 0 : PyList_GET_SIZE(files);
    const ct_disk_memory **found = PyMem_New(const ct_disk_memory *, n + 1);
    int result = -1;
    ct_error err;
    if (files != NULL && found == NULL) {
        PyErr_NoMemory();
    }
    else if (files != NULL) {
        for (Py_ssize_t i = 0; i < n; i++) {
            found[i] = &((DiskMemory *)PyList_GET_ITEM(files, i))->core;
        }
        result = ct_optim_set_shards(self->core, found, (size_t)n, &err) == CT_OK
                     ? 0
                     : ctpy_raise_int(&err);
    }
    if (result == 0) {
        Py_XSETREF(self->shards, Py_NewRef(files));
    }
    PyMem_Free((void *)found);
    Py_XDECREF(files);
    return result;
}

/* Fills in the part of a parameter whose memory and shape are known. Elements behind
 * the end of the parameter are padding. */
static int
plan_part(OptimEngine *self, const optim_slot *slot, ct_optim_param *param)
{
    const optim_part *part = &slot->part;
    if (part->whole == 0) {
        return 0;
    }
    const size_t left = part->whole - part->begin;
    param->n = param->n < left ? param->n : left;
    param->ndim = part->ndim;
    param->rows = part->rows;
    param->cols = part->cols;
    if (part->communicator == NULL) {
        return 0;
    }
    ct_comm *comm = ctpy_comm_borrow(self->state, part->communicator);
    param->part = (ct_part){comm, part->begin, part->whole};
    return comm == NULL ? -1 : 0;
}

/* Keeps the communicators of all parts from being closed, or no longer. */
static void
hold_groups(OptimEngine *self, bool held)
{
    for (size_t k = 0; k < self->n_slots; k++) {
        PyObject *communicator = self->slots[k].part.communicator;
        if (communicator != NULL) {
            ((Communicator *)communicator)->busy += held ? 1 : -1;
        }
    }
}

/* ---- which parameters have a gradient on any rank -------------------------------- */

/* 1 where the slot's parameter has a gradient, 0, or -1 with an exception. */
static int
has_grad(const OptimEngine *self, const optim_slot *slot)
{
    PyObject *grad = PyObject_GetAttr(slot->param, self->state->str_grad);
    const int has = grad == NULL ? -1 : !Py_IsNone(grad);
    Py_XDECREF(grad);
    return has;
}

/* Sets an empty gradient where the parameter has no elements on this rank. */
static int
set_empty_grad(const OptimEngine *self, const optim_slot *slot)
{
    PyObject *count = PyObject_CallMethod(slot->param, "numel", NULL);
    const long n = count == NULL ? -1 : PyLong_AsLong(count);
    PyObject *empty = n != 0 ? NULL : PyObject_CallMethod(slot->param, "detach", NULL);
    const int result =
        empty == NULL ? (n > 0 ? 0 : -1)
                      : PyObject_SetAttr(slot->param, self->state->str_grad, empty);
    Py_XDECREF(empty);
    Py_XDECREF(count);
    return result;
}

/* Of the slots of one group of ranks, from `first` on. */
static int
reduce_presence(OptimEngine *self, size_t first, double *has)
{
    PyObject *communicator = self->slots[first].part.communicator;
    size_t n = 0, at = 0;
    int found = 0;
    for (size_t k = first; found >= 0 && k < self->n_slots; k++) {
        if (self->slots[k].part.communicator == communicator) {
            found = has_grad(self, &self->slots[k]);
            has[n++] = found;
        }
    }
    if (found < 0 || ctpy_comm_reduce_numbers(self->state, communicator, NULL, has, n,
                                              CT_REDUCE_MAX) < 0) {
        return -1;
    }
    for (size_t k = first; found >= 0 && k < self->n_slots; k++) {
        if (self->slots[k].part.communicator == communicator && has[at++] > 0.0) {
            found = has_grad(self, &self->slots[k]);
            found = found == 0 ? set_empty_grad(self, &self->slots[k]) : found;
        }
    }
    return found < 0 ? -1 : 0;
}

/* Sets an empty gradient for parts without elements on this rank where another rank has
 * a gradient: all ranks update the same parameters. Collective where there are parts.
 */
static int
agree_on_grads(OptimEngine *self)
{
    double *has = NULL;
    int result = 0;
    for (size_t k = 0; result == 0 && k < self->n_slots; k++) {
        const PyObject *communicator = self->slots[k].part.communicator;
        bool seen = communicator == NULL;
        for (size_t i = 0; !seen && i < k; i++) {
            seen = self->slots[i].part.communicator == communicator;
        }
        if (!seen && has == NULL && (has = PyMem_New(double, self->n_slots)) == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        result = seen ? 0 : reduce_presence(self, k, has);
    }
    PyMem_Free(has);
    return result;
}

/* ---- parameters of the live param_groups ----------------------------------------- */

/* Makes slots agree with the wrapper's live param_groups. */
static int
plan_params(OptimEngine *self, PyObject *wrapper)
{
    ctpy_state *state = self->state;
    PyObject *groups = PyObject_GetAttr(wrapper, state->str_param_groups);
    int result = -1;
    if (groups != NULL && !PyList_Check(groups)) {
        PyErr_Format(PyExc_TypeError, "param_groups is a %.200s; expected a list",
                     Py_TYPE(groups)->tp_name);
    }
    else if (groups != NULL) {
        result =
            optim_plan_slots(self, groups) < 0 ? -1 : optim_read_groups(self, groups);
    }
    Py_XDECREF(groups);
    if (result == 0 && !self->parts_asked) {
        result = read_parts(self) < 0 ? -1 : read_files(self);
        self->parts_asked = result == 0;
    }
    if (result < 0) {
        optim_drop_slots(self, 0);
    }
    return result;
}

/* ---- the device ------------------------------------------------------------------ */

/* The first gradient's memory says where the update runs. */
static int
choose_device(OptimEngine *self)
{
    size_t k = 0;
    while (k < self->n_slots && self->slots[k].grad == NULL) {
        k++;
    }
    if (k == self->n_slots) {
        return 0;
    }
    const optim_slot *slot = &self->slots[k];
    const ctpy_place place = {".grad", slot->group, slot->index};
    ctpy_view view;
    if (ctpy_view_anywhere(self->state, slot->grad, &place, &view) < 0) {
        return -1;
    }
    ctpy_target target;
    if (ctpy_target_of(self->state, slot->grad, &place, &view, &target) < 0) {
        return -1;
    }
    if (target.device != self->target.device ||
        target.ordinal != self->target.ordinal) {
        ct_optim_move(self->core, target.device);
    }
    self->target = target;
    return 0;
}

/* ---- gradients ------------------------------------------------------------------- */

/* Views slot->grad and copies its address into the core's parameter. */
static int
view_grad(OptimEngine *self, optim_slot *slot, ct_optim_param *param)
{
    const ct_span *span = &slot->grad_view.span;
    if (optim_view(self, slot, ".grad", slot->grad, &slot->grad_view) < 0) {
        return -1;
    }
    if (!ct_dtype_is_float(span->dtype)) {
        return optim_fail(
            PyExc_TypeError, slot, ".grad",
            "has dtype %s; expected float32, float64, bfloat16 or float16",
            ct_dtype_name(span->dtype));
    }
    /* The gradient of an empty part has no address, and is a gradient all the same. */
    param->grad = slot->part.whole != 0 && span->n == 0 ? (void *)slot : span->data;
    param->n = span->n;
    param->grad_dtype = span->dtype;
    return 0;
}

enum {
    AHEAD = 4 /* slots, for prefetching */
};

/* Takes every parameter's .grad into its slot. */
static int
take_grads(OptimEngine *self)
{
    for (size_t k = 0; k < self->n_slots; k++) {
        optim_slot *slot = &self->slots[k];
        if (k + AHEAD < self->n_slots) {
            ctpy_prefetch_tensor(slot[AHEAD].param, slot[AHEAD].shape);
            ctpy_prefetch_tensor(NULL, slot[AHEAD].grad_view.shape);
        }
        Py_XSETREF(slot->grad, PyObject_GetAttr(slot->param, self->state->str_grad));
        if (slot->grad == NULL) {
            return -1;
        }
        if (Py_IsNone(slot->grad)) {
            Py_CLEAR(slot->grad);
        }
    }
    return 0;
}

/* Reads every parameter's .grad into its slot and the core. */
static int
plan_grads(OptimEngine *self)
{
    ct_optim_param *params = ct_optim_params_borrow(self->core);
    if (agree_on_grads(self) < 0 || take_grads(self) < 0 || choose_device(self) < 0) {
        return -1;
    }
    for (size_t k = 0; k < self->n_slots; k++) {
        optim_slot *slot = &self->slots[k];
        params[k] = (ct_optim_param){
            .group = slot->group, .number = slot->number, .numbered = slot->numbered};
        if (slot->grad != NULL && view_grad(self, slot, &params[k]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- parameters and state of every slot with a gradient -------------------------- */

/* A torch parameter is its own data; a NumPy parameter has an array in .data. */
static int
find_data(ctpy_state *state, optim_slot *slot)
{
    PyTypeObject *type = Py_TYPE(slot->param);
    PyObject *data;
    if ((PyObject *)type == state->torch_parameter ||
        (PyObject *)type == state->torch_tensor ||
        (state->torch_tensor != NULL &&
         PyType_IsSubtype(type, (PyTypeObject *)state->torch_tensor))) {
        data = Py_NewRef(slot->param);
    }
    else {
        data = PyObject_GetAttr(slot->param, state->str_data);
    }
    Py_XSETREF(slot->data, data);
    return data == NULL ? -1 : 0;
}

static int
view_param(OptimEngine *self, optim_slot *slot, ctpy_view *view)
{
    if (find_data(self->state, slot) < 0 ||
        optim_view(self, slot, "", slot->data, view) < 0 ||
        optim_check_like(slot, view, &slot->grad_view, ".grad") < 0) {
        return -1;
    }
    slot->shape = view->shape;
    if (view->readonly) {
        return optim_fail(PyExc_ValueError, slot, "",
                          "is a read-only array; expected one that can be written");
    }
    return 0;
}

/* Has the update of slots[k] write the average too, where the slot is averaged. */
static int
plan_average(OptimEngine *self, size_t k, ct_optim_param *param, const ctpy_view *view)
{
    optim_slot *slot = &self->slots[k];
    ctpy_view average;
    if (!slot->average_known) {
        const Py_ssize_t hint = k == 0 ? 0 : self->slots[k - 1].average + 1;
        slot->average = ctpy_average_find(self->average, slot->data, hint);
        slot->average_known = true;
    }
    if (slot->average < 0) {
        return 0;
    }
    if (ctpy_average_take(self->average, slot->average, view, &average) < 0) {
        return -1;
    }
    param->ema = average.span.data;
    param->ema_dtype = average.span.dtype;
    return 0;
}

/* The dict of a slot's state comes from three places, one after the other. */
static void
prefetch_state(const optim_slot *slot, const optim_slot *end)
{
    if (end - slot > AHEAD) {
        ctpy_prefetch(slot[AHEAD].state, 0);
        ctpy_prefetch(slot[AHEAD / 2].step, 0);
        const PyDictObject *dict = (const PyDictObject *)slot[AHEAD / 2].state;
        const void *keys = dict == NULL ? NULL : (const void *)dict->ma_keys;
        ctpy_prefetch(keys, 0);
        ctpy_prefetch(keys, 64);
        ctpy_prefetch(keys, 128);
    }
}

/* Reads parameters and state of every slot with a gradient; missing state is made by
 * wrapper._new_state(param, group). */
static int
plan_operands(OptimEngine *self, PyObject *wrapper)
{
    ct_optim_param *params = ct_optim_params_borrow(self->core);
    if (optim_sync_state(self, wrapper) < 0) {
        return -1;
    }
    for (size_t k = 0; k < self->n_slots; k++) {
        optim_slot *slot = &self->slots[k];
        ctpy_view view;
        prefetch_state(slot, self->slots + self->n_slots);
        if (slot->grad == NULL) {
            continue;
        }
        if (view_param(self, slot, &view) < 0) {
            return -1;
        }
        params[k].param = view.span.data;
        params[k].dtype = view.span.dtype;
        if (plan_shape(self, slot, &params[k], &view) < 0 ||
            plan_part(self, slot, &params[k]) < 0) {
            return -1;
        }
        if (optim_plan_state(self, wrapper, slot, &params[k], &view) < 0 ||
            (self->averages && plan_average(self, k, &params[k], &view) < 0)) {
            return -1;
        }
    }
    return optim_remember_state(self, wrapper);
}

/* ---- one update, in two phases --------------------------------------------------- */

/* RuntimeError with `what` while a step is under way. */
static int
check_idle(const OptimEngine *self, const char *what)
{
    if (self->busy == 0) {
        return 0;
    }
    PyErr_Format(PyExc_RuntimeError,
                 "%s while another thread, or this one further up, is in step() of the "
                 "same optimizer: wait until it has returned",
                 what);
    return -1;
}

static void
end(OptimEngine *self)
{
    for (size_t k = 0; k < self->n_slots; k++) {
        Py_CLEAR(self->slots[k].grad);
    }
    self->capturing = false;
    self->busy--;
}

typedef enum phase {
    MEASURE,
    APPLY,
    ENQUEUE,
    AWAIT,
    PREPARE
} phase;

static ct_status
core_run(const OptimEngine *self, phase what, const ct_step_config *config,
         const ct_step_scale *scale, ct_step_result *result, ct_error *err)
{
    void *const stream = self->target.stream;
    switch (what) {
    case MEASURE:
        return ct_step_measure(self->core, stream, config, scale->now, result, err);
    case APPLY:
        return ct_step_apply(self->core, stream, config, scale->now, result, err);
    case ENQUEUE:
        return ct_step_enqueue(self->core, stream, config, scale, err);
    case PREPARE:
        return ct_step_prepare_replay(self->core, stream, config, scale->now, err);
    default:
        return ct_step_await(self->core, result, err);
    }
}

/* Runs a phase with the device current and without the GIL. */
static int
run(OptimEngine *self, phase what, const ct_step_config *config,
    const ct_step_scale *scale, ct_step_result *result)
{
    ct_error err, unused;
    const ct_device *device = self->target.device;
    int ordinal = self->target.ordinal;
    ct_status status = ct_device_switch(device, &ordinal, &err);
    if (status == CT_OK) {
        hold_groups(self, true);
        Py_BEGIN_ALLOW_THREADS
        status = core_run(self, what, config, scale, result, &err);
        Py_END_ALLOW_THREADS
        hold_groups(self, false);
        (void)ct_device_switch(device, &ordinal, &unused);
    }
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
measure(OptimEngine *self, const ct_step_config *config, double loss_scale)
{
    self->measured = false;
    const int failed =
        run(self, MEASURE, config, &(ct_step_scale){.now = loss_scale}, &self->result);
    self->measured = failed == 0;
    return failed;
}

static int
apply(OptimEngine *self, const ct_step_config *config, double loss_scale)
{
    const ct_step_scale scale = {.now = loss_scale};
    return run(self, APPLY, config, &scale, &self->result) < 0 ? -1
           : self->result.updated                              ? optim_count_steps(self)
                                                               : 0;
}

static int
enqueue(OptimEngine *self, const ct_step_config *config, const ct_step_scale *scale)
{
    if (run(self, ENQUEUE, config, scale, NULL) < 0) {
        return -1;
    }
    self->enqueued = self->measured = true;
    self->result = (ct_step_result){
        .grad_norm = Py_NAN, .clip_coef = 1.0, .finite = true, .updated = true};
    return optim_count_steps(self);
}

/* Waits for the result of an enqueued update, and takes the counts of a skipped update
 * back. */
static int
await(OptimEngine *self)
{
    if (!self->enqueued) {
        return 0;
    }
    self->enqueued = false;
    self->busy++;
    const int failed = run(self, AWAIT, NULL, NULL, &self->result);
    self->busy--;
    return failed ? -1 : self->result.updated ? 0 : optim_count_steps(self);
}

/* Reads parameters and gradients and marks the engine busy; -1 leaves it idle. */
static int
begin(OptimEngine *self, PyObject *wrapper)
{
    if (check_idle(self, "a second step began") < 0 || await(self) < 0) {
        return -1;
    }
    self->busy++;
    self->views = 0;
    if (plan_params(self, wrapper) < 0 || plan_grads(self) < 0) {
        end(self);
        return -1;
    }
    return 0;
}

/* torch's schedulers warn when they are stepped before their optimizer; this attribute,
 * which their wrapper of step() sets, marks the optimizer's step. */
static int
note_step(OptimEngine *self, PyObject *wrapper)
{
    return PyObject_SetAttr(wrapper, self->state->str__opt_called, Py_True);
}

/* The second phase, with the gradients in their slots. */
static int
finish(OptimEngine *self, PyObject *wrapper, const ct_step_config *config,
       double loss_scale)
{
    const ct_step_result *result = &self->result;
    int skip =
        result->spike || (!result->finite && config->nonfinite != CT_NONFINITE_KEEP);
    return (!skip && plan_operands(self, wrapper) < 0) ||
                   apply(self, config, loss_scale) < 0 ||
                   (self->result.updated && optim_write_groups(self, wrapper) < 0) ||
                   note_step(self, wrapper) < 0
               ? -1
               : 0;
}

int
ctpy_engine_measure(PyObject *engine, PyObject *op, const ct_step_config *config,
                    double loss_scale, ct_step_result *result)
{
    OptimEngine *self = (OptimEngine *)engine;
    if (begin(self, op) < 0) {
        return -1;
    }
    int failed = measure(self, config, loss_scale);
    end(self);
    *result = self->result;
    return failed;
}

int
ctpy_engine_apply(PyObject *engine, PyObject *op, const ct_step_config *config,
                  double loss_scale, ct_step_result *result)
{
    OptimEngine *self = (OptimEngine *)engine;
    if (begin(self, op) < 0) {
        return -1;
    }
    self->result = *result;
    self->measured = true;
    int failed = finish(self, op, config, loss_scale);
    end(self);
    *result = self->result;
    return failed;
}

/* Before the first update the device is not known. */
static bool
can_enqueue(const OptimEngine *self, const ct_step_config *config)
{
    const ct_comm *comm = config->comm;
    return self->target.device != NULL && self->target.device != &ct_device_cpu &&
           (comm == NULL || comm->gpu == self->target.ordinal) &&
           ct_step_can_enqueue(self->core, config);
}

bool
ctpy_engine_can_enqueue(PyObject *engine, const ct_step_config *config)
{
    return can_enqueue((OptimEngine *)engine, config);
}

int
ctpy_engine_enqueue(PyObject *engine, PyObject *op, const ct_step_config *config,
                    ct_step_scale *scale, PyObject *next_scale)
{
    OptimEngine *self = (OptimEngine *)engine;
    ctpy_view view = {0};
    if (begin(self, op) < 0) {
        return -1;
    }
    int result = can_enqueue(self, config);
    if (result > 0 && next_scale != NULL) {
        const int failed = ctpy_view_at(self->state, next_scale, "the loss scale",
                                        &self->target, &view);
        result = failed ? -1 : result;
        scale->next = view.span.data;
    }
    if (result > 0 && (plan_operands(self, op) < 0 ||
                       enqueue(self, config, scale) < 0 || note_step(self, op) < 0)) {
        result = -1;
    }
    end(self);
    return result;
}

int
ctpy_engine_await(PyObject *engine, ct_step_result *result)
{
    OptimEngine *self = (OptimEngine *)engine;
    const int failed = await(self);
    *result = self->result;
    return failed;
}

int
ctpy_engine_attach(PyObject *engine, PyObject *average)
{
    OptimEngine *self = (OptimEngine *)engine;
    if (check_idle(self, "an average was attached") < 0) {
        return -1;
    }
    self->averages = average != NULL;
    if (average == NULL || average == self->average) {
        return 0;
    }
    Py_XSETREF(self->average, Py_NewRef(average));
    for (size_t k = 0; k < self->n_slots; k++) {
        self->slots[k].average_known = false;
    }
    return 0;
}

/* ---- step() ---------------------------------------------------------------------- */

/* Does an option need the norm? */
static bool
norm_wanted(const OptimEngine *self, const ct_step_config *config)
{
    const ct_optim_group *groups = ct_optim_groups_borrow(self->core);
    bool wanted = config->clip.max_norm > 0.0 || config->nonfinite != CT_NONFINITE_KEEP;
    for (size_t g = 0; !wanted && g < ct_optim_n_groups(self->core); g++) {
        wanted = groups[g].max_norm != 0.0;
    }
    return wanted;
}

/* ---- updates that a graph of the device may have --------------------------------- */

static bool
is_capturable(const OptimEngine *self)
{
    const ct_optim_group *groups = ct_optim_groups_borrow(self->core);
    bool capturable = false;
    for (size_t g = 0; g < ct_optim_n_groups(self->core); g++) {
        capturable = capturable || groups[g].capturable;
    }
    return capturable;
}

static int
check_capturable(const OptimEngine *self, const ct_step_config *config, bool norm)
{
    if (self->target.device == &ct_device_cpu) {
        PyErr_SetString(PyExc_ValueError,
                        "capturable=True is for parameters on a GPU, whose updates a "
                        "graph can have; these are on the CPU: leave the option out");
        return -1;
    }
    if (!ct_optim_can_defer(self->core)) {
        PyErr_SetString(
            PyExc_ValueError,
            "capturable=True: a graph cannot have the updates of optimizers "
            "that look at whole parameters or keep numbers on the host, nor "
            "stochastic_rounding or a group's max_grad_norm");
        return -1;
    }
    if (ct_clip_by_value(&config->clip) ||
        (norm && !ct_step_can_enqueue(self->core, config))) {
        PyErr_SetString(PyExc_ValueError,
                        "capturable=True: a graph cannot have clip_value, "
                        "clip_by_group, nonfinite='stop', zero_grads beside "
                        "nonfinite='skip', or a norm_type other than 1, 2 and inf");
        return -1;
    }
    return 0;
}

static int
update_capturable(OptimEngine *self, PyObject *wrapper, ct_step_config *config,
                  double loss_scale)
{
    const ct_step_scale scale = {.now = loss_scale};
    const bool norm = norm_wanted(self, config);
    ct_error err;
    if (check_capturable(self, config, norm) < 0) {
        return -1;
    }
    if (self->target.device->capturing(self->target.stream, &self->capturing, &err) !=
        CT_OK) {
        return ctpy_raise_int(&err);
    }
    config->capture = self->capturing ? CT_CAPTURE_NOW : CT_CAPTURE_LATER;
    if (!self->capturing) {
        return norm ? (plan_operands(self, wrapper) < 0 ||
                               enqueue(self, config, &scale) < 0 ||
                               note_step(self, wrapper) < 0
                           ? -1
                           : 0)
                    : finish(self, wrapper, config, loss_scale);
    }
    ct_step_result unused = {.clip_coef = 1.0, .finite = true};
    if (plan_operands(self, wrapper) < 0 ||
        run(self, norm ? ENQUEUE : APPLY, config, &scale, &unused) < 0) {
        return -1;
    }
    self->captured = *config;
    self->captured_scale = loss_scale;
    self->captured_norm = norm;
    return 0;
}

static int
prepare_replay(OptimEngine *self, PyObject *wrapper)
{
    const ct_step_scale scale = {.now = self->captured_scale};
    if (scale.now == 0.0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "no update has been captured: make the optimizer with "
                        "capturable=True, call step() once, then once more while the "
                        "stream is captured");
        return -1;
    }
    if (begin(self, wrapper) < 0) {
        return -1;
    }
    self->capturing = true;
    const int failed = plan_operands(self, wrapper) < 0 ||
                       run(self, PREPARE, &self->captured, &scale, &self->result) < 0 ||
                       optim_count_steps(self) < 0 || note_step(self, wrapper) < 0;
    if (!failed) {
        self->measured = self->enqueued = self->captured_norm;
        self->result =
            (ct_step_result){.clip_coef = 1.0, .finite = true, .updated = true};
    }
    end(self);
    return failed ? -1 : 0;
}

/* Both phases at once: gradients are read once. */
static int
update(OptimEngine *self, PyObject *wrapper, ct_step_config *config, double loss_scale)
{
    if (begin(self, wrapper) < 0) {
        return -1;
    }
    self->measured = false;
    self->result = (ct_step_result){.clip_coef = 1.0, .finite = true};
    int failed =
        is_capturable(self)
            ? update_capturable(self, wrapper, config, loss_scale) < 0
            : (norm_wanted(self, config) && measure(self, config, loss_scale) < 0) ||
                  finish(self, wrapper, config, loss_scale) < 0;
    end(self);
    return failed ? -1 : 0;
}

PyDoc_STRVAR(
    step_doc,
    "step($self, wrapper, max_norm, loss_scale, nonfinite, zero_grads, norm_type,\n"
    "     clip_value, clip_by_group, /)\n--\n\n"
    "Unscale, clip, update and zero the gradients of wrapper.\n\n"
    "max_norm clips to that norm, None does not; norm_type is its p, > 0 or\n"
    "inf; clip_by_group clips each group by its own norm, as groups with a\n"
    "'max_grad_norm' are in any case; clip_value then clips each element,\n"
    "None does not. loss_scale is the factor of the loss; nonfinite ('skip',\n"
    "'stop' or 'keep') is the policy for a gradient that is Inf or NaN. The\n"
    "norm is worked out only if an option needs it. Raises\n"
    "FloatingPointError for 'stop', nothing changed; ValueError and\n"
    "TypeError name the parameter at fault.");

static PyObject *
OptimEngine_step(PyObject *op, PyObject *const *args, Py_ssize_t nargs)
{
    ct_step_config config;
    double loss_scale;
    if (nargs != 8) {
        return PyErr_Format(PyExc_TypeError, "step() takes 8 arguments, got %zd",
                            nargs);
    }
    if (optim_parse_options(args + 1, &config, &loss_scale) < 0 ||
        update((OptimEngine *)op, args[0], &config, loss_scale) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(check_idle_doc, "check_idle($self, what, /)\n--\n\n"
                             "Raise RuntimeError if a step is under way; what is the\n"
                             "subject of the message.");

static PyObject *
OptimEngine_check_idle(PyObject *op, PyObject *arg)
{
    const char *what = PyUnicode_AsUTF8(arg);
    if (what == NULL || check_idle((OptimEngine *)op, what) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    use_disk_doc,
    "use_disk($self, memory, buffers, kinds, /)\n--\n\n"
    "Update state that lies in memory, a DiskMemory, piece by piece, so many being\n"
    "in memory at once. None: no state does. Raises ValueError for a kind among the\n"
    "groups' that does not work element by element.");

static int
check_elementwise(PyObject *kinds)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); i++) {
        const char *name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(kinds, i));
        const ct_optim_group group = {
            .kind = name == NULL ? CT_OPTIM_KIND_COUNT : ct_optim_kind_from_name(name)};
        if (group.kind == CT_OPTIM_KIND_COUNT) {
            (void)(name == NULL ? NULL : reject_kind(name));
            return -1;
        }
        if (ct_optim_group_is_whole(&group)) {
            PyErr_Format(PyExc_ValueError,
                         "%s looks at whole parameters, and state can be in a file for "
                         "optimizers that work element by element, such as AdamW",
                         name);
            return -1;
        }
    }
    return 0;
}

static PyObject *
OptimEngine_use_disk(PyObject *op, PyObject *args)
{
    OptimEngine *self = (OptimEngine *)op;
    PyObject *memory, *kinds;
    Py_ssize_t buffers;
    if (!PyArg_ParseTuple(args, "OnO!:use_disk", &memory, &buffers, &PyTuple_Type,
                          &kinds)) {
        return NULL;
    }
    const bool none = Py_IsNone(memory);
    if (!none && !PyObject_TypeCheck(memory, self->state->DiskMemory)) {
        return PyErr_Format(PyExc_TypeError,
                            "memory is a %.200s; expected a DiskMemory or None",
                            Py_TYPE(memory)->tp_name);
    }
    if (buffers < 1) {
        return PyErr_Format(PyExc_ValueError, "buffers must be at least 1, got %zd",
                            buffers);
    }
    if (check_idle(self, "use_disk()") < 0 || await(self) < 0 ||
        check_elementwise(kinds) < 0) {
        return NULL;
    }
    ct_optim_set_disk(self->core, none ? NULL : &((DiskMemory *)memory)->core,
                      (size_t)buffers);
    Py_XSETREF(self->disk, none ? NULL : Py_NewRef(memory));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    await_update_doc,
    "await_update($self, /)\n--\n\n"
    "Wait for the result of an update that the trainer has enqueued on a GPU,\n"
    "and take its step counts back if it was skipped there. The properties\n"
    "of the result and the next step do the same.");

PyDoc_STRVAR(
    prepare_replay_doc,
    "prepare_replay($self, wrapper, /)\n--\n\n"
    "Before a graph with an update of wrapper is replayed: send the constants\n"
    "of the next update to the GPU, on the current stream, and count the\n"
    "update.");

static PyObject *
OptimEngine_prepare_replay(PyObject *op, PyObject *wrapper)
{
    return prepare_replay((OptimEngine *)op, wrapper) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
OptimEngine_await_update(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return await((OptimEngine *)op) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- the last result ------------------------------------------------------------- */

enum {
    GRAD_NORM,
    CLIP_COEF,
    FINITE,
    UPDATED
};

static PyMemberDef results[] = {
    [GRAD_NORM] = {"grad_norm", T_DOUBLE, offsetof(OptimEngine, result.grad_norm), 0,
                   NULL                                                                   },
    [CLIP_COEF] = {"clip_coef", T_DOUBLE, offsetof(OptimEngine, result.clip_coef), 0,
                   NULL                                                                   },
    [FINITE] = {"finite",    T_BOOL,   offsetof(OptimEngine, result.finite),    0, NULL},
    [UPDATED] = {"updated",   T_BOOL,   offsetof(OptimEngine, result.updated),   0, NULL},
};

/* An entry of `results`, awaited. */
static PyObject *
OptimEngine_get_result(PyObject *op, void *member)
{
    OptimEngine *self = (OptimEngine *)op;
    if (await(self) < 0) {
        return NULL;
    }
    return member == &results[GRAD_NORM] && !self->measured
               ? Py_NewRef(Py_None)
               : PyMember_GetOne((const char *)op, member);
}

static PyGetSetDef OptimEngine_getset[] = {
    {"grad_norm", OptimEngine_get_result, NULL,
     "Norm of all gradients at the last step, unscaled and before clipping; None "
     "where nothing asked for it.",                                                      &results[GRAD_NORM]},
    {"clip_coef", OptimEngine_get_result, NULL,
     "What clipping by norm multiplied the gradients by, the least of all groups; 1 "
     "where it did nothing.",                                                            &results[CLIP_COEF]},
    {"finite",    OptimEngine_get_result, NULL,
     "False when the last step met a gradient that was Inf or NaN.",                     &results[FINITE]   },
    {"updated",   OptimEngine_get_result, NULL, "False when the last step was skipped.",
     &results[UPDATED]                                                                                      },
    {NULL,        NULL,                   NULL, NULL,                                    NULL               },
};

static PyMethodDef OptimEngine_methods[] = {
    {"step",           (PyCFunction)(void (*)(void))OptimEngine_step, METH_FASTCALL, step_doc          },
    {"check_idle",     OptimEngine_check_idle,                        METH_O,        check_idle_doc    },
    {"await_update",   OptimEngine_await_update,                      METH_NOARGS,   await_update_doc  },
    {"use_disk",       OptimEngine_use_disk,                          METH_VARARGS,  use_disk_doc      },
    {"prepare_replay", OptimEngine_prepare_replay,                    METH_O,        prepare_replay_doc},
    {NULL,             NULL,                                          0,             NULL              },
};

static PyType_Slot OptimEngine_slots[] = {
    {Py_tp_doc,      (void *)OptimEngine_doc},
    {Py_tp_new,      OptimEngine_new        },
    {Py_tp_traverse, OptimEngine_traverse   },
    {Py_tp_clear,    OptimEngine_clear      },
    {Py_tp_dealloc,  OptimEngine_dealloc    },
    {Py_tp_methods,  OptimEngine_methods    },
    {Py_tp_getset,   OptimEngine_getset     },
    {0,              NULL                   },
};

PyType_Spec OptimEngine_spec = {
    .name = "ctrainer._C.OptimEngine",
    .basicsize = sizeof(OptimEngine),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = OptimEngine_slots,
};
