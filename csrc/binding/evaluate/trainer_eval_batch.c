/* Trainer: the batches of an evaluation, one after the other. */
#include "binding/comm/communicator.h"
#include "binding/evaluate/evaluate.h"

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
    const int kind = ctpy_kind_of(inputs);
    PyObject *value = NULL;
    if (kind == CTPY_MAPPING) {
        value = PyObject_GetItem(inputs, loop->main_input_name);
    }
    else if (kind >= 0) {
        PyErr_Format(PyExc_TypeError,
                     "include_for_metrics has 'inputs', which are the batch's %R, and "
                     "the batch is a %.100s; return dicts from the data_collator, or "
                     "leave 'inputs' out",
                     loop->main_input_name, Py_TYPE(inputs)->tp_name);
    }
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
metrics_of_batch(ctpy_eval_loop *loop, const ctpy_eval_batch *batch, int is_last,
                 const ctpy_state *names)
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
        options = Py_BuildValue("{s:O,s:O,s:O,s:O}", "predictions",
                                batch->values[CTPY_EVAL_PREDICTIONS], "label_ids",
                                batch->values[CTPY_EVAL_LABELS], "losses", losses,
                                "inputs", batch->whole);
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

/* Stores one batch, and lets compute_metrics see it where it sees each alone. */
static int
keep_batch(ctpy_eval_loop *loop, const ctpy_eval_batch *batch, int is_last,
           ctpy_state *names)
{
    ctpy_eval_batch kept = *batch;
    if (loop->by_batch && !loop->is_prediction) {
        for (int kind = 0; kind < CTPY_EVAL_LOSSES; kind++) {
            kept.values[kind] = Py_None;
        }
    }
    if (ctpy_eval_store_add(&loop->store, names, &kept) < 0) {
        return -1;
    }
    return loop->by_batch ? metrics_of_batch(loop, batch, is_last, names) : 0;
}

/* A batch that has run: what is kept of it, owned here. */
typedef struct taken_batch {
    ctpy_eval_batch batch; /* borrowed from below */
    PyObject *answer;      /* of prediction_step */
    PyObject *kept[CTPY_EVAL_LOSSES];
} taken_batch;

static void
taken_fini(taken_batch *taken)
{
    for (int kind = 0; kind < CTPY_EVAL_LOSSES; kind++) {
        Py_CLEAR(taken->kept[kind]);
    }
    Py_CLEAR(taken->answer);
}

