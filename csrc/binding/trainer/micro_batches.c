/* The micro-batches of an update: forward and backward passes, losses, and parts of
 * micro-batches where memory does not suffice.
 *
 * With args.auto_find_batch_size a micro-batch that runs out of memory is trained on in
 * parts of fewer rows, like all later micro-batches. A failure in the forward pass
 * repeats the part; a failure in the backward pass, after some gradients have been
 * added, repeats the update. */
#include "binding/runtime/buffer.h"
#include "binding/trainer/trainer.h"

/* ---- the sum of losses ------------------------------------------------------------
 */

/* Reads a loss in host memory, a tensor or array of one element. 1 when *value is set,
 * 0 for a loss on a device, -1 with an exception. */
static int
host_scalar(ctpy_state *names, PyObject *loss, double *value)
{
    ct_span span;
    if (PyFloat_Check(loss)) {
        *value = PyFloat_AS_DOUBLE(loss);
        return 1;
    }
    if (ctpy_span_from(names, loss, "loss", 0, &span) < 0) {
        return ctpy_forgive() ? 0 : -1;
    }
    if (span.n != 1) {
        PyErr_Format(
            PyExc_ValueError,
            "the loss must be a scalar, got %zu elements; take its mean or sum "
            "in compute_loss",
            span.n);
        return -1;
    }
    if (span.dtype == CT_F32) {
        *value = *(const float *)span.data;
        return 1;
    }
    if (span.dtype == CT_F64) {
        *value = *(const double *)span.data;
        return 1;
    }
    return 0;
}

/* Reads the loss of a micro-batch in host memory. A loss on a device is added to
 * device_loss, and *value is 0. */
static int
read_loss(PyObject *op, PyObject *loss, double *value)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    const int found = host_scalar(names, loss, value);
    if (found != 0) {
        return found < 0 ? -1 : 0;
    }
    /* On a device: summed there, so that nothing waits for it until a log is due. */
    PyObject *had = self->device_loss == NULL ? Py_None : self->device_loss;
    PyObject *stack[] = {Py_NewRef(had), loss};
    PyObject *sum = ctpy_ask_adapter(op, names->str_add_device_loss, stack, 2);
    Py_DECREF(had);
    *value = 0.0;
    if (sum == NULL) {
        return -1;
    }
    Py_XSETREF(self->device_loss, sum);
    return 0;
}

/* ---- micro-batches --------------------------------------------------------------- */

/* On several ranks: enters model.no_sync(), by which gradients are exchanged after the
 * last micro-batch of an update only. *context is NULL for a model without no_sync(),
 * or if the arguments ask for an exchange after each micro-batch. */
static int
enter_no_sync(PyObject *op, PyObject *model, PyObject **context)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const int ranks = ctpy_trainer_world_size(op);
    PyObject *method;
    *context = NULL;
    if (ranks <= 1 || ((Trainer *)op)->syncs_each_batch) {
        return ranks < 0 ? -1 : 0;
    }
    const int has = ctpy_lookup(model, names->str_no_sync, &method);
    if (has <= 0) {
        return has;
    }
    *context =
        ctpy_enter_context_steal(PyObject_CallNoArgs(method), names->str___enter__);
    Py_DECREF(method);
    return *context == NULL ? -1 : 0;
}

int
ctpy_control_flag(PyObject *op, PyObject *name, int *value)
{
    return ctpy_field_bool(op, ctpy_state_borrow(op)->str_control, name, value);
}

int
ctpy_callback_stops(PyObject *op)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    int epoch = 0, training = 0;
    return ctpy_control_flag(op, names->str_should_epoch_stop, &epoch) < 0 ||
                   ctpy_control_flag(op, names->str_should_training_stop, &training) < 0
               ? -1
               : epoch || training;
}

/* Adds the rows of a micro-batch to state.samples_done, for the samples a second. */
static int
count_rows(PyObject *op, ctpy_run *run, PyObject *inputs)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const Py_ssize_t rows = ctpy_batch_size(inputs, names);
    PyObject *state = rows == -2 ? NULL : PyObject_GetAttr(op, names->str_state);
    run->samples += rows < 0 ? 0 : rows; /* -1: not known */
    const int result =
        state == NULL ? -1
                      : ctpy_set_int64(state, names->str_samples_done, run->samples);
    Py_XDECREF(state);
    return result;
}

