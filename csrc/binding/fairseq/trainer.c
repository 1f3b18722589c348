/* ctrainer._C.FairseqTrainer: train_step(), one update of fairseq's Trainer.
 *
 * The file has the forward and backward pass of the samples, the exchange and the use
 * of the gradients, updates that a GPU is still busy with, and the treatment of
 * failures. Settings, sums over ranks, metrics and validation are methods of
 * ctrainer/fairseq/_trainer_step.py, called once an update. All hooks are looked up on
 * the instance, so that overrides win.
 *
 * Invariant: .grad, the sample size and the logging outputs belong to the same samples,
 * also after a sample ran out of memory. An aggregator of the metrics that was entered
 * is left on every path.
 *
 * Source: fairseq, fairseq/trainer.py. */
#include "binding/comm/communicator.h"
#include "binding/engine/parts.h"
#include "binding/fairseq/optimizer.h"
#include "binding/optim/optim.h"
#include "binding/runtime/objects.h"

#include "core/base/alloc.h"
#include "core/comm/comm.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

typedef struct FairseqTrainer {
    PyObject_HEAD
    PyObject *metrics;   /* the module that the task logs into; NULL without settings */
    PyObject *keywords;  /* names of task.train_step's arguments, ema_model last */
    PyObject *parts;     /* of samples without enough memory; NULL: these are dropped */
    PyObject *lazy_norm; /* makes the norm of an enqueued update; NULL: none is */
    PyObject *enqueued_engine; /* of an update whose result is not known; else NULL */
    PyObject *enqueued_norm, *enqueued_samples, *enqueued_start; /* and that update's */
    PyObject *unchecked_norm; /* not yet compared with the norms of other ranks */
    double clip_norm;         /* 0: no clipping */
    long long world_size;     /* ranks of the data-parallel group */
    int amp, bmuf, slowmo, cuda;
    int original_dummies; /* a dummy in the last place voids the whole update */
    int criterion_trains; /* the criterion has parameters */
    int depth;            /* of train_step() within itself, as amp's retries are */
    bool handled;         /* the exception under way has been reported */
} FairseqTrainer;

PyDoc_STRVAR(
    FairseqTrainer_doc,
    "FairseqTrainer(*args, **kwargs)\n--\n\n"
    "fairseq's training step; ctrainer.fairseq.Trainer is its public class.\n"
    "\n"
    "Every method is called by attribute lookup on the instance, so overrides\n"
    "win.");

static PyObject *
FairseqTrainer_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                   PyObject *Py_UNUSED(kw))
{
    PyObject *op = type->tp_alloc(type, 0);
    if (op == NULL) {
        return NULL;
    }
    ctpy_state *s = ctpy_state_borrow(op);
    PyObject *keywords =
        PyTuple_Pack(7, s->str_sample, s->str_model, s->str_criterion, s->str_optimizer,
                     s->str_update_num, s->str_ignore_grad, s->str_ema_model);
    ((FairseqTrainer *)op)->keywords = keywords;
    if (keywords == NULL) {
        Py_CLEAR(op);
    }
    return op;
}

static int
FairseqTrainer_init(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(args),
                    PyObject *Py_UNUSED(kw))
{
    return 0;
}

#define TRAINER_OBJECTS(V)                                                             \
    V(metrics)                                                                         \
    V(keywords)                                                                        \
    V(parts)                                                                           \
    V(lazy_norm)                                                                       \
    V(enqueued_engine)                                                                 \
    V(enqueued_norm)                                                                   \
    V(enqueued_samples)                                                                \
    V(enqueued_start)                                                                  \
    V(unchecked_norm)
CTPY_LIFETIME(FairseqTrainer, TRAINER_OBJECTS)

/* ---- calls of Python ------------------------------------------------------------- */

/* Calls op.name() and drops the result. */
static int
call(PyObject *op, PyObject *name)
{
    return ctpy_drop_steal(PyObject_CallMethodNoArgs(op, name));
}

/* Is a RuntimeError with the text "out of memory" set? The exception stays set. */
static bool
is_oom(void)
{
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        return false;
    }
    PyObject *value = ctpy_take_exception(), *text = PyObject_Str(value);
    const char *utf8 = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    const bool found = utf8 != NULL && strstr(utf8, "out of memory") != NULL;
    Py_XDECREF(text);
    ctpy_set_exception_steal(value);
    return found;
}

/* Calls op.name(error, *more) with the exception that is set, and sets the exception
 * again; an exception of the hook is reported as unraisable. */
static void
report(PyObject *op, PyObject *name, PyObject *const *more, size_t n)
{
    PyObject *value = ctpy_take_exception(), *stack[CTPY_HOOK_MAX_ARGS] = {value};
    assert(n < CTPY_HOOK_MAX_ARGS);
    for (size_t i = 0; i < n; i++) {
        stack[1 + i] = more[i];
    }
    if (ctpy_drop_steal(ctpy_call_hook(op, name, stack, 1 + n)) < 0) {
        PyErr_WriteUnraisable(op);
    }
    ctpy_set_exception_steal(value);
}

