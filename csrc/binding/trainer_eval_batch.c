/* Trainer: the batches of an evaluation, one after the other. */
#include "binding/trainer_eval.h"

static PyObject *
gathered(const ctpy_eval_loop *loop, PyObject *value)
{
    return loop->gather == NULL || value == Py_None
               ? Py_NewRef(value)
               : PyObject_CallOneArg(loop->gather, value);
}

/* prediction_step's answer, checked, since overrides come from anywhere. */
static PyObject *
predict_batch(ctpy_eval_loop *loop, PyObject *inputs, const ctpy_state *names)
{
    PyObject *stack[] = {loop->model, inputs, loop->loss_only, loop->ignore_keys};
    PyObject *answer = ctpy_call_adapted(loop->op, names->str_prediction_step, stack, 3,
                                         names->kw_ignore_keys);
    if (answer != NULL && (!PySequence_Check(answer) || PySequence_Size(answer) != 3)) {
        PyErr_Format(PyExc_TypeError,
                     "prediction_step must return (loss, predictions, labels), got "
                     "%.200R",
                     answer);
        Py_CLEAR(answer);
    }
    if (answer != NULL) {
        Py_SETREF(answer, PySequence_Tuple(answer));
    }
    return answer;
}

/* The predictions as they are kept: preprocessed, gathered. */
static PyObject *
kept_predictions(const ctpy_eval_loop *loop, PyObject *logits, PyObject *labels)
{
    if (logits == Py_None || loop->preprocess == Py_None) {
        return gathered(loop, logits);
    }
    PyObject *stack[] = {NULL, logits, labels};
    PyObject *kept = PyObject_Vectorcall(loop->preprocess, &stack[1],
                                         2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    if (kept != NULL) {
        Py_SETREF(kept, gathered(loop, kept));
    }
    return kept;
}

static PyObject *
kept_inputs(const ctpy_eval_loop *loop, PyObject *inputs, const ctpy_state *names)
{
    if (loop->main_input_name == NULL) {
        return Py_NewRef(Py_None);
    }
    PyObject *value = PyObject_GetItem(inputs, loop->main_input_name);
    if (value != NULL) {
        Py_SETREF(value, PyObject_CallMethodOneArg(loop->op, names->str__prepare_input,
                                                   value));
    }
    if (value != NULL) {
        Py_SETREF(value, gathered(loop, value));
    }
    return value;
}

/* compute_metrics(EvalPrediction(one batch), compute_result=is_last) */
static int
metrics_of_batch(ctpy_eval_loop *loop, const ctpy_eval_batch *batch, PyObject *inputs,
                 int is_last, const ctpy_state *names)
{
    PyObject *losses = Py_NewRef(Py_None), *options = NULL, *prediction = NULL;
    int result = -1;
    if (loop->compute_metrics == Py_None ||
        batch->values[CTPY_EVAL_PREDICTIONS] == Py_None ||
        batch->values[CTPY_EVAL_LABELS] == Py_None) {
        Py_DECREF(losses);
        return 0;
    }
    if (loop->store.keep_losses && batch->loss != Py_None) {
        Py_SETREF(losses, PyObject_CallMethod(batch->loss, "repeat", "n", batch->rows));
    }
    if (losses != NULL) {
        options = Py_BuildValue(
            "{s:O,s:O,s:O,s:O}", "predictions", batch->values[CTPY_EVAL_PREDICTIONS],
            "label_ids", batch->values[CTPY_EVAL_LABELS], "losses", losses, "inputs",
            loop->main_input_name == NULL ? Py_None : inputs);
    }
    if (options != NULL) {
        prediction = ctpy_eval_utility("EvalPrediction", PyTuple_New(0), options);
    }
    if (prediction != NULL) {
        PyObject *stack[] = {prediction, is_last ? Py_True : Py_False};
        Py_XSETREF(loop->metrics, PyObject_Vectorcall(loop->compute_metrics, stack, 1,
                                                      names->kw_compute_result));
        result = loop->metrics == NULL ? -1 : 0;
    }
    Py_XDECREF(prediction);
    Py_XDECREF(options);
    Py_XDECREF(losses);
    return result;
}

/* Targets of the batch for the mean by token; 0 when that is not asked for. */
static int
count_batch(const ctpy_eval_loop *loop, PyObject *inputs, int64_t *targets)
{
    int failed = 0;
    *targets = 0;
    if (!loop->store.by_token) {
        return 0;
    }
    *targets = ctpy_count_targets(loop->op, inputs, &failed);
    if (!failed && *targets < 0) {
        PyErr_SetString(PyExc_ValueError,
                        "eval_loss_by_token needs a batch with 'labels' to count; this "
                        "one has none");
        failed = 1;
    }
    return failed ? -1 : 0;
}

static int
keep_batch(ctpy_eval_loop *loop, const ctpy_eval_batch *batch, PyObject *inputs,
           int is_last, const ctpy_state *names)
{
    ctpy_eval_batch kept = *batch;
    if (loop->by_batch && !loop->is_prediction) {
        for (int kind = 0; kind < CTPY_EVAL_LOSSES; kind++) {
            kept.values[kind] = Py_None;
        }
    }
    if (ctpy_eval_store_add(&loop->store, names, &kept) < 0 ||
        ctpy_trainer_fire(loop->op, names->str_on_prediction_step, NULL) < 0) {
        return -1;
    }
    return loop->by_batch ? metrics_of_batch(loop, batch, inputs, is_last, names) : 0;
}

static int
run_batch(ctpy_eval_loop *loop, PyObject *inputs, int is_last, const ctpy_state *names)
{
    ctpy_eval_batch batch = {.rows = ctpy_batch_size(inputs, names)};
    PyObject *answer = NULL, *kept[CTPY_EVAL_LOSSES] = {NULL};
    int result = -1;
    if (batch.rows == -2 || count_batch(loop, inputs, &batch.targets) < 0) {
        return -1;
    }
    if (batch.rows < 0) {
        batch.rows = loop->default_rows;
    }
    loop->n_rows += batch.rows;
    loop->n_batches++;
    if ((answer = predict_batch(loop, inputs, names)) == NULL) {
        return -1;
    }
    PyObject *logits = PyTuple_GET_ITEM(answer, 1),
             *labels = PyTuple_GET_ITEM(answer, 2);
    if ((kept[0] = kept_predictions(loop, logits, labels)) == NULL ||
        (kept[1] = gathered(loop, labels)) == NULL ||
        (kept[2] = kept_inputs(loop, inputs, names)) == NULL) {
        goto done;
    }
    for (int kind = 0; kind < CTPY_EVAL_LOSSES; kind++) {
        batch.values[kind] = kept[kind];
    }
    batch.loss = PyTuple_GET_ITEM(answer, 0);
    result = keep_batch(loop, &batch, inputs, is_last, names);
done:
    for (int kind = 0; kind < CTPY_EVAL_LOSSES; kind++) {
        Py_XDECREF(kept[kind]);
    }
    Py_DECREF(answer);
    return result;
}

/* Ctrl-C and SIGTERM while training only set a flag. */
static int
check_stop(void)
{
    if (ctpy_stop_requested()) {
        PyErr_SetNone(PyExc_KeyboardInterrupt);
        return -1;
    }
    return 0;
}

/* All batches. Which is the last is known only by asking for one more, and only
 * compute_metrics by batch wants to know. */
int
ctpy_eval_run(ctpy_eval_loop *loop, const ctpy_state *names)
{
    PyObject *iterator = PyObject_GetIter(loop->loader), *inputs, *next = NULL;
    if (iterator == NULL) {
        return -1;
    }
    int result = 0;
    inputs = PyIter_Next(iterator);
    while (result == 0 && inputs != NULL) {
        if (loop->by_batch) {
            next = PyIter_Next(iterator);
            result = PyErr_Occurred() ? -1 : 0;
        }
        if (result == 0 && (result = check_stop()) == 0) {
            result = run_batch(loop, inputs, next == NULL, names);
        }
        Py_DECREF(inputs);
        inputs = loop->by_batch || result < 0 ? next : PyIter_Next(iterator);
        next = NULL;
    }
    Py_XDECREF(inputs);
    Py_DECREF(iterator);
    return result < 0 || PyErr_Occurred() ? -1 : 0;
}
