/* Trainer: the gradient noise scale, from the micro-batches of updates that are logged.
 *
 * Gradients are summed in place, so what a micro-batch has added is seen by comparing
 * them with a copy. The copy is the metric's cost: memory of one more set of gradients,
 * and three passes for each micro-batch of an update after which a log is due. */
#include "binding/optim/grads.h"
#include "binding/runtime/nested.h"
#include "binding/trainer/trainer_noise.h"

/* Examples in these batches; where a batch does not show how many it has,
 * the number that the arguments ask for. */
static int
count_examples(PyObject *op, PyObject *batches, double *examples)
{
    ctpy_state *names = ctpy_state_borrow(op);
    *examples = 0.0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(batches); i++) {
        int64_t n = (int64_t)ctpy_batch_size(PyList_GET_ITEM(batches, i), names);
        if (n < -1 ||
            (n == -1 && ctpy_get_int64(op, names->str__train_batch_size, &n) < 0)) {
            return -1;
        }
        *examples += (double)n;
    }
    return 0;
}

int
ctpy_noise_begin(PyObject *op, PyObject *batches)
{
    ctpy_noise *noise = &((Trainer *)op)->noise;
    noise->sample = (ct_noise_sample){0};
    Py_CLEAR(noise->device_copies);
    if (noise->probe == NULL && (noise->probe = ct_probe_new()) == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    ct_probe_begin(noise->probe);
    return count_examples(op, batches, &noise->examples);
}

/* ---- one micro-batch ---------------------------------------------------------------
 */

typedef struct visit {
    ct_probe *probe;
    size_t number;
} visit;

static int
set_grad(ctpy_state *state, PyObject *Py_UNUSED(param), PyObject *grad,
         const ctpy_place *place, void *arg)
{
    visit *v = arg;
    const size_t number = v->number++;
    ctpy_view view;
    ct_error err;
    if (Py_IsNone(grad)) {
        return 0;
    }
    if (ctpy_view_of(state, grad, place, &view) < 0) {
        return -1;
    }
    return ct_probe_set(v->probe, number, &view.span, &err) == CT_OK
               ? 0
               : ctpy_raise_int(&err);
}

static int
measure_on_host(PyObject *op, PyObject *optimizer, double *sum_sq)
{
    visit v = {.probe = ((Trainer *)op)->noise.probe};
    ct_status status;
    ct_error err;
    PyObject *owners = ctpy_grads_visit(ctpy_state_borrow(op), optimizer, set_grad, &v);
    if (owners == NULL) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_probe_measure(v.probe, sum_sq, &err);
    Py_END_ALLOW_THREADS
    Py_DECREF(owners);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
measure_on_device(PyObject *op, PyObject *optimizer, double *sum_sq)
{
    ctpy_noise *noise = &((Trainer *)op)->noise;
    PyObject *before = noise->device_copies == NULL ? Py_None : noise->device_copies;
    PyObject *copies;
    PyObject *answer =
        PyObject_CallMethod(op, "_device_grad_growth", "OO", optimizer, before);
    int result = -1;
    if (answer != NULL && PyArg_ParseTuple(answer, "dO", sum_sq, &copies)) {
        Py_XSETREF(noise->device_copies, Py_NewRef(copies));
        result = 0;
    }
    Py_XDECREF(answer);
    return result;
}

int
ctpy_noise_see(PyObject *op, double share)
{
    ctpy_state *names = ctpy_state_borrow(op);
    double sum_sq;
    int on_host, result = -1;
    PyObject *optimizer = PyObject_GetAttr(op, names->str_optimizer);
    if (optimizer != NULL &&
        ctpy_get_bool(op, names->str__inputs_stay, &on_host) == 0) {
        result = on_host ? measure_on_host(op, optimizer, &sum_sq)
                         : measure_on_device(op, optimizer, &sum_sq);
    }
    Py_XDECREF(optimizer);
    if (result == 0) {
        ct_noise_see(&((Trainer *)op)->noise.sample, share, sum_sq);
    }
    return result;
}

/* ---- the update --------------------------------------------------------------------
 */

int
ctpy_noise_add(PyObject *op, double norm, double loss_scale, double *scale)
{
    ctpy_noise *noise = &((Trainer *)op)->noise;
    ct_noise_sample sample = noise->sample;
    sample.small /= loss_scale * loss_scale;
    const bool seen =
        ct_noise_add(&noise->averages, &sample, norm * norm, noise->examples);
    Py_CLEAR(noise->device_copies);
    if (seen) {
        *scale = ct_noise_scale(&noise->averages);
    }
    return seen;
}

void
ctpy_noise_end(PyObject *op)
{
    ctpy_noise *noise = &((Trainer *)op)->noise;
    Py_CLEAR(noise->device_copies);
    ct_probe_free(noise->probe);
    noise->probe = NULL;
}