/* Leaves a context as after success, also while an exception is set, and keeps the
 * exception: fairseq's aggregators have no `finally`. */
static int
leave_steal(PyObject *op, PyObject *context)
{
    PyObject *stack[] = {context, Py_None, Py_None, Py_None};
    PyObject *failure = PyErr_Occurred() ? ctpy_take_exception() : NULL;
    int result = ctpy_drop_steal(
        PyObject_VectorcallMethod(ctpy_state_borrow(op)->str___exit__, stack, 4, NULL));
    Py_DECREF(context);
    if (failure != NULL) {
        ctpy_set_exception_steal(failure);
    }
    return failure == NULL ? result : -1;
}

/* ---- attributes that are made on first use --------------------------------------- */

static PyObject *
lazily(PyObject *op, PyObject *slot, PyObject *maker, PyObject *part)
{
    PyObject *value = PyObject_GetAttr(op, slot);
    if (value != Py_None) {
        return value;
    }
    Py_DECREF(value);
    if (ctpy_drop_steal(part == NULL
                            ? PyObject_CallMethodNoArgs(op, maker)
                            : PyObject_CallMethodOneArg(op, maker, part)) < 0) {
        return NULL;
    }
    value = PyObject_GetAttr(op, slot);
    if (value == Py_None) {
        PyErr_Format(PyExc_RuntimeError, "%U() of this trainer left %U None", maker,
                     slot);
        Py_CLEAR(value);
    }
    return value;
}

/* op.slot; op.maker(part) fills an empty slot first. */
#define LAZY(name, slot, maker, part)                                                  \
    static PyObject *FairseqTrainer_##name(PyObject *op, void *Py_UNUSED(closure))     \
    {                                                                                  \
        ctpy_state *names = ctpy_state_borrow(op);                                     \
        return lazily(op, names->str_##slot, names->str_##maker, part);                \
    }
LAZY(model, _wrapped_model, _build_part, names->str_model)
LAZY(criterion, _wrapped_criterion, _build_part, names->str_criterion)
LAZY(ema, _ema, _build_part, names->str_ema)
LAZY(optimizer, _optimizer, _build_optimizer, NULL)
LAZY(lr_scheduler, _lr_scheduler, _build_optimizer, NULL)
#undef LAZY

/* ---- settings -------------------------------------------------------------------- */

static const char FairseqTrainer__take_settings_doc[] =
    "_take_settings($self, *, metrics, clip_norm, world_size, amp, bmuf, slowmo,\n"
    "               cuda, original_dummies, criterion_trains, parts,\n"
    "               lazy_norm)\n--\n\n"
    "Set what train_step() needs of the config and the model.\n\n"
    "metrics: the module that the task logs into. world_size: ranks that exchange\n"
    "gradients. original_dummies: a dummy in the last place voids the whole update.\n"
    "parts: a Parts of samples that run out of memory; None: these are dropped.\n"
    "lazy_norm(trainer): makes the norm of an update that a GPU is still busy with,\n"
    "which gets settle(norm); None: the host waits for each norm.";

static PyObject *
FairseqTrainer__take_settings(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"metrics",
                            "clip_norm",
                            "world_size",
                            "amp",
                            "bmuf",
                            "slowmo",
                            "cuda",
                            "original_dummies",
                            "criterion_trains",
                            "parts",
                            "lazy_norm",
                            NULL};
    FairseqTrainer *self = (FairseqTrainer *)op;
    PyObject *metrics, *parts, *lazy_norm;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OdLppppppOO:_take_settings", names,
                                     &metrics, &self->clip_norm, &self->world_size,
                                     &self->amp, &self->bmuf, &self->slowmo,
                                     &self->cuda, &self->original_dummies,
                                     &self->criterion_trains, &parts, &lazy_norm)) {
        return NULL;
    }
    Py_XSETREF(self->metrics, Py_NewRef(metrics));
    Py_XSETREF(self->parts, parts == Py_None ? NULL : Py_NewRef(parts));
    Py_XSETREF(self->lazy_norm, lazy_norm == Py_None ? NULL : Py_NewRef(lazy_norm));
    Py_RETURN_NONE;
}

/* ---- the samples of an update ---------------------------------------------------- */

