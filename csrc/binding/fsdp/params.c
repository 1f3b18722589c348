/* A unit's parameters, as users change parameters: frozen or trained again before a
 * pass, replaced or changed in place by the forward.
 *
 * Changes of a gathered parameter are lost at its release, and a parameter outside of
 * the unit's memory is never gathered again: the forward would compute with other
 * weights than the optimizer's. */
#include "binding/fsdp/unit.h"

/* ---- frozen parameters ----------------------------------------------------------- */

int
fsdp_requires_grad(const ctpy_state *state, PyObject *tensor)
{
    PyObject *answer = PyObject_GetAttr(tensor, state->str_requires_grad);
    const int result = answer == NULL ? -1 : answer == Py_True;
    Py_XDECREF(answer);
    return result;
}

static int
take_frozen(FSDPUnit *self, PyObject *frozen)
{
    if (!PyTuple_Check(frozen) || (size_t)PyTuple_GET_SIZE(frozen) != self->n_leaves) {
        PyErr_Format(PyExc_TypeError, "_settle_trained() returns a tuple of %zu",
                     self->n_leaves);
        return -1;
    }
    self->n_frozen = 0;
    for (size_t i = 0; i < self->n_leaves; i++) {
        self->leaves[i].frozen = PyTuple_GET_ITEM(frozen, (Py_ssize_t)i) == Py_True;
        self->n_frozen += self->leaves[i].frozen;
    }
    return 0;
}

int
fsdp_note_frozen(FSDPUnit *self, PyObject *tensors)
{
    ctpy_state *state = fsdp_state_borrow(self);
    bool known = true;
    for (Py_ssize_t i = 0; known && i < PyTuple_GET_SIZE(tensors); i++) {
        const size_t leaf = (size_t)i / 2;
        const int trains = leaf < self->n_leaves && !self->leaves[leaf].frozen;
        const int wanted = fsdp_requires_grad(state, PyTuple_GET_ITEM(tensors, i));
        if (wanted < 0) {
            return -1;
        }
        known = wanted == trains;
    }
    if (known) {
        return 0;
    }
    PyObject *frozen =
        ctpy_call_hook((PyObject *)self, state->str__settle_trained, NULL, 0);
    const int result = frozen == NULL ? -1 : take_frozen(self, frozen);
    Py_XDECREF(frozen);
    return result;
}

/* ---- parameters that the forward changes ----------------------------------------- */

/* An attribute that is a parameter, with objects of the tuple. */
typedef struct attribute {
    PyObject *dict, *name, *param, *home;
} attribute;

static attribute
attribute_borrow(PyObject *attributes, Py_ssize_t i)
{
    PyObject *const *items = &PyTuple_GET_ITEM(attributes, 4 * i);
    return (attribute){items[0], items[1], items[2], items[3]};
}

/* How often a tensor was changed in place, 0 for an inference tensor; -1 with an
 * exception. */
static long long
version_of(const ctpy_state *state, PyObject *tensor)
{
    PyObject *answer = PyObject_GetAttr(tensor, state->str__version);
    if (answer == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
        return 0;
    }
    const long long version = answer == NULL ? -1 : PyLong_AsLongLong(answer);
    Py_XDECREF(answer);
    return version;
}

/* Whether a parameter has the address of its attribute, -1 with an exception. */
static int
is_at_home(const ctpy_state *state, attribute it)
{
    PyObject *at = ctpy_call_hook(it.param, state->str_data_ptr, NULL, 0);
    const int same = at == NULL ? -1 : PyObject_RichCompareBool(at, it.home, Py_EQ);
    Py_XDECREF(at);
    return same;
}

/* 1 where the attribute is the parameter, in its place and of that version; 0
 * where not, -1 with an exception. */
static int
is_kept(FSDPUnit *self, attribute it, long long version)
{
    const ctpy_state *state = fsdp_state_borrow(self);
    PyObject *found = PyDict_GetItemWithError(it.dict, it.name);
    if (found != it.param) {
        return found == NULL && PyErr_Occurred() ? -1 : 0;
    }
    const long long now = version_of(state, it.param);
    return now < 0 ? -1 : now != version ? 0 : is_at_home(state, it);
}

/* The parameter of an attribute, or all below 0. */
static int
check_parameters(FSDPUnit *self, Py_ssize_t changed)
{
    PyObject *index = PyLong_FromSsize_t(changed);
    PyObject *answer =
        index == NULL
            ? NULL
            : ctpy_call_hook((PyObject *)self,
                             fsdp_state_borrow(self)->str__check_parameters, &index, 1);
    const int result = answer == NULL ? -1 : 0;
    Py_XDECREF(index);
    Py_XDECREF(answer);
    return result;
}

static int
check_attributes(FSDPUnit *self, PyObject *attributes, const long long *versions,
                 Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        const int kept = is_kept(self, attribute_borrow(attributes, i), versions[i]);
        if (kept < 0 || (kept == 0 && check_parameters(self, i) < 0)) {
            return -1;
        }
    }
    return 0;
}

/* Changes through `.data` have no version. */
static int
compare_gathered(FSDPUnit *self, bool with_grads)
{
    if ((self->compared || !with_grads) && !self->core.full->poisoned) {
        return 0;
    }
    self->compared = check_parameters(self, -1) == 0;
    return self->compared ? 0 : -1;
}

PyObject *
fsdp_call(FSDPUnit *self, PyObject *fn, PyObject *args, PyObject *kwargs,
          PyObject *attributes, bool with_grads)
{
    const Py_ssize_t n = PyTuple_GET_SIZE(attributes) / 4;
    long long *versions = PyMem_New(long long, (size_t)n + 1);
    if (versions == NULL) {
        return PyErr_NoMemory();
    }
    bool known = true;
    for (Py_ssize_t i = 0; known && i < n; i++) {
        versions[i] =
            version_of(fsdp_state_borrow(self), attribute_borrow(attributes, i).param);
        known = versions[i] >= 0;
    }
    PyObject *out = known ? PyObject_Call(fn, args, kwargs) : NULL;
    if (out != NULL && (check_attributes(self, attributes, versions, n) < 0 ||
                        compare_gathered(self, with_grads) < 0)) {
        Py_CLEAR(out);
    }
    PyMem_Free(versions);
    return out;
}