/* Counts floating-point operations and tokens by transformers' hooks. */
static int
account_batch(PyObject *op, PyObject *inputs)
{
    ctpy_state *names = ctpy_state_borrow(op);
    double flos, had;
    if (ctpy_double_steal(
            PyObject_CallMethodOneArg(op, names->str_floating_point_ops, inputs),
            &flos) < 0 ||
        (flos != 0.0 &&
         (ctpy_get_double(op, names->str_current_flos, &had) < 0 ||
          ctpy_set_double(op, names->str_current_flos, had + flos) < 0))) {
        return -1;
    }
    const int silent = ((Trainer *)op)->counts_tokens
                           ? 0
                           : ctpy_is_default(op, names->str__track_num_input_tokens);
    if (silent != 0) {
        return silent < 0 ? -1 : 0;
    }
    return ctpy_drop_steal(
        PyObject_CallMethodOneArg(op, names->str__track_num_input_tokens, inputs));
}

/* What a forward and backward pass is made with. */
typedef struct micro_batch {
    PyObject *inputs;
    PyObject *count; /* of items in the update, or None */
    double share;    /* in the update's loss */
    bool last;       /* the gradients are exchanged with it */
} micro_batch;

/* Forward and backward; adds the weighted loss to *loss. */
static int
train_on(PyObject *op, ctpy_run *run, const micro_batch *batch, double *loss)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *stack[] = {run->model, batch->inputs, batch->count};
    double value = 0.0;
    int failed = 0;
    PyObject *seen =
        batch->count == Py_None
            ? NULL
            : ctpy_get_optional(batch->count, names->str_was_read, &failed);
    if (seen != NULL) {
        failed = PyObject_SetAttr(batch->count, names->str_was_read, Py_False);
        Py_DECREF(seen);
    }
    PyObject *answer = failed ? NULL
                              : ctpy_call_adapted(op, names->str_training_step, stack,
                                                  2, names->kw_num_items_in_batch);
    if (answer == NULL) {
        return -1;
    }
    const int result = read_loss(op, answer, &value);
    Py_DECREF(answer);
    *loss += value;
    return result;
}

/* train_on(), within no_sync() unless the gradients are exchanged with this batch. */
static int
run_pass(PyObject *op, ctpy_run *run, const micro_batch *batch, double *loss)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *context;
    int result;
    self->batch_weight = batch->share;
    if (batch->last) {
        result = train_on(op, run, batch, loss);
    }
    else if (enter_no_sync(op, run->model, &context) < 0) {
        result = -1;
    }
    else {
        PyObject *done = train_on(op, run, batch, loss) < 0 ? NULL : Py_NewRef(Py_None);
        result = ctpy_drop_steal(
            ctpy_leave_context_steal(context, names->str___exit__, done));
    }
    self->batch_weight = 0.0;
    return result;
}

/* ---- parts of a micro-batch, after running out of memory ---------------------------
 */

/* After an exception in a part. 0: smaller parts are to be tried; 1: the update has to
 * begin anew, since the backward pass has left some gradients; -1, with the exception:
 * not about memory, or the part cannot be divided. */
static int
recover(PyObject *op, const ctpy_run *run, PyObject *before, PyObject *part)
{
    PyObject *error = ctpy_take_exception();
    PyObject *answer =
        ctpy_call_function("ctrainer.trainer.memory", "recover", "(OOOOO)", op,
                           run->model, before, part, error);
    const int again = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    Py_DECREF(error);
    return again;
}

/* The part of a micro-batch from *row on. Sets *row to the first row after the part, or
 * to -1 at the end. */
static int
run_part(PyObject *op, ctpy_run *run, const micro_batch *whole, Py_ssize_t *row,
         double *loss)
{
    micro_batch part = *whole;
    double fraction, sum = 0.0;
    Py_ssize_t next;
    PyObject *before =
        ctpy_call_function("ctrainer.trainer.memory", "before", "(O)", op);
    PyObject *taken = before == NULL
                          ? NULL
                          : ctpy_call_function("ctrainer.trainer.memory", "take_part",
                                               "(OOn)", op, whole->inputs, *row);
    int result =
        taken == NULL || !PyArg_ParseTuple(taken, "Odn", &part.inputs, &fraction, &next)
            ? -1
            : 0;
    if (result == 0) {
        part.share = whole->share * fraction;
        part.last = whole->last && next < 0;
        result = run_pass(op, run, &part, &sum);
        if (result == 0) {
            *loss += sum;
            *row = next;
        }
        else {
            result = recover(op, run, before, part.inputs);
        }
    }
    Py_XDECREF(taken);
    Py_XDECREF(before);
    return result;
}