/* The state of one train_step(), on the stack. */
typedef struct update {
    PyObject *samples;     /* a list */
    PyObject *start;       /* states of the generators before the update */
    PyObject *ema_model;   /* for task.train_step, or None */
    PyObject *outputs;     /* list of the logging outputs of real samples */
    PyObject *dummies;     /* and of dummy ones */
    PyObject *sample_size; /* a number or a tensor */
    PyObject *grad_norm;   /* of clip_grad_norm(), or lazy; or NULL */
    Py_ssize_t place;      /* of the sample under way; -1 outside the samples */
    long ooms;             /* samples dropped for lack of memory */
    bool last_is_dummy, overflow, raise_oom;
    bool part_follows; /* of the same sample */
    bool synced;       /* the sums are over all ranks */
    bool deferred;     /* the optimizer's step() clips, on all ranks */
    bool enqueued;     /* the GPU was left alone with the update */
} update;

static void
update_release(update *u)
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
update_open(update *u, PyObject *samples)
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
    return 0;
}

/* Seeds, clears the gradients and brings the modules into training mode. */
static int
begin(PyObject *op, update *u)
{
    PyObject *pair =
        PyObject_CallMethodNoArgs(op, ctpy_state_borrow(op)->str__begin_step);
    int failed =
        pair == NULL || !PyArg_ParseTuple(pair, "OO", &u->start, &u->ema_model);
    if (!failed) {
        Py_INCREF(u->start);
        Py_INCREF(u->ema_model);
    }
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

static bool
is_last(const update *u)
{
    return !u->part_follows && u->place == PyList_GET_SIZE(u->samples) - 1;
}

/* task.train_step(...) of a sample: the tuple (loss, sample_size, output). */
static PyObject *
task_step(PyObject *op, update *u, PyObject *sample, PyObject *ignore_grad)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *args[] = {PyObject_GetAttr(op, names->str_task),
                        Py_NewRef(sample),
                        PyObject_GetAttr(op, names->str_model),
                        PyObject_GetAttr(op, names->str_criterion),
                        PyObject_GetAttr(op, names->str_optimizer),
                        PyObject_CallMethodNoArgs(op, names->str_get_num_updates),
                        Py_NewRef(ignore_grad),
                        Py_NewRef(u->ema_model)};
    PyObject *keywords = PyTuple_GetSlice(((FairseqTrainer *)op)->keywords, 0,
                                          u->ema_model == Py_None ? 6 : 7);
    PyObject *result = NULL;
    if (args[0] && args[2] && args[3] && args[4] && args[5] && keywords) {
        result = PyObject_VectorcallMethod(names->str_train_step, args, 1, keywords);
    }
    for (int i = 0; i < 8; i++) {
        Py_XDECREF(args[i]);
    }
    Py_XDECREF(keywords);
    if (result != NULL && !(PyTuple_Check(result) && PyTuple_GET_SIZE(result) == 3)) {
        PyErr_Format(PyExc_TypeError,
                     "task.train_step() returned a %.100s; expected a tuple of (loss, "
                     "sample_size, logging_output)",
                     Py_TYPE(result)->tp_name);
        Py_CLEAR(result);
    }
    return result;
}

/* task.train_step() of a sample. Gradients are exchanged with the last sample alone;
 * no_sync() keeps a wrapper such as torch's DDP from an earlier exchange. */
static PyObject *
step_in_turn(PyObject *op, update *u, PyObject *prepared, PyObject *dummy)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *model = NULL, *method = NULL, *context = NULL, *result = NULL;
    int waits = ((FairseqTrainer *)op)->world_size > 1 && !is_last(u);
    if (waits) {
        model = PyObject_GetAttr(op, names->str_model);
        waits = model == NULL ? -1 : ctpy_lookup(model, names->str_no_sync, &method);
        Py_XDECREF(model);
    }
    if (waits > 0) {
        context =
            ctpy_enter_context_steal(PyObject_CallNoArgs(method), names->str___enter__);
        Py_DECREF(method);
        waits = context == NULL ? -1 : 1;
    }
    if (waits >= 0) {
        result = task_step(op, u, prepared, dummy);
    }
    if (context != NULL && leave_steal(op, context) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

/* Adds up the result of task.train_step(). A dummy counts for nothing, unless the
 * original's arithmetic is wanted. */
static int
add_result(PyObject *op, update *u, PyObject *result)
{
    PyObject *output = PyTuple_GET_ITEM(result, 2);
    if (u->last_is_dummy && !((FairseqTrainer *)op)->original_dummies) {
        return PyList_Append(u->dummies, output);
    }
    PyObject *sum = PyNumber_Add(u->sample_size, PyTuple_GET_ITEM(result, 1));
    if (sum == NULL) {
        if (ctpy_forgive()) {
            PyErr_Format(PyExc_TypeError,
                         "task.train_step() returned the sample_size %.100R; expected "
                         "a number, or a tensor of one",
                         PyTuple_GET_ITEM(result, 1));
        }
        return -1;
    }
    Py_SETREF(u->sample_size, sum);
    return PyList_Append(u->outputs, output);
}

/* Prepares and runs a sample, and adds up the result. */
static int
run_prepared(PyObject *op, update *u, PyObject *sample)
{
    PyObject *prepared, *result = NULL;
    int dummy, failed = -1;
    PyObject *pair = PyObject_CallMethodOneArg(
        op, ctpy_state_borrow(op)->str__prepare_sample, sample);
    if (pair == NULL) {
        return -1;
    }
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_Format(PyExc_TypeError,
                     "_prepare_sample() returned %R; expected (sample, is_dummy)",
                     pair);
    }
    else if (PyArg_ParseTuple(pair, "Op", &prepared, &dummy)) {
        u->last_is_dummy = dummy;
        result = step_in_turn(op, u, prepared, dummy ? Py_True : Py_False);
        failed = result == NULL ? -1 : add_result(op, u, result);
    }
    Py_XDECREF(result);
    Py_DECREF(pair);
    return failed;
}

