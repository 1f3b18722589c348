/* FairseqTrainer: forward and backward of the samples of one update. */
#include "binding/fairseq/trainer.h"

int
fairseq_ema_model(PyObject *op, PyObject **model)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int uses, failed;
    *model = NULL;
    if (!((FairseqTrainer *)op)->settings.store_ema) {
        return 0;
    }
    PyObject *task = PyObject_GetAttr(op, names->str_task);
    PyObject *wish =
        task == NULL ? NULL : ctpy_get_optional(task, names->str_uses_ema, &failed);
    failed = task == NULL || failed;
    Py_XDECREF(task);
    uses = wish == NULL ? 0 : PyObject_IsTrue(wish);
    Py_XDECREF(wish);
    if (failed || uses < 1) {
        return failed || uses < 0 ? -1 : 0;
    }
    PyObject *average = PyObject_GetAttr(op, names->str_ema);
    *model = average == NULL ? NULL
                             : PyObject_CallMethodNoArgs(average, names->str_get_model);
    Py_XDECREF(average);
    return *model == NULL ? -1 : 0;
}

/* args[0] to args[5]: task, then what stays the same for the keywords; new references.
 * The sample and ignore_grad are the caller's. */
static int
step_arguments(PyObject *op, PyObject **args)
{
    ctpy_state *names = ctpy_state_borrow(op);
    args[0] = PyObject_GetAttr(op, names->str_task);
    args[2] = PyObject_GetAttr(op, names->str_model);
    args[3] = PyObject_GetAttr(op, names->str_criterion);
    args[4] = PyObject_GetAttr(op, names->str_optimizer);
    args[5] = PyObject_CallMethodNoArgs(op, names->str_get_num_updates);
    return args[0] && args[2] && args[3] && args[4] && args[5] ? 0 : -1;
}

static int
check_step_result(PyObject *result)
{
    if (PyTuple_Check(result) && PyTuple_GET_SIZE(result) == 3) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError,
                 "task.train_step() returned a %.100s; expected a tuple of (loss, "
                 "sample_size, logging_output)",
                 Py_TYPE(result)->tp_name);
    return -1;
}

