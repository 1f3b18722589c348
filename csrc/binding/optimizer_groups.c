/* A parameter group, a dict as torch has it, to the core's hyperparameters. The dicts
 * are read at every update, so schedulers and users may write to them at any time. */
#include "binding/optimizer.h"

/* group[key], owned; NULL with a ValueError that names the group. */
static PyObject *
group_get(PyObject *group, PyObject *key, size_t g)
{
    PyObject *value = PyDict_GetItemWithError(group, key);
    if (value == NULL && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError,
                     "param_groups[%zu] has no %R: add it, or make the group with "
                     "add_param_group(), which fills in the defaults",
                     g, key);
    }
    return Py_XNewRef(value);
}

static int
to_double(PyObject *value, PyObject *key, size_t g, double *out)
{
    *out = PyFloat_AsDouble(value);
    if (*out != -1.0 || !PyErr_Occurred()) {
        return 0;
    }
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Format(PyExc_TypeError,
                     "param_groups[%zu][%R] is %R, a %.200s; expected a number", g, key,
                     value, Py_TYPE(value)->tp_name);
    }
    return -1;
}

static int
read_double(PyObject *group, PyObject *key, size_t g, double *out)
{
    PyObject *value = group_get(group, key, g);
    int result = value == NULL ? -1 : to_double(value, key, g, out);
    Py_XDECREF(value);
    return result;
}

/* The truth of group[key]; a missing key is false. -1 with an exception. */
static int
read_flag(PyObject *group, PyObject *key)
{
    PyObject *value = PyDict_GetItemWithError(group, key);
    if (value == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(value);
    int truth = PyObject_IsTrue(value);
    Py_DECREF(value);
    return truth;
}

/* Options that change the arithmetic or the way of running, and that we lack. They
 * may come with a state_dict of torch's. */
static int
refuse_options(ctpy_state *state, PyObject *group, size_t g)
{
    enum {
        OPTIONS = 3
    };
    PyObject *const options[OPTIONS] = {state->str_amsgrad, state->str_capturable,
                                        state->str_differentiable};
    for (size_t i = 0; i < OPTIONS; i++) {
        int set = read_flag(group, options[i]);
        if (set > 0) {
            PyErr_Format(PyExc_ValueError,
                         "param_groups[%zu][%R] is True, which this optimizer does not "
                         "have: set it to False, or use torch.optim",
                         g, options[i]);
        }
        if (set != 0) {
            return -1;
        }
    }
    return 0;
}

static int
read_betas(ctpy_state *state, PyObject *group, size_t g, ct_adamw_config *config)
{
    PyObject *betas = group_get(group, state->str_betas, g);
    PyObject *pair = betas == NULL ? NULL : PySequence_Tuple(betas);
    int result = -1;
    if (pair != NULL && PyTuple_GET_SIZE(pair) != 2) {
        PyErr_Format(PyExc_ValueError,
                     "param_groups[%zu]['betas'] is %R; expected two numbers", g, pair);
    }
    else if (pair != NULL) {
        PyObject *key = state->str_betas;
        result =
            to_double(PyTuple_GET_ITEM(pair, 0), key, g, &config->beta1) < 0 ||
                    to_double(PyTuple_GET_ITEM(pair, 1), key, g, &config->beta2) < 0
                ? -1
                : 0;
    }
    Py_XDECREF(pair);
    Py_XDECREF(betas);
    return result;
}

static int
read_adamw(ctpy_state *state, PyObject *group, size_t g, ct_adamw_config *config)
{
    PyObject *decoupled =
        PyDict_GetItemWithError(group, state->str_decoupled_weight_decay);
    if (decoupled == Py_False) {
        PyErr_Format(PyExc_ValueError,
                     "param_groups[%zu]['decoupled_weight_decay'] is False, which is "
                     "Adam with L2 regularisation: use torch.optim.Adam for it",
                     g);
    }
    if (PyErr_Occurred()) {
        return -1;
    }
    return read_double(group, state->str_lr, g, &config->lr) < 0 ||
                   read_betas(state, group, g, config) < 0 ||
                   read_double(group, state->str_eps, g, &config->eps) < 0 ||
                   read_double(group, state->str_weight_decay, g,
                               &config->weight_decay) < 0
               ? -1
               : 0;
}

static int
read_sgd(ctpy_state *state, PyObject *group, size_t g, ct_sgd_config *config)
{
    int nesterov = read_flag(group, state->str_nesterov);
    if (nesterov < 0) {
        return -1;
    }
    config->nesterov = nesterov;
    return read_double(group, state->str_lr, g, &config->lr) < 0 ||
                   read_double(group, state->str_momentum, g, &config->momentum) < 0 ||
                   read_double(group, state->str_dampening, g, &config->dampening) <
                       0 ||
                   read_double(group, state->str_weight_decay, g,
                               &config->weight_decay) < 0
               ? -1
               : 0;
}

static int
read_group(OptimEngine *self, PyObject *group, size_t g)
{
    ctpy_state *state = self->state;
    ct_optim_group read = {.maximize = false};
    if (!PyDict_Check(group)) {
        PyErr_Format(PyExc_TypeError, "param_groups[%zu] is a %.200s; expected a dict",
                     g, Py_TYPE(group)->tp_name);
        return -1;
    }
    int maximize = read_flag(group, state->str_maximize);
    if (maximize < 0 || refuse_options(state, group, g) < 0) {
        return -1;
    }
    int failed = ct_optim_get_kind(self->core) == CT_OPTIM_ADAMW
                     ? read_adamw(state, group, g, &read.adamw)
                     : read_sgd(state, group, g, &read.sgd);
    if (failed < 0) {
        return -1;
    }
    read.maximize = maximize;
    ct_optim_groups_borrow(self->core)[g] = read;
    return 0;
}

int
optim_read_groups(OptimEngine *self, PyObject *groups)
{
    size_t n = (size_t)PyList_GET_SIZE(groups);
    for (size_t g = 0; g < n; g++) {
        if ((size_t)PyList_GET_SIZE(groups) != n) {
            PyErr_SetString(PyExc_RuntimeError,
                            "param_groups changed while being read");
            return -1;
        }
        PyObject *group = Py_NewRef(PyList_GET_ITEM(groups, (Py_ssize_t)g));
        int failed = read_group(self, group, g);
        Py_DECREF(group);
        if (failed < 0) {
            return -1;
        }
    }
    return 0;
}