/* Drops the gradients and the sums of the samples before. */
static int
forget_sums(PyObject *op, update *u)
{
    Py_XSETREF(u->sample_size, PyLong_FromLong(0));
    return u->sample_size == NULL ||
                   PyList_SetSlice(u->outputs, 0, PY_SSIZE_T_MAX, NULL) < 0 ||
                   PyList_SetSlice(u->dummies, 0, PY_SSIZE_T_MAX, NULL) < 0
               ? -1
               : call(op, ctpy_state_borrow(op)->str_zero_grad);
}

/* Continues without a sample that ran out of memory, if _handle_oom() permits. After
 * the start of the backward pass the samples before are lost, too, since .grad may hold
 * a part of the sample. A dummy batch joins an exchange in which other ranks wait. */
static int
recover(PyObject *op, update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int lost, others_wait;
    if (u->raise_oom || !is_oom()) {
        return -1;
    }
    PyObject *stack[] = {ctpy_take_exception(), is_last(u) ? Py_True : Py_False};
    PyObject *answer = ctpy_call_hook(op, names->str__handle_oom, stack, 2);
    if (answer == NULL) {
        PyErr_WriteUnraisable(op);
    }
    if (answer == NULL || answer == Py_None) {
        Py_XDECREF(answer);
        ctpy_set_exception_steal(stack[0]);
        return -1;
    }
    int failed = !PyArg_ParseTuple(answer, "pp", &lost, &others_wait);
    Py_DECREF(answer);
    Py_DECREF(stack[0]); /* and the tensors that the traceback holds */
    u->ooms++;
    if (failed || (lost && forget_sums(op, u) < 0) ||
        (((FairseqTrainer *)op)->cuda && call(op, names->str__empty_cache) < 0)) {
        return -1;
    }
    return others_wait ? run_prepared(op, u, Py_None) : 0;
}

/* Replaces the sums by the sums of all ranks. 1: continue; 0: every sample ran out of
 * memory, and there is no update; -1. */
static int
sum_samples(PyObject *op, update *u)
{
    int synced, deferred;
    PyObject *outputs, *size, *ooms = PyLong_FromLong(u->ooms), *sums = NULL;
    if (ooms != NULL) {
        PyObject *stack[] = {u->outputs,     u->dummies,
                             u->sample_size, ooms,
                             u->samples,     u->last_is_dummy ? Py_True : Py_False};
        sums = ctpy_call_hook(op, ctpy_state_borrow(op)->str__sum_samples, stack, 6);
        Py_DECREF(ooms);
    }
    if (sums == NULL || sums == Py_None) {
        Py_XDECREF(sums);
        return sums == NULL ? -1 : 0;
    }
    int failed = !PyArg_ParseTuple(sums, "OOpp", &outputs, &size, &synced, &deferred);
    if (!failed) {
        Py_SETREF(u->outputs, Py_NewRef(outputs));
        Py_SETREF(u->sample_size, Py_NewRef(size));
        u->synced = synced;
        u->deferred = deferred && ((FairseqTrainer *)op)->lazy_norm != NULL;
    }
    Py_DECREF(sums);
    return failed ? -1 : 1;
}

typedef struct part_run {
    PyObject *op;
    update *update;
} part_run;

/* The loss and the sample size of a sample are sums: a part has no weight. */
static int
run_part(void *context, PyObject *part, double Py_UNUSED(weight), bool last)
{
    const part_run *run = context;
    run->update->part_follows = !last;
    const int result = run_prepared(run->op, run->update, part);
    run->update->part_follows = false;
    return result;
}

/* The sample at u->place, whole or in parts; u->place becomes -1 for an update that has
 * to begin anew. */
static int
run_sample(PyObject *op, update *u, PyObject *sample)
{
    PyObject *parts = Py_XNewRef(((FairseqTrainer *)op)->parts);
    part_run run = {op, u};
    int result = parts == NULL ? run_prepared(op, u, sample)
                               : ctpy_parts_run(parts, sample, run_part, &run);
    if (result > 0) {
        u->place = -1;
        u->ooms = 0;
        result = forget_sums(op, u) < 0 ? -1 : ctpy_parts_call(parts, "rewind");
    }
    else if (result < 0) {
        result = recover(op, u);
    }
    Py_XDECREF(parts);
    return result;
}

