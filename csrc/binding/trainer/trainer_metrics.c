/* Trainer: what the log may tell of gradients besides their norm.
 *
 * Measured in updates after which a log is due, in passes of their own, so that neither
 * the other updates nor what is trained know of it. */
#include "binding/callbacks/ctpy_callbacks.h"
#include "binding/trainer/trainer_noise.h"
#include "binding/trainer/update.h"

#include "math/norm.h"

/* ---- when -------------------------------------------------------------------------
 */

static int
log_follows(PyObject *op, const ctpy_run *run, PyObject *batches, PyObject *args,
            bool *due)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *state = PyObject_GetAttr(op, names->str_state);
    int64_t step;
    int result = -1;
    if (state != NULL && ctpy_get_int64(state, names->str_global_step, &step) == 0) {
        const bool epoch_ends =
            run->micro_step + PyList_GET_SIZE(batches) >= run->steps_in_epoch;
        result = ctpy_flow_log_due(names, args, state, step + 1, epoch_ends, due);
    }
    Py_XDECREF(state);
    return result;
}

int
ctpy_metrics_plan(PyObject *op, ctpy_run *run, PyObject *batches)
{
    ctpy_state *names = ctpy_state_borrow(op);
    bool layers, noise, due = true;
    PyObject *args = PyObject_GetAttr(op, names->str_args);
    Py_CLEAR(((Trainer *)op)->grad_metrics);
    const bool failed =
        args == NULL ||
        ctpy_get_flag(args, names->str_log_layer_grad_norms, &layers) < 0 ||
        ctpy_get_flag(args, names->str_log_grad_noise_scale, &noise) < 0 ||
        ((layers || noise) && log_follows(op, run, batches, args, &due) < 0);
    Py_XDECREF(args);
    run->layer_norms_due = !failed && layers && due;
    run->noise_due = !failed && noise && due && PyList_GET_SIZE(batches) > 1;
    return failed || (run->noise_due && ctpy_noise_begin(op, batches) < 0) ? -1 : 0;
}

/* ---- norms of layers ---------------------------------------------------------------
 */

/* totals[label] grows by sum. */
static int
add_to(PyObject *totals, PyObject *label, ct_norm_kind kind, double sum)
{
    PyObject *had = PyDict_GetItemWithError(totals, label);
    if (had == NULL && PyErr_Occurred()) {
        return -1;
    }
    const double before = had == NULL ? 0.0 : PyFloat_AsDouble(had);
    PyObject *total = PyFloat_FromDouble(ct_norm_merge(kind, before, sum));
    int result = total == NULL ? -1 : PyDict_SetItem(totals, label, total);
    Py_XDECREF(total);
    return result;
}

/* {label: sum}, each parameter's sum under its label, or under its number among those
 * of the optimizer's that have a gradient, where the model does not know it. */
static PyObject *
sums_by_label(PyObject *labels, PyObject *params, const double *sums, ct_norm_kind kind)
{
    PyObject *totals = PyDict_New();
    for (Py_ssize_t i = 0; totals != NULL && i < PyList_GET_SIZE(params); i++) {
        PyObject *label = PyDict_GetItemWithError(labels, PyList_GET_ITEM(params, i));
        label = label != NULL ? Py_NewRef(label)
                : PyErr_Occurred()
                    ? NULL
                    : PyUnicode_FromFormat("parameter %zd of the optimizer", i);
        if (label == NULL || add_to(totals, label, kind, sums[i]) < 0) {
            Py_CLEAR(totals);
        }
        Py_XDECREF(label);
    }
    return totals;
}

/* {"grad_norm/" label: norm} of those sums. */
static PyObject *
norms_of(PyObject *totals, double p, double loss_scale)
{
    Py_ssize_t at = 0;
    PyObject *label, *sum, *norms = PyDict_New();
    while (norms != NULL && PyDict_Next(totals, &at, &label, &sum)) {
        const double norm = ct_norm_root(p, PyFloat_AS_DOUBLE(sum)) / loss_scale;
        PyObject *key = PyUnicode_FromFormat("grad_norm/%S", label);
        PyObject *value = PyFloat_FromDouble(norm);
        if (key == NULL || value == NULL || PyDict_SetItem(norms, key, value) < 0) {
            Py_CLEAR(norms);
        }
        Py_XDECREF(value);
        Py_XDECREF(key);
    }
    return norms;
}

