/* Trainer: the micro-batches of one update. */
#include "binding/trainer/trainer_noise.h"
#include "binding/engine/ranks.h"

/* The count of floating-point operations and of tokens, by their hooks. */
static int
account_batch(PyObject *op, PyObject *inputs)
{
    ctpy_state *names = ctpy_state_borrow(op);
    double flos, had;
    int tracked;
    PyObject *answer =
        PyObject_CallMethodOneArg(op, names->str_floating_point_ops, inputs);
    if (answer == NULL) {
        return -1;
    }
    flos = PyFloat_AsDouble(answer);
    Py_DECREF(answer);
    if ((flos == -1.0 && PyErr_Occurred()) ||
        (flos != 0.0 &&
         (ctpy_get_double(op, names->str_current_flos, &had) < 0 ||
          ctpy_set_double(op, names->str_current_flos, had + flos) < 0)) ||
        ctpy_get_bool(op, names->str__counts_tokens, &tracked) < 0) {
        return -1;
    }
    if (tracked) {
        answer =
            PyObject_CallMethodOneArg(op, names->str__track_num_input_tokens, inputs);
        Py_XDECREF(answer);
        return answer == NULL ? -1 : 0;
    }
    return 0;
}

/* Forward and backward of one micro-batch; *loss grows by its share. */
static int
run_micro_batch(PyObject *op, ctpy_run *run, PyObject *inputs, PyObject *count,
                double *loss)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *stack[] = {run->model, inputs, count};
    double value = 0.0;
    int failed = 0;
    if (count != Py_None) {
        PyObject *seen = ctpy_get_optional(count, names->str_was_read, &failed);
        failed = failed || (seen != NULL &&
                            PyObject_SetAttr(count, names->str_was_read, Py_False) < 0);
        Py_XDECREF(seen);
    }
    PyObject *answer = failed ? NULL
                              : ctpy_call_adapted(op, names->str_training_step, stack,
                                                  2, names->kw_num_items_in_batch);
    if (answer == NULL) {
        return -1;
    }
    int result = ctpy_add_loss(op, answer, &value);
    Py_DECREF(answer);
    *loss += value;
    run->micro_step++;
    return result < 0 ? -1 : account_batch(op, inputs);
}

/* Does a callback end the update here? On several ranks all end it whole. */
static int
should_stop(PyObject *op, int *stop)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int epoch = 0, training = 0;
    const int ranks = ctpy_trainer_world_size(op);
    *stop = 0;
    if (ranks != 1) {
        return ranks < 0 ? -1 : 0;
    }
    if (ctpy_field_bool(op, names->str_control, names->str_should_epoch_stop, &epoch) <
            0 ||
        ctpy_field_bool(op, names->str_control, names->str_should_training_stop,
                        &training) < 0) {
        return -1;
    }
    *stop = epoch || training;
    return 0;
}

/* The same, where gradients are exchanged after the last micro-batch alone. */
static int
run_without_exchange(PyObject *op, ctpy_run *run, PyObject *inputs, PyObject *count,
                     double *loss)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *context;
    if (ctpy_enter_no_sync(op, run->model, &context) < 0) {
        return -1;
    }
    PyObject *done =
        run_micro_batch(op, run, inputs, count, loss) < 0 ? NULL : Py_NewRef(Py_None);
    done = ctpy_leave_context_steal(context, names->str___exit__, done);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Subclasses of transformers' Trainer ask accelerator.sync_gradients whether the
 * micro-batch is the update's last. The accelerator is made when it is first asked for,
 * and then reads _syncs_gradients. */
static int
tell_accelerator(PyObject *op, bool last)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *said = last ? Py_True : Py_False, *state = NULL, *answer = NULL;
    int failed = PyObject_SetAttr(op, names->str__syncs_gradients, said) < 0;
    PyObject *made =
        failed ? NULL : ctpy_get_optional(op, names->str__accelerator, &failed);
    if (made != NULL) {
        state = ctpy_get_optional(made, names->str_gradient_state, &failed);
        Py_DECREF(made);
    }
    if (state != NULL) {
        answer = PyObject_CallMethodOneArg(state, names->str__set_sync_gradients, said);
        failed = answer == NULL;
        Py_DECREF(state);
        Py_XDECREF(answer);
    }
    return failed ? -1 : 0;
}

/* All micro-batches; 1 when the update may follow, 0 when a callback stopped before. */
static int
run_micro_batches(PyObject *op, ctpy_run *run, PyObject *batches, PyObject *count,
                  const double *shares, double *loss)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    int stop = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(batches); i++) {
        PyObject *inputs = Py_NewRef(PyList_GET_ITEM(batches, i));
        self->share = shares[i];
        const bool last = i + 1 == PyList_GET_SIZE(batches);
        int result = tell_accelerator(op, last);
        if (result == 0) {
            result = (last ? run_micro_batch : run_without_exchange)(op, run, inputs,
                                                                     count, loss);
        }
        self->share = 0.0;
        Py_DECREF(inputs);
        if (result < 0 || (run->noise_due && ctpy_noise_see(op, shares[i]) < 0)) {
            return -1;
        }
        if (!last && (ctpy_trainer_fire(op, names->str_on_substep_end, NULL) < 0 ||
                      should_stop(op, &stop) < 0)) {
            return -1;
        }
        if (stop) {
            return 0;
        }
    }
    return 1;
}

/* Adds the update's loss to the window, or counts it as bad. */
static int
book_loss(PyObject *op, double loss)
{
    Trainer *self = (Trainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    int filter;
    if (isfinite(loss)) {
        self->window_loss += loss;
        return 0;
    }
    if (ctpy_field_bool(op, names->str_args, names->str_logging_nan_inf_filter,
                        &filter) < 0) {
        return -1;
    }
    if (filter) {
        self->window_bad++;
    }
    else {
        self->window_loss += loss;
    }
    return 0;
}

int
ctpy_run_update(PyObject *op, ctpy_run *run, PyObject *batches, PyObject *count)
{
    ctpy_state *names = ctpy_state_borrow(op);
    size_t n = (size_t)PyList_GET_SIZE(batches);
    double loss = 0.0, *shares = PyMem_New(double, n);
    int result = -1;
    if (shares == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    ((Trainer *)op)->in_update = true;
    if (ctpy_set_int64(op, names->str_current_gradient_accumulation_steps,
                       (int64_t)n) == 0 &&
        ctpy_batch_shares(op, run, batches, shares) == 0 &&
        ctpy_metrics_plan(op, run, batches) == 0 &&
        ctpy_trainer_fire(op, names->str_on_step_begin, NULL) == 0) {
        result = run_micro_batches(op, run, batches, count, shares, &loss);
    }
    PyMem_Free(shares);
    if (result == 1 && (book_loss(op, loss) < 0 || ctpy_finish_update(op, run) < 0)) {
        result = -1;
    }
    return result;
}