/* Forward and backward of every sample, and their sums; returns as sum_samples(). */
static int
run_samples(PyObject *op, update *u)
{
    const Py_ssize_t n = PyList_GET_SIZE(u->samples);
    PyObject *parts = Py_XNewRef(((FairseqTrainer *)op)->parts);
    int failed = ctpy_parts_call(parts, "begin") < 0;
    u->place = 0;
    while (!failed && u->place < n) {
        PyObject *sample = Py_NewRef(PyList_GET_ITEM(u->samples, u->place));
        failed = run_sample(op, u, sample) < 0;
        u->place += !failed; /* an error names the place */
        Py_DECREF(sample);
    }
    if (parts != NULL) {
        ctpy_parts_end(parts);
    }
    Py_XDECREF(parts);
    if (failed) {
        return -1;
    }
    u->place = -1;
    return sum_samples(op, u);
}

/* ---- failures -------------------------------------------------------------------- */

/* Calls _report_failure() once for an exception and keeps the exception set. The hook
 * writes crash.pt and searches for the source of numbers that are not finite. */
static void
report_failure(PyObject *op, update *u)
{
    FairseqTrainer *self = (FairseqTrainer *)op;
    if (self->handled || u->samples == NULL ||
        !PyErr_ExceptionMatches(PyExc_Exception)) {
        return;
    }
    self->handled = true;
    PyObject *failure = ctpy_take_exception();
    PyObject *place = u->place < 0 ? Py_NewRef(Py_None) : PyLong_FromSsize_t(u->place);
    PyErr_Clear();
    ctpy_set_exception_steal(failure);
    PyObject *more[] = {u->samples, place == NULL ? Py_None : place,
                        u->start == NULL ? Py_None : u->start,
                        u->enqueued ? Py_True : Py_False};
    report(op, ctpy_state_borrow(op)->str__report_failure, more, 4);
    Py_XDECREF(place);
}

/* ---- an update that a GPU is still busy with --------------------------------------
 *
 * Where no hook reads the norm before the update, the host enqueues norm, clipping and
 * update, and counts the update as made. The result is awaited in the next update,
 * after the forward and backward pass of the next samples, or where the norm is read,
 * before a validation and a checkpoint. Gradients that are not finite are an error
 * then, reported with the samples of the update. Ranks compare norms in the next
 * update, in which all ranks take part. */

static const char FairseqTrainer__can_enqueue_doc[] =
    "_can_enqueue($self, /)\n--\n\n"
    "Whether this rank can leave the next update to a GPU without a wait for its norm.";