PyObject *
fairseq_task_step(PyObject *op, fairseq_update *u, PyObject *sample,
                  PyObject *ignore_grad)
{
    PyObject *args[8] = {0}, *result = NULL;
    const Py_ssize_t n = u->ema_model == NULL ? 6 : 7;
    PyObject *keywords = PyTuple_GetSlice(((FairseqTrainer *)op)->step_keywords, 0, n);
    if (keywords != NULL && step_arguments(op, args) == 0) {
        args[1] = Py_NewRef(sample);
        args[6] = Py_NewRef(ignore_grad);
        args[7] = Py_XNewRef(u->ema_model);
        result = PyObject_VectorcallMethod(ctpy_state_borrow(op)->str_train_step, args,
                                           1, keywords);
    }
    for (int i = 0; i < 8; i++) {
        Py_XDECREF(args[i]);
    }
    Py_XDECREF(keywords);
    if (result != NULL && check_step_result(result) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

/* Adds up what task.train_step() returned. A dummy counts for nothing, unless the
 * original's arithmetic is wanted. */
static int
book(PyObject *op, fairseq_update *u, PyObject *result)
{
    const bool original = ((FairseqTrainer *)op)->settings.original_dummies;
    PyObject *output = PyTuple_GET_ITEM(result, 2);
    if (u->last_is_dummy && !original) {
        return PyList_Append(u->dummies, output);
    }
    PyObject *sum = PyNumber_Add(u->sample_size, PyTuple_GET_ITEM(result, 1));
    if (sum == NULL) {
        return -1;
    }
    Py_SETREF(u->sample_size, sum);
    return PyList_Append(u->outputs, output);
}

static int
forget_sums(fairseq_update *u)
{
    Py_XSETREF(u->sample_size, PyLong_FromLong(0));
    return u->sample_size == NULL ||
                   PyList_SetSlice(u->outputs, 0, PY_SSIZE_T_MAX, NULL) < 0 ||
                   PyList_SetSlice(u->dummies, 0, PY_SSIZE_T_MAX, NULL) < 0
               ? -1
               : 0;
}

/* May the gradients hold a part of the sample that failed? Unless its optimizer says
 * that no backward pass had begun, yes. */
static int
spoiled(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *optimizer = PyObject_GetAttr(op, names->str_optimizer);
    int failed = optimizer == NULL;
    PyObject *said =
        failed ? NULL : ctpy_get_optional(optimizer, names->str_in_backward, &failed);
    int answer = said == NULL ? 1 : PyObject_IsTrue(said);
    Py_XDECREF(said);
    Py_XDECREF(optimizer);
    return failed ? -1 : answer;
}

/* Drops the sample that ran out of memory, and those before it where its backward pass
 * had begun: what is in the gradients must agree with the sums. */
static int
recover(PyObject *op, fairseq_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    fairseq_report(op, names->str__log_oom, NULL, 0);
    PyErr_Clear(); /* and with the traceback the tensors that it holds */
    u->ooms++;
    int spoilt = spoiled(op);
    if (spoilt < 0 ||
        fairseq_tell(op, "warning",
                     "attempting to recover from OOM in forward/backward pass") < 0 ||
        (spoilt && (fairseq_do(op, names->str_zero_grad) < 0 || forget_sums(u) < 0))) {
        return -1;
    }
    return ((FairseqTrainer *)op)->settings.cuda
               ? fairseq_do(op, names->str__empty_cache)
               : 0;
}

static bool
is_last(const fairseq_update *u)
{
    return u->place == PyList_GET_SIZE(u->samples) - 1;
}

/* task.train_step() of a sample, where ranks exchange gradients with the last one. */
static PyObject *
step_in_turn(PyObject *op, fairseq_update *u, PyObject *prepared, PyObject *dummy)
{
    PyObject *context = NULL, *result;
    if (((FairseqTrainer *)op)->settings.world_size == 1 || is_last(u)) {
        return fairseq_task_step(op, u, prepared, dummy);
    }
    if (fairseq_no_sync(op, &context) < 0) {
        return NULL;
    }
    result = fairseq_task_step(op, u, prepared, dummy);
    if (context != NULL && fairseq_leave(op, context) < 0) {
        Py_CLEAR(result);
    }
    Py_XDECREF(context);
    return result;
}

/* Prepares a sample, runs it and adds it up. */
static int
run_prepared(PyObject *op, fairseq_update *u, PyObject *sample)
{
    PyObject *prepared;
    int dummy;
    if (fairseq_prepare(op, sample, &prepared, &dummy) < 0) {
        return -1;
    }
    u->last_is_dummy = dummy;
    PyObject *result = step_in_turn(op, u, prepared, dummy ? Py_True : Py_False);
    int failed = result == NULL ? -1 : book(op, u, result);
    Py_XDECREF(result);
    Py_DECREF(prepared);
    return failed;
}

/* May the update go on without the sample that ran out of memory? Not once its
 * backward pass has begun an exchange that other ranks are in. */
static int
recoverable(PyObject *op, const fairseq_update *u)
{
    PyObject *type, *value, *trace;
    if (u->raise_oom || !fairseq_is_oom()) {
        return false;
    }
    if (!is_last(u) || ((FairseqTrainer *)op)->settings.bmuf) {
        return true;
    }
    PyErr_Fetch(&type, &value, &trace);
    int early = fairseq_exchanges_early(op);
    int spoilt = early == 1 ? spoiled(op) : early;
    PyErr_Restore(type, value, trace);
    return spoilt == 0;
}

/* A sample; where it runs out of memory the others go on, and a dummy takes its place
 * in the exchange of gradients that other ranks wait in, or in BMUF's update, which has
 * to be made for the ranks to meet. */
static int
run_sample(PyObject *op, fairseq_update *u, PyObject *sample)
{
    if (run_prepared(op, u, sample) == 0) {
        return 0;
    }
    if (!recoverable(op, u) || recover(op, u) < 0) {
        return -1;
    }
    int early = is_last(u) ? fairseq_exchanges_early(op) : 0;
    return early == 1 ? run_prepared(op, u, Py_None) : early;
}

/* The sum of sample sizes as a float, or a tensor of floats. */
static int
finish_sample_size(PyObject *op, fairseq_update *u)
{
    PyObject *made = u->sample_size, *convert = NULL;
    if (u->last_is_dummy && ((FairseqTrainer *)op)->settings.original_dummies) {
        PyObject *zero = PyFloat_FromDouble(0.0);
        made = zero == NULL ? NULL : PyNumber_Multiply(u->sample_size, zero);
        Py_XDECREF(zero);
        if (made == NULL) {
            return -1;
        }
        Py_SETREF(u->sample_size, made);
    }
    if (ctpy_lookup(made, ctpy_state_borrow(op)->str_float, &convert) < 0) {
        return -1;
    }
    made = convert == NULL ? PyNumber_Float(made) : PyObject_CallNoArgs(convert);
    Py_XDECREF(convert);
    if (made != NULL) {
        Py_SETREF(u->sample_size, made);
    }
    return made == NULL ? -1 : 0;
}

int
fairseq_run_samples(PyObject *op, fairseq_update *u)
{
    const Py_ssize_t n = PyList_GET_SIZE(u->samples);
    for (u->place = 0; u->place < n; u->place++) {
        PyObject *sample = Py_NewRef(PyList_GET_ITEM(u->samples, u->place));
        int failed = run_sample(op, u, sample);
        Py_DECREF(sample);
        if (failed < 0) {
            return -1;
        }
    }
    u->place = -1;
    if (finish_sample_size(op, u) < 0 || fairseq_sync_update(op, u) < 0 ||
        (u->ooms > 0 && fairseq_metric(op, "log_scalar_sum", "(sLi)", "oom",
                                       (long long)u->ooms, 600) < 0)) {
        return -1;
    }
    const fairseq_settings *s = &((FairseqTrainer *)op)->settings;
    const bool apart = s->bmuf && s->world_size > 1; /* others count on this update */
    return u->ooms == 0 || u->real > 0 || apart;
}
