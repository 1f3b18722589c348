/* FairseqTrainer.train_step(): one update, and what is left behind when it fails. */
#include "binding/fairseq/trainer.h"

/* {0} is fine. */
static void
fairseq_update_release(fairseq_update *u)
{
    Py_CLEAR(u->samples);
    Py_CLEAR(u->start);
    Py_CLEAR(u->ema_model);
    Py_CLEAR(u->outputs);
    Py_CLEAR(u->dummies);
    Py_CLEAR(u->sample_size);
    Py_CLEAR(u->grad_norm);
}

/* model for the keyword ema_model, NULL where the task takes none. 0 or -1. */
static int
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

static int
update_open(PyObject *op, fairseq_update *u, PyObject *samples)
{
    u->place = -1;
    u->samples = PySequence_List(samples);
    u->outputs = PyList_New(0);
    u->dummies = PyList_New(0);
    u->sample_size = PyLong_FromLong(0);
    if (u->samples == NULL || u->outputs == NULL || u->dummies == NULL ||
        u->sample_size == NULL) {
        return -1;
    }
    if (PyList_GET_SIZE(u->samples) == 0) {
        PyErr_SetString(PyExc_ValueError, "train_step() got no samples; expected the "
                                          "batches of one update");
        return -1;
    }
    return fairseq_ema_model(op, &u->ema_model);
}