static PyObject *
FairseqTrainer__can_enqueue(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const FairseqTrainer *self = (FairseqTrainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *const hooks[] = {names->str_clip_grad_norm, names->str__check_grad_norms,
                               names->str__reduce_and_log_stats};
    int can = self->lazy_norm != NULL;
    for (int i = 0; can > 0 && i < 3; i++) {
        can = ctpy_is_default(op, hooks[i]);
    }
    if (can > 0) {
        PyObject *optimizer = PyObject_GetAttr(op, names->str_optimizer);
        can = optimizer == NULL
                  ? -1
                  : ctpy_fairseq_can_defer(names, optimizer, self->clip_norm);
        Py_XDECREF(optimizer);
    }
    return can < 0 ? NULL : PyBool_FromLong(can);
}

/* Leaves norm and clipping to step(); u->grad_norm becomes known later. */
static int
defer(PyObject *op, PyObject *optimizer, update *u)
{
    const FairseqTrainer *self = (FairseqTrainer *)op;
    u->grad_norm = PyObject_CallOneArg(self->lazy_norm, op);
    return u->grad_norm == NULL
               ? -1
               : ctpy_fairseq_defer(ctpy_state_borrow(op), optimizer, self->clip_norm);
}

/* norm.settle(value) */
static int
settle(PyObject *op, PyObject *norm, double value)
{
    PyObject *number = PyFloat_FromDouble(value);
    PyObject *answer = number == NULL
                           ? NULL
                           : PyObject_CallMethodOneArg(
                                 norm, ctpy_state_borrow(op)->str_settle, number);
    Py_XDECREF(number);
    return ctpy_drop_steal(answer);
}

/* After the optimizer's step. */
static int
leave_enqueued(PyObject *op, PyObject *optimizer, const update *u)
{
    FairseqTrainer *self = (FairseqTrainer *)op;
    PyObject *engine = NULL;
    double norm;
    if (!u->deferred) {
        return 0;
    }
    if (ctpy_fairseq_take_enqueued(optimizer, &engine, &norm) < 0) {
        return -1;
    }
    if (engine == NULL) { /* the host had to measure after all */
        return settle(op, u->grad_norm, norm);
    }
    Py_XSETREF(self->enqueued_engine, engine);
    Py_XSETREF(self->enqueued_norm, Py_NewRef(u->grad_norm));
    Py_XSETREF(self->enqueued_samples, Py_NewRef(u->samples));
    Py_XSETREF(self->enqueued_start, Py_NewRef(u->start));
    return 0;
}

/* self._check_grad_norms(norm), a collective: ranks with different norms have different
 * gradients. */
static int
compare_norms(PyObject *op, PyObject *norm)
{
    return ctpy_drop_steal(PyObject_CallMethodOneArg(
        op, ctpy_state_borrow(op)->str__check_grad_norms, norm));
}

/* The known norm of an enqueued update. together: all ranks make the call. */
static int
judge_enqueued(PyObject *op, const update *u, bool finite, bool together)
{
    FairseqTrainer *self = (FairseqTrainer *)op;
    if (together && compare_norms(op, u->grad_norm) < 0) {
        return -1;
    }
    if (!together && self->world_size > 1) {
        Py_XSETREF(self->unchecked_norm, Py_NewRef(u->grad_norm));
    }
    if (!finite) {
        PyErr_SetString(PyExc_FloatingPointError, "gradients are Nan/Inf");
    }
    return finite ? 0 : -1;
}

/* Waits for the result of the last update, if an engine is enqueued. */
static int
await_update(PyObject *op, bool together)
{
    FairseqTrainer *self = (FairseqTrainer *)op;
    PyObject *engine = self->enqueued_engine;
    ct_step_result result;
    if (engine == NULL) {
        return 0;
    }
    update u = {
        .samples = self->enqueued_samples,
        .start = self->enqueued_start,
        .grad_norm = self->enqueued_norm,
        .place = -1,
        .enqueued = true,
    };
    self->enqueued_engine = self->enqueued_norm = NULL;
    self->enqueued_samples = self->enqueued_start = NULL;
    int failed = ctpy_engine_await(engine, &result) < 0 ||
                 settle(op, u.grad_norm, result.grad_norm) < 0;
    if (!failed && judge_enqueued(op, &u, result.finite, together) < 0) {
        report_failure(op, &u);
        self->handled = self->depth > 0; /* the update under way is not reported */
        failed = true;
    }
    Py_DECREF(engine);
    update_release(&u);
    return failed ? -1 : 0;
}

/* In train_step() of all ranks: also compares a norm that one rank alone has read. */
static int
await_together(PyObject *op)
{
    FairseqTrainer *self = (FairseqTrainer *)op;
    if (await_update(op, true) < 0) {
        return -1;
    }
    PyObject *norm = self->unchecked_norm;
    self->unchecked_norm = NULL;
    const int failed = norm == NULL ? 0 : compare_norms(op, norm);
    Py_XDECREF(norm);
    return failed;
}

static const char FairseqTrainer__await_update_doc[] =
    "_await_update($self, /)\n--\n\n"
    "Wait for the result of the last update where a GPU is still busy with it.\n\n"
    "Raises FloatingPointError where the norm of its gradients is Inf or NaN.";

static PyObject *
FairseqTrainer__await_update(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return await_update(op, false) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- from gradients to parameters ------------------------------------------------ */

/* Adds up the gradients of all ranks for wrappers that leave the sum to the trainer. */
static int
all_reduce(PyObject *op, PyObject *optimizer, PyObject *owner)
{
    PyObject *name = ctpy_state_borrow(op)->str_all_reduce_grads;
    PyObject *module = PyObject_GetAttr(op, owner);
    int failed =
        module == NULL ||
        ctpy_drop_steal(PyObject_CallMethodOneArg(optimizer, name, module)) < 0;
    Py_XDECREF(module);
    return failed ? -1 : 0;
}

/* Multiplies the gradients, means over the ranks, by ranks / sample_size; a sample_size
 * of 0 counts as 1. With BMUF gradients are of one rank, as is the sample size of an
 * update without an exchange. */
static int
normalise(PyObject *op, PyObject *optimizer, const update *u)
{
    const FairseqTrainer *self = (FairseqTrainer *)op;
    const double ranks = u->synced || !self->bmuf ? (double)self->world_size : 1.0;
    PyObject *numerator = PyFloat_FromDouble(ranks), *factor = NULL, *answer = NULL;
    int nonzero = numerator == NULL ? -1 : PyObject_IsTrue(u->sample_size);
    if (nonzero >= 0) {
        factor = nonzero ? PyNumber_TrueDivide(numerator, u->sample_size)
                         : Py_NewRef(numerator);
    }
    if (factor != NULL) {
        answer = PyObject_CallMethodOneArg(
            optimizer, ctpy_state_borrow(op)->str_multiply_grads, factor);
    }
    Py_XDECREF(factor);
    Py_XDECREF(numerator);
    return ctpy_drop_steal(answer);
}

/* Clips and keeps the norm in u; a norm that is not finite is an overflow for amp, and
 * else an error. */
static int
clip(PyObject *op, update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const FairseqTrainer *self = (FairseqTrainer *)op;
    PyObject *limit = PyFloat_FromDouble(self->clip_norm);
    if (limit != NULL) {
        u->grad_norm = PyObject_CallMethodOneArg(op, names->str_clip_grad_norm, limit);
        Py_DECREF(limit);
    }
    if (u->grad_norm == NULL ||
        (!self->slowmo && !self->bmuf && compare_norms(op, u->grad_norm) < 0)) {
        return -1;
    }
    const double norm = PyFloat_AsDouble(u->grad_norm);
    if (norm == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    u->overflow = !isfinite(norm);
    if (u->overflow && !self->amp) {
        PyErr_SetString(PyExc_FloatingPointError, "gradients are Nan/Inf");
        return -1;
    }
    return 0;
}

static int
optimizer_step(PyObject *op, PyObject *optimizer)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *task = PyObject_GetAttr(op, names->str_task), *answer = NULL;
    PyObject *model = PyObject_GetAttr(op, names->str_model);
    PyObject *updates = PyObject_CallMethodNoArgs(op, names->str_get_num_updates);
    PyObject *keywords = PyTuple_Pack(2, names->str_model, names->str_update_num);
    if (task != NULL && model != NULL && updates != NULL && keywords != NULL) {
        PyObject *stack[] = {task, optimizer, model, updates};
        answer =
            PyObject_VectorcallMethod(names->str_optimizer_step, stack, 2, keywords);
    }
    Py_XDECREF(keywords);
    Py_XDECREF(updates);
    Py_XDECREF(model);
    Py_XDECREF(task);
    return ctpy_drop_steal(answer);
}

static int
use_gradients(PyObject *op, update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (await_together(op) < 0) {
        return -1;
    }
    PyObject *optimizer = PyObject_GetAttr(op, names->str_optimizer);
    int failed = optimizer == NULL || all_reduce(op, optimizer, names->str_model) < 0 ||
                 (((FairseqTrainer *)op)->criterion_trains &&
                  all_reduce(op, optimizer, names->str_criterion) < 0) ||
                 normalise(op, optimizer, u) < 0;
    failed = failed || (u->deferred ? defer(op, optimizer, u) : clip(op, u)) < 0 ||
             optimizer_step(op, optimizer) < 0 || leave_enqueued(op, optimizer, u) < 0;
    Py_XDECREF(optimizer);
    return failed ? -1 : 0;
}

/* _on_overflow(error), error being None for amp: 1: the samples are to be run again,
 * with a smaller scale; 0: continue without an update; -1. */
static int
on_overflow(PyObject *op, PyObject *error)
{
    PyObject *again =
        PyObject_CallMethodOneArg(op, ctpy_state_borrow(op)->str__on_overflow, error);
    int answer = again == NULL ? -1 : PyObject_IsTrue(again);
    Py_XDECREF(again);
    return answer;
}

/* The update itself. 1: done, u->overflow says how; 0: *repeated is the result of the
 * repetition that amp asked for; -1. */
static int
run_update(PyObject *op, update *u, PyObject **repeated)
{
    const FairseqTrainer *self = (FairseqTrainer *)op;
    ctpy_state *names = ctpy_state_borrow(op);
    if (use_gradients(op, u) == 0) {
        /* Ranks with models of their own count on every update of this rank. */
        const bool local_steps = self->world_size > 1 && (self->bmuf || self->slowmo);
        int again = u->overflow && !local_steps ? on_overflow(op, Py_None) : 0;
        if (again == 1) {
            PyObject *stack[] = {u->samples, u->raise_oom ? Py_True : Py_False};
            *repeated = ctpy_call_hook(op, names->str_train_step, stack, 2);
        }
        return again == 1 && *repeated != NULL ? 0 : again == 0 ? 1 : -1;
    }
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyObject *error = ctpy_take_exception(); /* the scaler's: nothing was updated */
        u->overflow = true;
        int failed = on_overflow(op, error) < 0;
        Py_DECREF(error);
        return failed ? -1 : 1;
    }
    if (is_oom()) {
        PyObject *stack[] = {Py_True};
        report(op, names->str__log_oom, stack, 1);
    }
    return -1;
}

/* ---- train_step() ---------------------------------------------------------------- */

/* The logging output, or None without an update. */
static PyObject *
run(PyObject *op, update *u)
{
    PyObject *repeated = NULL;
    int done = begin(op, u) < 0 ? -1 : run_samples(op, u);
    if (done < 1) {
        return done < 0 ? NULL : Py_NewRef(Py_None);
    }
    done = run_update(op, u, &repeated);
    if (done < 1) {
        return repeated;
    }
    PyObject *stack[] = {u->outputs, u->sample_size,
                         u->grad_norm == NULL ? Py_None : u->grad_norm,
                         u->overflow ? Py_True : Py_False};
    return ctpy_call_hook(op, ctpy_state_borrow(op)->str__finish_update, stack, 4);
}

static const char FairseqTrainer_train_step_doc[] =
    "train_step($self, samples, raise_oom=False)\n--\n\n"
    "Do forward and backward of each of samples, and one update of the parameters.\n"
    "\n"
    "Returns the logging output, a dict; None where the update was not made, after an\n"
    "overflow or with no memory for any sample. A sample that runs out of memory is\n"
    "dropped and counted as 'oom', unless raise_oom. Any exception leaves crash.pt in\n"
    "cfg.checkpoint.save_dir, for `ctrainer replay`.\n"
    "\n"
    "Raises FloatingPointError where the norm of the gradients is Inf or NaN; a "
    "second\n"
    "run of the samples says which module and tensor was the first.";

static PyObject *
FairseqTrainer_train_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"samples", "raise_oom", NULL};
    FairseqTrainer *self = (FairseqTrainer *)op;
    update u = {0};
    PyObject *samples, *output = NULL;
    int raise_oom = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:train_step", names, &samples,
                                     &raise_oom)) {
        return NULL;
    }
    if (self->metrics == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "__init__ of this trainer was not called");
        return NULL;
    }
    PyObject *context = ctpy_enter_context_steal(
        PyObject_CallMethod(self->metrics, "aggregate", "s", "train"),
        ctpy_state_borrow(op)->str___enter__);
    if (context == NULL) {
        return NULL;
    }
    u.raise_oom = raise_oom;
    self->depth++;
    if (update_open(&u, samples) == 0) {
        output = run(op, &u);
    }
    if (output == NULL) {
        report_failure(op, &u);
    }
    self->depth--;
    self->handled = self->handled && self->depth > 0;
    update_release(&u);
    if (leave_steal(op, context) < 0) {
        Py_CLEAR(output);
    }
    return output;
}

