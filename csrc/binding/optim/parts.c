/* The parts of sharded parameters for OptimEngine: the attributes that describe a part
 * and the file of a shard, read after a change of the slots, and the ranks' agreement
 * on the parameters with gradients. */
#include "binding/optim/engine.h"

#include "binding/comm/communicator.h"
#include "binding/optim/disk_memory.h"

/* ---- shape, and parts of sharded parameters -------------------------------------- */

/* The attribute `_part` of a parameter describes the part on this rank
 * (ctrainer/fsdp/layout.py, Part); `_is_part` marks a flat parameter. */

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
    part->rows = optim_side(last[0]);
    part->cols = optim_side(last[1]);
    return 0;
}

int
optim_ask_for_shape(OptimEngine *self, const optim_slot *slot, ct_optim_param *param)
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

int
optim_read_parts(OptimEngine *self)
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

int
optim_read_files(OptimEngine *self)
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

/* ---- gradients on other ranks ---------------------------------------------------- */

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

int
optim_reduce_presence(OptimEngine *self, size_t first, double *has)
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
    if (found < 0 ||
        ctpy_comm_reduce_numbers(self->state, ctpy_comm_of_hosts(communicator), NULL,
                                 has, n, CT_REDUCE_MAX) < 0) {
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