/* op.owner.train() */
static int
train_mode(PyObject *op, PyObject *owner)
{
    PyObject *module = PyObject_GetAttr(op, owner);
    PyObject *answer =
        module == NULL
            ? NULL
            : PyObject_CallMethodNoArgs(module, ctpy_state_borrow(op)->str_train);
    Py_XDECREF(module);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static int
begin(PyObject *op, fairseq_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    u->start = PyObject_CallMethodNoArgs(op, names->str__rng_state);
    return u->start == NULL || fairseq_do(op, names->str__set_seed) < 0 ||
                   train_mode(op, names->str_model) < 0 ||
                   train_mode(op, names->str_criterion) < 0 ||
                   fairseq_do(op, names->str_zero_grad) < 0
               ? -1
               : fairseq_metric(op, "log_start_time", "(sii)", "train_wall", 800, 0);
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

/* task.train_step(...) of one sample, whose result is (loss, sample_size, output). */
static PyObject *
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

/* op._prepare_sample(sample) as its two parts; 0 or -1. */
static int
fairseq_prepare(PyObject *op, PyObject *sample, PyObject **prepared, int *dummy)
{
    PyObject *pair = PyObject_CallMethodOneArg(
        op, ctpy_state_borrow(op)->str__prepare_sample, sample);
    if (pair == NULL) {
        return -1;
    }
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_Format(PyExc_TypeError,
                     "_prepare_sample() returned %R; expected (sample, is_dummy)",
                     pair);
        Py_DECREF(pair);
        return -1;
    }
    *prepared = Py_NewRef(PyTuple_GET_ITEM(pair, 0));
    *dummy = PyObject_IsTrue(PyTuple_GET_ITEM(pair, 1));
    Py_DECREF(pair);
    if (*dummy < 0) {
        Py_CLEAR(*prepared);
        return -1;
    }
    return 0;
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

/* The hook _convert_sample(), where this run has something for it to do. */
static PyObject *
convert(PyObject *op, PyObject *sample)
{
    const fairseq_settings *s = &((FairseqTrainer *)op)->settings;
    if (!s->fp16 && !s->bf16 && !s->cuda) {
        return Py_NewRef(sample);
    }
    return PyObject_CallMethodOneArg(op, ctpy_state_borrow(op)->str__convert_sample,
                                     sample);
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

/* binding/fairseq/step.c: forward and backward of every sample. 1: go on; 0: nothing is
 * left, every sample ran out of memory; -1. */
static int
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

/* The logging output, or None where there was no update. */
static PyObject *
run(PyObject *op, fairseq_update *u)
{
    PyObject *again = NULL;
    int done = begin(op, u) < 0 ? -1 : fairseq_run_samples(op, u);
    if (done < 1) {
        return done < 0 ? NULL : Py_NewRef(Py_None);
    }
    done = fairseq_run_update(op, u, &again);
    return done < 1 ? again : fairseq_finish_update(op, u);
}

/* Once for an exception: crash.pt, and for numbers that are not finite a second run
 * that looks for where they come from. The exception stays set. */
static void
report_failure(PyObject *op, fairseq_update *u)
{
    FairseqTrainer *self = (FairseqTrainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    if (self->handled || u->samples == NULL ||
        !PyErr_ExceptionMatches(PyExc_Exception)) {
        return;
    }
    self->handled = true;
    const bool in_update = u->place < 0;
    const bool numeric = PyErr_ExceptionMatches(PyExc_FloatingPointError);
    PyObject *start = u->start == NULL ? Py_None : u->start;
    PyObject *place = Py_BuildValue(in_update ? "" : "n", u->place);
    PyObject *stack[] = {u->samples, place == NULL ? Py_None : place, start};
    fairseq_report(op, names->str__save_crash, stack, 3);
    Py_XDECREF(place);
    if (in_update && numeric) {
        PyObject *more[] = {u->samples, start};
        fairseq_report(op, names->str__find_nonfinite, more, 2);
    }
}

static const char FairseqTrainer_train_step_doc[] =
    "train_step($self, samples, raise_oom=False)\n--\n\n"
    "Do forward and backward of each of samples, and one update of the parameters.\n"
    "\n"
    "Returns the logging output, a dict; None where the update was not made, after an\n"
    "overflow or with no memory for any sample. A sample that runs out of memory is\n"
    "dropped and counted as 'oom', unless raise_oom. Any exception leaves crash.pt in\n"
    "cfg.checkpoint.save_dir, for `python -m ctrainer replay`.\n"
    "\n"
    "Raises FloatingPointError where the norm of the gradients is Inf or NaN; a "
    "second\n"
    "run of the samples says which module and tensor was the first.";

static PyObject *
FairseqTrainer_train_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"samples", "raise_oom", NULL};
    FairseqTrainer *self = (FairseqTrainer *)op;
    fairseq_update u = {0};
    PyObject *samples, *output = NULL;
    int raise_oom = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:train_step", names, &samples,
                                     &raise_oom)) {
        return NULL;
    }
    PyObject *context = fairseq_enter(op, "train", NULL);
    if (context == NULL) {
        return NULL;
    }
    u.raise_oom = raise_oom;
    self->depth++;
    if (update_open(op, &u, samples) == 0) {
        output = run(op, &u);
    }
    if (output == NULL) {
        report_failure(op, &u);
    }
    self->depth--;
    self->handled = self->handled && self->depth > 0;
    fairseq_update_release(&u);
    if (fairseq_leave(op, context) < 0) {
        Py_CLEAR(output);
    }
    Py_DECREF(context);
    return output;
}

/* Forward and backward alone, of every sample, of this rank: others may not repeat. */
static int
repeat(PyObject *op, fairseq_update *u)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(u->samples); i++) {
        PyObject *sample = Py_NewRef(PyList_GET_ITEM(u->samples, i)), *prepared = NULL;
        int dummy, failed = fairseq_prepare(op, sample, &prepared, &dummy) < 0;
        PyObject *result = failed ? NULL : fairseq_task_step(op, u, prepared, Py_False);
        Py_DECREF(sample);
        Py_XDECREF(prepared);
        Py_XDECREF(result);
        if (result == NULL) {
            return -1;
        }
    }
    return 0;
}

static int
repeat_alone(PyObject *op, fairseq_update *u)
{
    PyObject *context = NULL;
    if (((FairseqTrainer *)op)->settings.world_size == 1) {
        return repeat(op, u);
    }
    if (fairseq_no_sync(op, &context) < 0) {
        return -1;
    }
    int failed = repeat(op, u) < 0;
    if (context != NULL && fairseq_leave(op, context) < 0) {
        failed = true;
    }
    Py_XDECREF(context);
    return failed ? -1 : 0;
}

