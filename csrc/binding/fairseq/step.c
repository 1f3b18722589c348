/* FairseqTrainer.train_step(): one update, and what is left behind when it fails. */
#include "binding/fairseq/trainer.h"

void
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

const char FairseqTrainer_train_step_doc[] =
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

PyObject *
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

const char FairseqTrainer__repeat_step_doc[] =
    "_repeat_step($self, samples, /)\n--\n\n"
    "Do forward and backward of samples as train_step() does, and no update: what\n"
    "the look for Inf and NaN and `replay` run.";

PyObject *
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