/* As run_pass(); 1 where the update has to begin anew. */
static int
run_micro_batch(PyObject *op, ctpy_run *run, const micro_batch *batch, double *loss)
{
    Py_ssize_t row = 0;
    int result = 0;
    if (!((Trainer *)op)->splits_batches) {
        return run_pass(op, run, batch, loss);
    }
    while (result == 0 && row >= 0) {
        result = run_part(op, run, batch, &row, loss);
    }
    return result;
}

/* What the micro-batches of an update begin with, to begin anew with it. */
typedef struct beginning {
    PyObject *before; /* NULL where no batch is split */
    PyObject *device_loss;
} beginning;

static int
begin(PyObject *op, beginning *b)
{
    const Trainer *self = (const Trainer *)op;
    *b = (beginning){NULL, Py_XNewRef(self->device_loss)};
    if (self->splits_batches) {
        b->before = ctpy_call_function("ctrainer.trainer.memory", "before", "(O)", op);
    }
    return self->splits_batches && b->before == NULL ? -1 : 0;
}

static int
begin_anew(PyObject *op, const beginning *b, double *loss)
{
    *loss = 0.0;
    Py_XSETREF(((Trainer *)op)->device_loss, Py_XNewRef(b->device_loss));
    return ctpy_drop_steal(
        ctpy_call_function("ctrainer.trainer.memory", "rewind", "(OO)", op, b->before));
}

static void
end(beginning *b)
{
    Py_CLEAR(b->before);
    Py_CLEAR(b->device_loss);
}

/* ---- all of an update ------------------------------------------------------------ */

/* Subclasses of transformers' Trainer read accelerator.sync_gradients, true in the last
 * micro-batch of an update. The accelerator is made at its first use and reads
 * _syncs_gradients then. */
static int
note_sync(PyObject *op, bool last)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *state = NULL;
    PyObject *made = ctpy_field(((Trainer *)op)->accelerator);
    int failed = 0;
    ((Trainer *)op)->syncs_gradients = last;
    if (made != NULL) {
        state = ctpy_get_optional(made, names->str_gradient_state, &failed);
        Py_DECREF(made);
    }
    if (state != NULL) {
        failed = ctpy_drop_steal(PyObject_CallMethodOneArg(
            state, names->str__set_sync_gradients, last ? Py_True : Py_False));
        Py_DECREF(state);
    }
    return failed ? -1 : 0;
}

/* Counts the micro-batch that is done, and calls back; 1 where a callback stops the
 * update before its last micro-batch. */
static int
finish_micro_batch(PyObject *op, ctpy_run *run, PyObject *inputs, bool last)
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (account_batch(op, inputs) < 0) {
        return -1;
    }
    run->micro_step++;
    if (last) {
        return 0;
    }
    if (ctpy_trainer_fire(op, names->str_on_substep_end) < 0) {
        return -1;
    }
    /* On several ranks an update ends whole. */
    return ctpy_trainer_is_alone(op) ? ctpy_callback_stops(op) : 0;
}

int
ctpy_run_micro_batches(PyObject *op, ctpy_run *run, PyObject *batches, PyObject *count,
                       const double *shares, double *loss)
{
    const Py_ssize_t n = PyList_GET_SIZE(batches);
    Py_ssize_t begun = 0, done = 0; /* each is counted once, also if it runs again */
    beginning at;
    int result = begin(op, &at);
    for (Py_ssize_t i = 0; result == 0 && i < n;) {
        PyObject *inputs = Py_NewRef(PyList_GET_ITEM(batches, i));
        const bool last = i + 1 == n;
        const micro_batch batch = {inputs, count, shares[i], last};
        result = note_sync(op, last);
        if (result == 0 && i == begun) {
            begun++;
            result = count_rows(op, run, inputs);
        }
        if (result == 0) {
            result = run_micro_batch(op, run, &batch, loss);
        }
        if (result > 0) {
            result = begin_anew(op, &at, loss);
            i = 0;
        }
        else if (result == 0) {
            if (i == done) {
                done++;
                result = finish_micro_batch(op, run, inputs, last);
            }
            i++;
        }
        Py_DECREF(inputs);
    }
    end(&at);
    return result < 0 ? -1 : result == 0;
}
