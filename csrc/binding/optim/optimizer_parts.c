/* Parameters of which a rank has a part, as optimizers see them: the attribute `_part`
 * says of what (ctrainer/fsdp/layout.py, Part), and `_is_part` that they are not one
 * whole parameter. */
#include "binding/comm/communicator.h"
#include "binding/optim/engine.h"

/* An attribute of the slot's parameter, None where it has none; a new reference. */
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

static int
refuse_row(const OptimEngine *self, const optim_slot *slot)
{
    PyObject *answer = attribute(slot, self->state->str__is_part);
    const int several = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (several > 0) {
        const ct_optim_group *groups = ct_optim_groups_borrow(self->core);
        PyErr_Format(
            PyExc_ValueError,
            "param_groups[%u]['params'][%zd] is a row of several parameters "
            "that are sharded as one, and %s looks at each by itself, its norm "
            "or its rows and columns: shard with use_orig_params=True, or use "
            "an optimizer that works element by element, such as AdamW",
            slot->group, slot->index, ct_optim_kind_name(groups[slot->group].kind));
    }
    return several == 0 ? 0 : -1;
}

/* The sides of a shape, at most 64, and how many elements they make. */
static int
read_shape(PyObject *shape, optim_part *part)
{
    int64_t sides[64];
    const Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
    size_t whole = 1;
    if (ndim > (Py_ssize_t)(sizeof sides / sizeof *sides)) {
        PyErr_Format(PyExc_ValueError, "_part has a shape of %zd dimensions", ndim);
        return -1;
    }
    for (Py_ssize_t i = 0; i < ndim; i++) {
        sides[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        if (sides[i] < 0) {
            return PyErr_Occurred() ? -1
                                    : (PyErr_Format(PyExc_ValueError,
                                                    "_part has a shape of %R", shape),
                                       -1);
        }
        whole *= (size_t)sides[i];
    }
    ct_optim_param param;
    optim_set_shape(&param, sides, (int)ndim);
    part->whole = whole;
    part->ndim = param.ndim;
    part->rows = param.rows;
    part->cols = param.cols;
    return 0;
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

int
optim_read_parts(OptimEngine *self)
{
    const ct_optim_group *groups = ct_optim_groups_borrow(self->core);
    int result = 0;
    for (size_t k = 0; result == 0 && k < self->n_slots; k++) {
        optim_slot *slot = &self->slots[k];
        Py_CLEAR(slot->part.communicator);
        slot->part = (optim_part){.communicator = NULL};
        if (ct_optim_group_is_whole(&groups[slot->group])) {
            PyObject *described = attribute(slot, self->state->str__part);
            result = described == NULL      ? -1
                     : Py_IsNone(described) ? refuse_row(self, slot)
                                            : read_part(self, slot, described);
            Py_XDECREF(described);
        }
    }
    return result;
}

/* ---- which parameters have a gradient on any rank ----------------------------------
 */

/* 1 where the slot's parameter has a gradient, 0, or -1 with an exception. */
static int
has_grad(const OptimEngine *self, const optim_slot *slot)
{
    PyObject *grad = PyObject_GetAttr(slot->param, self->state->str_grad);
    const int has = grad == NULL ? -1 : !Py_IsNone(grad);
    Py_XDECREF(grad);
    return has;
}

/* An empty gradient, where the parameter has no elements here either. */
static int
give_empty_grad(const OptimEngine *self, const optim_slot *slot)
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

/* Of the n slots of one group, which are those behind `first` and itself. */
static int
share_presence(OptimEngine *self, size_t first, double *has)
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
            found = found == 0 ? give_empty_grad(self, &self->slots[k]) : found;
        }
    }
    return found < 0 ? -1 : 0;
}

int
optim_share_presence(OptimEngine *self)
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
        result = seen ? 0 : share_presence(self, k, has);
    }
    PyMem_Free(has);
    return result;
}

/* What lies behind the parameter's end is padding. */
int
optim_plan_part(OptimEngine *self, const optim_slot *slot, ct_optim_param *param)
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

void
optim_hold_groups(OptimEngine *self, bool held)
{
    for (size_t k = 0; k < self->n_slots; k++) {
        PyObject *communicator = self->slots[k].part.communicator;
        if (communicator != NULL) {
            ((Communicator *)communicator)->busy += held ? 1 : -1;
        }
    }
}