static int
sum_on_host(PyObject *op, const ctpy_update *u, double p, Py_ssize_t n, double *sums)
{
    ctpy_grads grads;
    ct_status status = CT_OK;
    ct_error err;
    if (ctpy_grads_open(ctpy_state_borrow(op), u->optimizer, true, &grads) < 0) {
        return -1;
    }
    if (grads.list.n != (size_t)n) {
        PyErr_SetString(PyExc_RuntimeError, "the gradients changed while being read");
        ctpy_grads_close(&grads);
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_grads_sum_each(&grads.list, NULL, p, sums, &err);
    Py_END_ALLOW_THREADS
    ctpy_grads_close(&grads);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
sum_on_device(PyObject *op, const ctpy_update *u, double p, Py_ssize_t n, double *sums)
{
    PyObject *answer =
        PyObject_CallMethod(op, "_device_layer_norms", "Od", u->optimizer, p);
    PyObject *norms = answer == NULL ? NULL : PySequence_Tuple(answer);
    Py_XDECREF(answer);
    if (norms != NULL && PyTuple_GET_SIZE(norms) != n) {
        PyErr_Format(PyExc_ValueError, "_device_layer_norms() gave %zd norms, not %zd",
                     PyTuple_GET_SIZE(norms), n);
        Py_CLEAR(norms);
    }
    for (Py_ssize_t i = 0; norms != NULL && i < n; i++) {
        const double norm = PyFloat_AsDouble(PyTuple_GET_ITEM(norms, i));
        if (norm == -1.0 && PyErr_Occurred()) {
            Py_CLEAR(norms);
            break;
        }
        sums[i] = ct_norm_add(ct_norm_kind_of(p), p, 0.0, norm);
    }
    Py_XDECREF(norms);
    return norms == NULL ? -1 : 0;
}

/* The metrics of the parameters, or NULL with an exception. */
static PyObject *
layer_norms(PyObject *op, const ctpy_update *u, PyObject *params)
{
    const double p = u->config.clip.norm_type;
    const Py_ssize_t n = PyList_GET_SIZE(params);
    PyObject *totals = NULL, *norms = NULL;
    double *sums = PyMem_New(double, (size_t)n);
    PyObject *labels = PyObject_CallMethod(op, "_parameter_labels", NULL);
    if (sums == NULL) {
        (void)PyErr_NoMemory();
    }
    else if (labels != NULL &&
             (u->on_host ? sum_on_host : sum_on_device)(op, u, p, n, sums) == 0 &&
             ctpy_update_share_sums(op, u, p, sums, (size_t)n) == 0) {
        totals = sums_by_label(labels, params, sums, ct_norm_kind_of(p));
    }
    if (totals != NULL) {
        norms = norms_of(totals, p, u->loss_scale);
    }
    Py_XDECREF(totals);
    Py_XDECREF(labels);
    PyMem_Free(sums);
    return norms;
}

static int
add_layer_norms(PyObject *op, const ctpy_update *u)
{
    PyObject *params = ctpy_grads_params(ctpy_state_borrow(op), u->optimizer);
    PyObject *norms = params == NULL ? NULL : layer_norms(op, u, params);
    Py_XDECREF(params);
    Py_XSETREF(((Trainer *)op)->grad_metrics, norms);
    return norms == NULL ? -1 : 0;
}

/* ---- the noise scale ---------------------------------------------------------------
 */

static int
add_noise_scale(PyObject *op, const ctpy_update *u)
{
    Trainer *self = (Trainer *)op;
    double norm = u->result.grad_norm, scale;
    if (u->config.clip.norm_type != 2.0 && ctpy_update_norm(op, u, &norm) < 0) {
        return -1;
    }
    if (!ctpy_noise_add(op, norm, u->loss_scale, &scale)) {
        return 0;
    }
    if (self->grad_metrics == NULL && (self->grad_metrics = PyDict_New()) == NULL) {
        return -1;
    }
    PyObject *value = PyFloat_FromDouble(scale);
    int result =
        value == NULL
            ? -1
            : PyDict_SetItem(self->grad_metrics,
                             ctpy_state_borrow(op)->str_grad_noise_scale, value);
    Py_XDECREF(value);
    return result;
}

int
ctpy_metrics_measure(PyObject *op, const ctpy_run *run, const ctpy_update *u)
{
    return (run->layer_norms_due && add_layer_norms(op, u) < 0) ||
                   (run->noise_due && add_noise_scale(op, u) < 0)
               ? -1
               : 0;
}