/* Runs one batch. Whatever this returns, taken_fini has to follow. */
static int
take_batch(ctpy_eval_loop *loop, PyObject *inputs, taken_batch *taken,
           const ctpy_state *names)
{
    ctpy_eval_batch *batch = &taken->batch;
    *taken = (taken_batch){.batch = {.rows = ctpy_batch_size(inputs, names)}};
    if (batch->rows == -2 || count_batch(loop, inputs, &batch->targets) < 0) {
        return -1;
    }
    batch->rows = batch->rows < 0 ? loop->default_rows : batch->rows;
    loop->n_batches++;
    if ((taken->answer = predict_batch(loop, inputs, names)) == NULL) {
        return -1;
    }
    PyObject *logits = PyTuple_GET_ITEM(taken->answer, 1),
             *labels = PyTuple_GET_ITEM(taken->answer, 2);
    if ((taken->kept[0] = kept_predictions(loop, logits, labels)) == NULL ||
        (taken->kept[1] = gathered(loop, labels)) == NULL ||
        (taken->kept[2] = kept_inputs(loop, inputs, names)) == NULL) {
        return -1;
    }
    for (int kind = 0; kind < CTPY_EVAL_LOSSES; kind++) {
        batch->values[kind] = taken->kept[kind];
    }
    batch->loss = PyTuple_GET_ITEM(taken->answer, 0);
    batch->whole = loop->by_batch && loop->main_input_name != NULL ? inputs : Py_None;
    return 0;
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

static int
run_batch(ctpy_eval_loop *loop, PyObject *inputs, int is_last, ctpy_state *names)
{
    taken_batch taken;
    int result = take_batch(loop, inputs, &taken, names);
    if (result == 0 &&
        (keep_batch(loop, &taken.batch, is_last, names) < 0 ||
         ctpy_trainer_fire(loop->op, names->str_on_prediction_step, NULL) < 0)) {
        result = -1;
    }
    taken_fini(&taken);
    return result;
}

/* All batches of a trainer that is alone. Which is the last is known only by asking for
 * one more, and only compute_metrics by batch wants to know. */
static int
run_alone(ctpy_eval_loop *loop, PyObject *iterator, ctpy_state *names)
{
    PyObject *inputs = PyIter_Next(iterator), *next = NULL;
    int result = 0;
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
    return result < 0 || PyErr_Occurred() ? -1 : 0;
}

/* ---- several ranks -----------------------------------------------------------------
 */

typedef struct batch_visit {
    ctpy_eval_loop *loop;
    ctpy_state *names;
    bool round_is_last;
} batch_visit;

static int
visit_keep(void *context, const ctpy_eval_batch *batch, bool last)
{
    batch_visit *v = context;
    return keep_batch(v->loop, batch, last && v->round_is_last, v->names);
}

/* The batches of this round, of all ranks: by way of the store, which may let them wait
 * on the device, unless compute_metrics is to see each. */
static int
keep_round(ctpy_eval_loop *loop, const ctpy_eval_batch *own, bool is_last,
           ctpy_state *names)
{
    batch_visit context = {loop, names, is_last};
    const int failed = loop->by_batch ? ctpy_eval_share(&loop->ranks, names, own, true,
                                                        visit_keep, &context)
                                      : keep_batch(loop, own, is_last, names);
    return failed < 0
               ? -1
               : ctpy_trainer_fire(loop->op, names->str_on_prediction_step, NULL);
}

/* One round: this rank's batch, or its last one again, which then counts for nothing.
 * *inputs becomes the next batch, NULL when there is none. Returns how many ranks go
 * on, or -1. */
static int
run_round(ctpy_eval_loop *loop, PyObject *iterator, PyObject **inputs, PyObject **spare,
          ctpy_state *names)
{
    taken_batch taken = {0};
    int first, going;
    const bool counts = *inputs != NULL;
    if (counts) {
        Py_XSETREF(*spare, *inputs);
        *inputs = NULL;
    }
    ((Trainer *)loop->op)->spare = !counts;
    if (check_stop() == 0 && take_batch(loop, *spare, &taken, names) == 0) {
        taken.batch.rows = counts ? taken.batch.rows : 0;
        *inputs = counts ? PyIter_Next(iterator) : NULL;
    }
    ((Trainer *)loop->op)->spare = false;
    going = ctpy_eval_meet(&loop->ranks, names, *inputs != NULL, &first);
    if (going >= 0 && keep_round(loop, &taken.batch, going == 0, names) < 0) {
        going = -1;
    }
    taken_fini(&taken);
    return going;
}

static int
run_rounds(ctpy_eval_loop *loop, PyObject *iterator, PyObject **inputs,
           PyObject **spare, ctpy_state *names)
{
    const ct_comm *comm = ctpy_comm_borrow(names, loop->ranks.group);
    int first, going = -1;
    if (comm != NULL) {
        *inputs = PyIter_Next(iterator);
        going = ctpy_eval_meet(&loop->ranks, names, *inputs != NULL, &first);
    }
    if (going > 0 && going < comm->world_size) { /* some have nothing to run at all */
        *spare = ctpy_eval_lend(&loop->ranks, names, *inputs, first);
        going = *spare == NULL ? -1 : going;
    }
    while (going > 0) {
        going = run_round(loop, iterator, inputs, spare, names);
    }
    return going;
}

/* Batches that the ranks run side by side; a failure of one is a failure of all. */
static int
run_together(ctpy_eval_loop *loop, PyObject *iterator, ctpy_state *names)
{
    PyObject *inputs = NULL, *spare = NULL;
    int first;
    int result = run_rounds(loop, iterator, &inputs, &spare, names);
    if (result < 0 && !loop->ranks.told) {
        result = ctpy_eval_meet(&loop->ranks, names, false, &first);
    }
    Py_XDECREF(inputs);
    Py_XDECREF(spare);
    return result;
}

/* The loader's batches: by _evaluation_batches(), which Python's Trainer has. */
static PyObject *
batches_of(const ctpy_eval_loop *loop, const ctpy_state *names)
{
    PyObject *method, *batches = loop->loader;
    const int found = ctpy_lookup(loop->op, names->str__evaluation_batches, &method);
    if (found <= 0) {
        return found < 0 ? NULL : PyObject_GetIter(batches);
    }
    batches = PyObject_CallOneArg(method, loop->loader);
    Py_DECREF(method);
    if (batches == NULL) {
        return NULL;
    }
    PyObject *iterator = PyObject_GetIter(batches);
    Py_DECREF(batches);
    return iterator;
}

int
ctpy_eval_run(ctpy_eval_loop *loop, ctpy_state *names)
{
    PyObject *iterator = batches_of(loop, names);
    if (iterator == NULL) {
        return -1;
    }
    int result = loop->ranks.group == NULL ? run_alone(loop, iterator, names)
                                           : run_together(loop, iterator, names);
    Py_DECREF(iterator);
    return result;
}
