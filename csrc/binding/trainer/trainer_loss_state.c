/* Trainer: the sums of losses and averages that a resumed run goes on with. */
#include "binding/trainer/log.h"
#include "binding/engine/ranks.h"

int
ctpy_trainer_mean_loss(PyObject *op, double sum, int64_t n, double *mean)
{
    double values[] = {sum, (double)n};
    if (ctpy_trainer_reduce(op, values, 2, CT_REDUCE_SUM) < 0) {
        return -1;
    }
    *mean = values[1] > 0.0 ? values[0] / values[1] : Py_NAN;
    return 0;
}

const char Trainer__training_loss_doc[] =
    "_training_loss($self, /)\n--\n\n"
    "Return the mean loss of the run's updates so far, those before a resume "
    "included.\n"
    "\n"
    "It is that of all ranks, which all have to call it.";

PyObject *
Trainer__training_loss(PyObject *op, PyObject *Py_UNUSED(unused))
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    int64_t step;
    if (ctpy_drain_device_loss(op) < 0 ||
        ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0) {
        return NULL;
    }
    double mean;
    if (ctpy_trainer_mean_loss(op, self->total_loss + self->window_loss,
                               step - self->total_bad - self->window_bad, &mean) < 0) {
        return NULL;
    }
    return PyFloat_FromDouble(step > 0 ? mean : 0.0);
}

const char Trainer__loss_state_doc[] =
    "_loss_state($self, /)\n--\n\n"
    "Return what a resumed run needs to go on with the same sums: a dict of numbers.";

PyObject *
Trainer__loss_state(PyObject *op, PyObject *Py_UNUSED(unused))
{
    Trainer *self = (Trainer *)op;
    if (ctpy_drain_device_loss(op) < 0) {
        return NULL;
    }
    return Py_BuildValue(
        "{s:d,s:L,s:d,s:L,s:L,s:L,s:L,s:d,s:d,s:d}", "window_loss", self->window_loss,
        "window_bad", (long long)self->window_bad, "total_loss", self->total_loss,
        "total_bad", (long long)self->total_bad, "window_start",
        (long long)self->window_start, "nonfinite_steps",
        (long long)self->nonfinite_steps, "nonfinite_total",
        (long long)self->nonfinite_total, "noise_trace", self->noise.averages.trace,
        "noise_signal", self->noise.averages.signal, "noise_weight",
        self->noise.averages.weight);
}

const char Trainer__set_loss_state_doc[] =
    "_set_loss_state($self, /, *, window_loss=0.0, window_bad=0, total_loss=0.0,\n"
    "                total_bad=0, window_start=0, nonfinite_steps=0,\n"
    "                nonfinite_total=0, noise_trace=0.0, noise_signal=0.0,\n"
    "                noise_weight=0.0)\n--\n\n"
    "Start the sums of losses anew, or from what _loss_state() returned.";

PyObject *
Trainer__set_loss_state(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"window_loss",
                               "window_bad",
                               "total_loss",
                               "total_bad",
                               "window_start",
                               "nonfinite_steps",
                               "nonfinite_total",
                               "noise_trace",
                               "noise_signal",
                               "noise_weight",
                               NULL};
    Trainer *self = (Trainer *)op;
    double window = 0.0, total = 0.0;
    ct_noise noise = {0};
    long long window_bad = 0, total_bad = 0, start = 0, steps = 0, all = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$dLdLLLLddd:_set_loss_state",
                                     keywords, &window, &window_bad, &total, &total_bad,
                                     &start, &steps, &all, &noise.trace, &noise.signal,
                                     &noise.weight)) {
        return NULL;
    }
    self->window_loss = window;
    self->window_bad = window_bad;
    self->total_loss = total;
    self->total_bad = total_bad;
    self->window_start = start;
    self->nonfinite_steps = steps;
    self->nonfinite_total = all;
    self->noise.averages = noise;
    Py_CLEAR(self->device_loss);
    Py_RETURN_NONE;
}