static const char FairseqTrainer__repeat_step_doc[] =
    "_repeat_step($self, samples, /)\n--\n\n"
    "Do forward and backward of samples as train_step() does, and no update: what\n"
    "the look for Inf and NaN and `replay` run.";

static PyObject *
FairseqTrainer__repeat_step(PyObject *op, PyObject *samples)
{
    ctpy_state *names = ctpy_state_borrow(op);
    fairseq_update u = {0};
    int failed = update_open(op, &u, samples) < 0 ||
                 fairseq_do(op, names->str__set_seed) < 0 ||
                 train_mode(op, names->str_model) < 0 ||
                 train_mode(op, names->str_criterion) < 0 ||
                 fairseq_do(op, names->str_zero_grad) < 0 || repeat_alone(op, &u) < 0;
    fairseq_update_release(&u);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* FairseqTrainer: forward and backward of the samples of one update. */

/* FairseqTrainer: a sample before the task sees it, and the dummy in its place. */

static PyObject *
reject_dummy(void)
{
    PyErr_SetString(
        PyExc_Exception,
        "Trying to use an uninitialized 'dummy' batch. This usually indicates that the "
        "total number of batches is smaller than the number of participating GPUs. Try "
        "reducing the batch size or using fewer GPUs.");
    return NULL;
}

/* Is it the word that stands for a dummy batch which is still to be found? */
static bool
is_word(PyObject *sample)
{
    return PyUnicode_Check(sample) &&
           PyUnicode_CompareWithASCIIString(sample, "DUMMY") == 0;
}

/* None or without elements: 1; else 0; -1 with an exception. */
static int
is_empty(PyObject *sample)
{
    const Py_ssize_t length = sample == Py_None ? 0 : PyObject_Size(sample);
    return length < 0 ? -1 : length == 0;
}

/* The dummy batch, prepared. */
static PyObject *
take_dummy(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *dummy = PyObject_GetAttr(op, names->str__dummy_batch), *prepared = NULL;
    int none = dummy == NULL ? -1 : is_empty(dummy);
    if (none == 1) {
        PyErr_Format(PyExc_AssertionError, "Invalid dummy batch: %S", dummy);
    }
    else if (none == 0) {
        PyObject *stack[] = {dummy, Py_True};
        PyObject *pair = ctpy_call_hook(op, names->str__prepare_sample, stack, 2);
        PyObject *first = pair == NULL ? NULL : PySequence_GetItem(pair, 0);
        prepared = first == NULL ? NULL : Py_BuildValue("(OO)", first, Py_True);
        Py_XDECREF(first);
        Py_XDECREF(pair);
    }
    Py_XDECREF(dummy);
    return prepared;
}

static int
remember_dummy(PyObject *op, PyObject *sample)
{
    PyObject *name = ctpy_state_borrow(op)->str__dummy_batch;
    PyObject *dummy = PyObject_GetAttr(op, name);
    int result = dummy == NULL ? -1 : 0;
    if (dummy != NULL && is_word(dummy)) {
        result = PyObject_SetAttr(op, name, sample);
    }
    Py_XDECREF(dummy);
    return result;
}

static const char FairseqTrainer__prepare_sample_doc[] =
    "_prepare_sample($self, sample, is_dummy=False)\n--\n\n"
    "Return (sample in the run's precision and on its device, whether it is a dummy).\n"
    "\n"
    "None or an empty sample is replaced by the dummy batch.";

static PyObject *
FairseqTrainer__prepare_sample(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sample", "is_dummy", NULL};
    PyObject *sample;
    int is_dummy = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:_prepare_sample", names,
                                     &sample, &is_dummy)) {
        return NULL;
    }
    if (is_word(sample)) {
        return reject_dummy();
    }
    int empty = is_empty(sample);
    if (empty != 0) {
        return empty < 0 ? NULL : take_dummy(op);
    }
    PyObject *prepared = convert(op, sample);
    if (prepared == NULL || remember_dummy(op, prepared) < 0) {
        Py_XDECREF(prepared);
        return NULL;
    }
    return Py_BuildValue("(NO)", prepared, Py_False);
}