static PyGetSetDef FairseqTrainer_getset[] = {
    {"criterion",    FairseqTrainer_criterion,    NULL,
     "The criterion, wrapped for the distributed backend where it needs that.",               NULL},
    {"ema",          FairseqTrainer_ema,          NULL, "The average of the weights.",        NULL},
    {"lr_scheduler", FairseqTrainer_lr_scheduler, NULL, "The learning-rate schedule.",
     NULL                                                                                         },
    {"model",        FairseqTrainer_model,        NULL,
     "The model, wrapped for the distributed backend where it needs that.",                   NULL},
    {"optimizer",    FairseqTrainer_optimizer,    NULL, "The optimizer, built on first use.",
     NULL                                                                                         },
    {NULL,           NULL,                        NULL, NULL,                                 NULL},
};

static PyMemberDef FairseqTrainer_members[] = {
    {"_enqueued_engine", T_OBJECT, offsetof(FairseqTrainer, enqueued_engine), READONLY,
     "Of the update that a GPU may be busy with, or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef FairseqTrainer_methods[] = {
    {"_can_enqueue",   FairseqTrainer__can_enqueue,                                METH_NOARGS,
     FairseqTrainer__can_enqueue_doc                                                                                             },
    {"_await_update",  FairseqTrainer__await_update,                               METH_NOARGS,
     FairseqTrainer__await_update_doc                                                                                            },
    {"_take_settings", (PyCFunction)(void (*)(void))FairseqTrainer__take_settings,
     METH_VARARGS | METH_KEYWORDS,                                                              FairseqTrainer__take_settings_doc},
    {"train_step",     (PyCFunction)(void (*)(void))FairseqTrainer_train_step,
     METH_VARARGS | METH_KEYWORDS,                                                              FairseqTrainer_train_step_doc    },
    {NULL,             NULL,                                                       0,           NULL                             },
};

static PyType_Slot FairseqTrainer_slots[] = {
    {Py_tp_doc,      (void *)FairseqTrainer_doc},
    {Py_tp_new,      FairseqTrainer_new        },
    {Py_tp_init,     FairseqTrainer_init       },
    {Py_tp_traverse, FairseqTrainer_traverse   },
    {Py_tp_clear,    FairseqTrainer_clear      },
    {Py_tp_dealloc,  FairseqTrainer_dealloc    },
    {Py_tp_methods,  FairseqTrainer_methods    },
    {Py_tp_getset,   FairseqTrainer_getset     },
    {Py_tp_members,  FairseqTrainer_members    },
    {0,              NULL                      },
};

PyType_Spec FairseqTrainer_spec = {
    .name = "ctrainer._C.FairseqTrainer",
    .basicsize = sizeof(FairseqTrainer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = FairseqTrainer_slots,
};