static const char FairseqTrainer_reset_dummy_batch_doc[] =
    "reset_dummy_batch($self, batch, /)\n--\n\n"
    "Set the batch that stands in for an empty one; 'DUMMY': the first real one.";

static PyObject *
FairseqTrainer_reset_dummy_batch(PyObject *op, PyObject *batch)
{
    return PyObject_SetAttr(op, ctpy_state_borrow(op)->str__dummy_batch, batch) < 0
               ? NULL
               : Py_NewRef(Py_None);
}

/* FairseqTrainer.valid_step(): the loss of one sample in evaluation mode. */

/* op.owner.eval() */
static int
eval_mode(PyObject *op, PyObject *owner)
{
    PyObject *module = PyObject_GetAttr(op, owner);
    PyObject *answer =
        module == NULL
            ? NULL
            : PyObject_CallMethodNoArgs(module, ctpy_state_borrow(op)->str_eval);
    Py_XDECREF(module);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* task.valid_step(sample, model, criterion), a tuple of loss, size and output. */
static PyObject *
task_valid_step(PyObject *op, PyObject *sample)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *task = PyObject_GetAttr(op, names->str_task), *ema = NULL, *result = NULL;
    PyObject *model = PyObject_GetAttr(op, names->str_model);
    PyObject *criterion = PyObject_GetAttr(op, names->str_criterion);
    PyObject *keywords = PyTuple_Pack(1, names->str_ema_model);
    if (task != NULL && model != NULL && criterion != NULL && keywords != NULL &&
        fairseq_ema_model(op, &ema) == 0) {
        PyObject *stack[] = {task, sample, model, criterion, ema};
        result = PyObject_VectorcallMethod(names->str_valid_step, stack, 4,
                                           ema == NULL ? NULL : keywords);
    }
    Py_XDECREF(ema);
    Py_XDECREF(keywords);
    Py_XDECREF(criterion);
    Py_XDECREF(model);
    Py_XDECREF(task);
    if (result != NULL && !(PyTuple_Check(result) && PyTuple_GET_SIZE(result) == 3)) {
        PyErr_Format(PyExc_TypeError,
                     "task.valid_step() returned a %.100s; expected a tuple of (loss, "
                     "sample_size, logging_output)",
                     Py_TYPE(result)->tp_name);
        Py_CLEAR(result);
    }
    return result;
}

/* Out of memory: the gradients are given up, and the sample is tried once more. */
static PyObject *
try_again(PyObject *op, PyObject *sample)
{
    ctpy_state *names = ctpy_state_borrow(op);
    fairseq_report(op, names->str__log_oom, NULL, 0);
    PyErr_Clear();
    PyObject *model = PyObject_GetAttr(op, names->str_model);
    PyObject *answer =
        model == NULL ? NULL : PyObject_CallMethodNoArgs(model, names->str_zero_grad);
    Py_XDECREF(model);
    Py_XDECREF(answer);
    if (answer == NULL ||
        fairseq_tell(op, "warning",
                     "ran out of memory in validation step, retrying batch") < 0 ||
        (((FairseqTrainer *)op)->settings.cuda &&
         fairseq_do(op, names->str__empty_cache) < 0)) {
        return NULL;
    }
    PyObject *stack[] = {sample, Py_True};
    return ctpy_call_hook(op, names->str_valid_step, stack, 2);
}

static PyObject *
reduce(PyObject *op, PyObject *result, int dummy)
{
    PyObject *size = Py_NewRef(PyTuple_GET_ITEM(result, 1)), *made = NULL;
    if (dummy) {
        PyObject *zero = PyFloat_FromDouble(0.0);
        Py_SETREF(size, zero == NULL ? NULL : PyNumber_Multiply(size, zero));
        Py_XDECREF(zero);
    }
    PyObject *outputs = Py_BuildValue("[O]", PyTuple_GET_ITEM(result, 2));
    if (size != NULL && outputs != NULL &&
        fairseq_sync_valid(op, &outputs, &size, dummy) == 0) {
        PyObject *stack[] = {outputs, size};
        made = ctpy_call_hook(op, ctpy_state_borrow(op)->str__reduce_and_log_stats,
                              stack, 2);
    }
    Py_XDECREF(outputs);
    Py_XDECREF(size);
    return made;
}

/* The part without gradients. *retried: made is the result of a second try. */
static PyObject *
evaluate(PyObject *op, PyObject *sample, bool raise_oom, int *dummy, bool *retried)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *prepared, *made = NULL;
    if (eval_mode(op, names->str_model) < 0 ||
        eval_mode(op, names->str_criterion) < 0 ||
        fairseq_prepare(op, sample, &prepared, dummy) < 0) {
        return NULL;
    }
    made = task_valid_step(op, prepared);
    *retried = made == NULL && !raise_oom && fairseq_is_oom();
    if (*retried) {
        made = try_again(op, prepared);
    }
    Py_DECREF(prepared);
    return made;
}

static PyObject *
valid_step(PyObject *op, PyObject *sample, bool raise_oom)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *made = NULL;
    bool retried = false;
    int dummy = false;
    PyObject *context = PyObject_CallMethodNoArgs(op, names->str__no_grad);
    PyObject *entered = context == NULL
                            ? NULL
                            : PyObject_CallMethodNoArgs(context, names->str___enter__);
    if (entered != NULL) {
        made = evaluate(op, sample, raise_oom, &dummy, &retried);
        if (fairseq_leave(op, context) < 0) {
            Py_CLEAR(made);
        }
    }
    Py_XDECREF(entered);
    Py_XDECREF(context);
    if (made != NULL && !retried) {
        Py_SETREF(made, reduce(op, made, dummy));
    }
    return made;
}

static const char FairseqTrainer_valid_step_doc[] =
    "valid_step($self, sample, raise_oom=False)\n--\n\n"
    "Evaluate one sample and return what was logged of it, a dict.\n"
    "\n"
    "A sample that runs out of memory is tried once more, unless raise_oom.";

static PyObject *
FairseqTrainer_valid_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sample", "raise_oom", NULL};
    PyObject *sample, *output;
    int raise_oom = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:valid_step", names, &sample,
                                     &raise_oom)) {
        return NULL;
    }
    PyObject *context = fairseq_enter(op, "valid", NULL);
    if (context == NULL) {
        return NULL;
    }
    output = valid_step(op, sample, raise_oom);
    if (fairseq_leave(op, context) < 0) {
        Py_CLEAR(output);
    }
    Py_DECREF(context);
    return output;
}

PyMethodDef FairseqTrainer_fairseq_step_methods[] = {
    {"train_step",        (PyCFunction)(void (*)(void))FairseqTrainer_train_step,
     METH_VARARGS | METH_KEYWORDS,                                                             FairseqTrainer_train_step_doc     },
    {"_repeat_step",      FairseqTrainer__repeat_step,                                 METH_O,
     FairseqTrainer__repeat_step_doc                                                                                             },
    {"valid_step",        (PyCFunction)(void (*)(void))FairseqTrainer_valid_step,
     METH_VARARGS | METH_KEYWORDS,                                                             FairseqTrainer_valid_step_doc     },
    {"_prepare_sample",   (PyCFunction)(void (*)(void))FairseqTrainer__prepare_sample,
     METH_VARARGS | METH_KEYWORDS,                                                             FairseqTrainer__prepare_sample_doc},
    {"reset_dummy_batch", FairseqTrainer_reset_dummy_batch,                            METH_O,
     FairseqTrainer_reset_dummy_batch_doc                                                                                        },
    {NULL,                NULL,                                                        0,      NULL                              },
};
