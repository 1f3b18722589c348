/* Trainer: evaluation_loop, the batches of evaluate and predict. */
#include "binding/callbacks/handler.h"
#include "binding/comm/communicator.h"
#include "binding/evaluate/evaluate.h"

static void
loop_fini(ctpy_eval_loop *loop)
{
    PyObject **fields[] = {&loop->args,      &loop->loader,      &loop->model,
                           &loop->loss_only, &loop->ignore_keys, &loop->main_input_name,
                           &loop->gather,    &loop->preprocess,  &loop->compute_metrics,
                           &loop->metrics,   &loop->uncast};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        Py_CLEAR(*fields[i]);
    }
    Py_CLEAR(loop->ranks.group);
    ctpy_eval_store_fini(&loop->store);
}

/* len(op), or -1 where it has none, and with an exception that cannot be forgiven. */
static Py_ssize_t
length_or_unknown(PyObject *op)
{
    const Py_ssize_t n = PyObject_Size(op);
    (void)(n < 0 && ctpy_forgive());
    return n;
}

static Py_ssize_t
dataset_length(PyObject *loader, const ctpy_state *names)
{
    int failed;
    PyObject *dataset = ctpy_get_optional(loader, names->str_dataset, &failed);
    const Py_ssize_t n = dataset == NULL ? -1 : length_or_unknown(dataset);
    Py_XDECREF(dataset);
    (void)(n < 0 && ctpy_forgive());
    return n;
}

/* "inputs" in args.include_for_metrics: the name of the input that is kept. */
static int
read_main_input(ctpy_eval_loop *loop, const ctpy_state *names)
{
    int failed;
    PyObject *wanted = PyObject_GetAttr(loop->args, names->str_include_for_metrics);
    int keeps = wanted == NULL ? -1 : PySequence_Contains(wanted, names->str_inputs);
    Py_XDECREF(wanted);
    if (keeps <= 0) {
        return keeps;
    }
    PyObject *model = PyObject_GetAttr(loop->op, names->str_model);
    if (model == NULL) {
        return -1;
    }
    loop->main_input_name =
        ctpy_get_optional(model, names->str_main_input_name, &failed);
    Py_DECREF(model);
    if (loop->main_input_name == NULL && !failed) {
        loop->main_input_name = Py_NewRef(names->str_input_ids);
    }
    return failed ? -1 : 0;
}

/* A gather_function that somebody has set on this trainer; ours goes with the store. */
static int
read_gather(ctpy_eval_loop *loop, const ctpy_state *names)
{
    PyObject *fields = PyObject_GenericGetDict(loop->op, NULL);
    PyObject *found = fields == NULL
                          ? NULL
                          : PyDict_GetItemWithError(fields, names->str_gather_function);
    loop->gather = found == NULL || found == Py_None ? NULL : Py_NewRef(found);
    loop->ranks.gathered = loop->gather != NULL;
    Py_XDECREF(fields);
    return PyErr_Occurred() ? -1 : 0;
}

static int
read_settings(ctpy_eval_loop *loop, PyObject *loss_only, const ctpy_state *names)
{
    int64_t rows;
    if ((loop->args = PyObject_GetAttr(loop->op, names->str_args)) == NULL) {
        return -1;
    }
    loop->loss_only =
        loss_only != Py_None
            ? Py_NewRef(loss_only)
            : PyObject_GetAttr(loop->args, names->str_prediction_loss_only);
    if (loop->loss_only == NULL ||
        ctpy_get_bool(loop->op, names->str_is_in_train, &loop->in_train) < 0 ||
        ctpy_get_bool(loop->args, names->str_batch_eval_metrics, &loop->by_batch) < 0 ||
        ctpy_get_int64(loop->args, names->str_eval_batch_size, &rows) < 0 ||
        read_main_input(loop, names) < 0 || read_gather(loop, names) < 0) {
        return -1;
    }
    loop->default_rows = (Py_ssize_t)rows;
    loop->preprocess =
        PyObject_GetAttr(loop->op, names->str_preprocess_logits_for_metrics);
    loop->compute_metrics = PyObject_GetAttr(loop->op, names->str_compute_metrics);
    return loop->preprocess == NULL || loop->compute_metrics == NULL ? -1 : 0;
}

static int
tell(const ctpy_eval_loop *loop, PyObject *description, Py_ssize_t n_rows)
{
    PyObject *logging = PyImport_ImportModule("logging"), *logger = NULL, *text = NULL;
    PyObject *answer = NULL;
    char count[32] = ": Unknown";
    if (n_rows >= 0) {
        (void)snprintf(count, sizeof count, " = %zd", n_rows);
    }
    text = PyUnicode_FromFormat("***** Running %S *****\n  Num examples%s\n"
                                "  Batch size = %zd",
                                description, count, loop->default_rows);
    if (logging != NULL && text != NULL &&
        (logger = PyObject_CallMethod(logging, "getLogger", "s", "ctrainer.trainer")) !=
            NULL) {
        answer = PyObject_CallMethod(logger, "info", "sO", "%s", text);
    }
    Py_XDECREF(answer);
    Py_XDECREF(logger);
    Py_XDECREF(text);
    Py_XDECREF(logging);
    return answer == NULL ? -1 : 0;
}

static int
set_eval_dataloader(const ctpy_eval_loop *loop, const ctpy_state *names)
{
    PyObject *handler = PyObject_GetAttr(loop->op, names->str_callback_handler);
    int result = handler == NULL ? -1
                                 : PyObject_SetAttr(handler, names->str_eval_dataloader,
                                                    loop->loader);
    Py_XDECREF(handler);
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
run_round(ctpy_eval_loop *loop, PyObject *iterator, PyObject **inputs, PyObject **dummy,
          ctpy_state *names)
{
    taken_batch taken = {0};
    int first, going;
    const bool counts = *inputs != NULL;
    if (counts) {
        Py_XSETREF(*dummy, *inputs);
        *inputs = NULL;
    }
    ((Trainer *)loop->op)->dummy_batch = !counts;
    if (check_stop() == 0 && take_batch(loop, *dummy, &taken, names) == 0) {
        taken.batch.rows = counts ? taken.batch.rows : 0;
        *inputs = counts ? PyIter_Next(iterator) : NULL;
    }
    ((Trainer *)loop->op)->dummy_batch = false;
    going = ctpy_eval_sync_round(&loop->ranks, names, *inputs != NULL, &first);
    if (going >= 0 && keep_round(loop, &taken.batch, going == 0, names) < 0) {
        going = -1;
    }
    taken_fini(&taken);
    return going;
}

static int
run_rounds(ctpy_eval_loop *loop, PyObject *iterator, PyObject **inputs,
           PyObject **dummy, ctpy_state *names)
{
    const ct_comm *comm = ctpy_comm_borrow(names, loop->ranks.group);
    int first, going = -1;
    if (comm != NULL) {
        *inputs = PyIter_Next(iterator);
        going = ctpy_eval_sync_round(&loop->ranks, names, *inputs != NULL, &first);
    }
    if (going > 0 && going < comm->world_size) { /* some have nothing to run at all */
        *dummy = ctpy_eval_broadcast_batch(&loop->ranks, names, *inputs, first);
        going = *dummy == NULL ? -1 : going;
    }
    while (going > 0) {
        going = run_round(loop, iterator, inputs, dummy, names);
    }
    return going;
}

/* Batches that the ranks run side by side; a failure of one is a failure of all. */
static int
run_together(ctpy_eval_loop *loop, PyObject *iterator, ctpy_state *names)
{
    PyObject *inputs = NULL, *dummy = NULL;
    int first;
    int result = run_rounds(loop, iterator, &inputs, &dummy, names);
    if (result < 0 && !loop->ranks.told) {
        result = ctpy_eval_sync_round(&loop->ranks, names, false, &first);
    }
    Py_XDECREF(inputs);
    Py_XDECREF(dummy);
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

/* Runs every batch of the loader through prediction_step and into the store. Returns 0,
 * or -1 with an exception; KeyboardInterrupt when a signal asked the run to end. */
static int
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

static int
run_wrapped(ctpy_eval_loop *loop, PyObject *adapter, PyObject *description,
            Py_ssize_t n_rows, ctpy_state *names)
{
    if (ctpy_eval_ready_model(loop, adapter, names) < 0 ||
        tell(loop, description, n_rows) < 0 || set_eval_dataloader(loop, names) < 0 ||
        ctpy_eval_drop_past(loop->op, names) < 0 || ctpy_eval_run(loop, names) < 0) {
        return -1;
    }
    if (loop->n_batches == 0) {
        PyErr_Format(PyExc_ValueError,
                     "%S got no batch: the dataset is empty, or smaller than a batch "
                     "with dataloader_drop_last",
                     description);
        return -1;
    }
    return 0;
}

static int
run(ctpy_eval_loop *loop, PyObject *description, PyObject *loss_only, ctpy_state *names)
{
    PyObject *adapter = PyObject_GetAttr(loop->op, names->str__adapter);
    const Py_ssize_t n_rows =
        adapter == NULL ? -1 : dataset_length(loop->loader, names);
    int result = -1;
    if (!PyErr_Occurred() &&
        ctpy_eval_ranks_init(&loop->ranks, loop->op, loop->loader) == 0 &&
        read_settings(loop, loss_only, names) == 0 &&
        ctpy_eval_store_init(&loop->store, loop->op, loop->args, n_rows) == 0 &&
        (loop->model = ctpy_eval_wrap_model(loop->op, names)) != NULL) {
        if (loop->ranks.group != NULL && !loop->by_batch) {
            loop->store.ranks = &loop->ranks;
        }
        result = run_wrapped(loop, adapter, description, n_rows, names);
        result = ctpy_eval_release_model(loop, adapter, names) < 0 ? -1 : result;
    }
    Py_XDECREF(adapter);
    return result;
}

/* Rows of the data set where it knows, else those that came. */
static int
count_samples(const ctpy_eval_loop *loop, const ctpy_state *names, Py_ssize_t *n)
{
    *n = dataset_length(loop->loader, names);
    if (*n < 0 && !PyErr_Occurred() && length_or_unknown(loop->loader) >= 0) {
        PyObject *answer =
            PyObject_CallMethodOneArg(loop->op, names->str_num_examples, loop->loader);
        *n = answer == NULL ? -1 : PyLong_AsSsize_t(answer);
        Py_XDECREF(answer);
    }
    if (*n < 0 && PyErr_Occurred()) {
        return -1;
    }
    if (*n <= 0) {
        *n = loop->store.n_rows;
    }
    return 0;
}

/* compute_metrics of everything at once, if there is something to compute from. */
static int
compute_whole(ctpy_eval_loop *loop, PyObject *const *arrays)
{
    PyObject *options, *prediction = NULL;
    if (loop->compute_metrics == Py_None || loop->by_batch ||
        arrays[CTPY_EVAL_PREDICTIONS] == Py_None ||
        arrays[CTPY_EVAL_LABELS] == Py_None) {
        return 0;
    }
    options =
        Py_BuildValue("{s:O,s:O,s:O,s:O}", "predictions", arrays[CTPY_EVAL_PREDICTIONS],
                      "label_ids", arrays[CTPY_EVAL_LABELS], "inputs",
                      arrays[CTPY_EVAL_INPUTS], "losses", arrays[CTPY_EVAL_LOSSES]);
    if (options != NULL) {
        prediction = ctpy_eval_utility("EvalPrediction", PyTuple_New(0), options);
        Py_DECREF(options);
    }
    if (prediction != NULL) {
        Py_XSETREF(loop->metrics,
                   PyObject_CallOneArg(loop->compute_metrics, prediction));
        Py_DECREF(prediction);
    }
    return prediction == NULL || loop->metrics == NULL ? -1 : 0;
}

static PyObject *
finish(ctpy_eval_loop *loop, PyObject *prefix, ctpy_state *names)
{
    PyObject *arrays[CTPY_EVAL_KINDS] = {NULL}, *metrics = NULL, *output = NULL;
    Py_ssize_t n_samples;
    if (ctpy_eval_store_flush(&loop->store, names) < 0) {
        return NULL;
    }
    for (int kind = 0; kind < CTPY_EVAL_KINDS; kind++) {
        if ((arrays[kind] = ctpy_eval_store_take(&loop->store, kind)) == NULL) {
            goto done;
        }
    }
    if (count_samples(loop, names, &n_samples) < 0 || compute_whole(loop, arrays) < 0 ||
        (metrics = ctpy_eval_metrics(loop->metrics, &loop->store, prefix)) == NULL) {
        goto done;
    }
    output =
        ctpy_eval_utility("EvalLoopOutput",
                          Py_BuildValue("(OOOn)", arrays[CTPY_EVAL_PREDICTIONS],
                                        arrays[CTPY_EVAL_LABELS], metrics, n_samples),
                          NULL);
done:
    Py_XDECREF(metrics);
    for (int kind = 0; kind < CTPY_EVAL_KINDS; kind++) {
        Py_XDECREF(arrays[kind]);
    }
    return output;
}

static PyObject *
evaluation_loop(PyObject *op, PyObject *args, PyObject *kwargs, const char *format)
{
    static char *keywords[] = {"dataloader",           "description",
                               "prediction_loss_only", "ignore_keys",
                               "metric_key_prefix",    NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *loader, *description, *loss_only = Py_None, *ignore = Py_None;
    PyObject *prefix = names->str_eval, *output = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, keywords, &loader,
                                     &description, &loss_only, &ignore, &prefix)) {
        return NULL;
    }
    ctpy_eval_loop loop = {.op = op,
                           .loader = Py_NewRef(loader),
                           .ignore_keys = Py_NewRef(ignore),
                           .metrics = Py_NewRef(Py_None)};
    const int predicts =
        PyUnicode_Check(description) &&
        PyUnicode_CompareWithASCIIString(description, "Prediction") == 0;
    loop.is_prediction = predicts;
    if (run(&loop, description, loss_only, names) == 0) {
        output = finish(&loop, prefix, names);
    }
    loop_fini(&loop);
    return output;
}

static const char Trainer_evaluation_loop_doc[] =
    "evaluation_loop($self, dataloader, description, prediction_loss_only=None,\n"
    "                ignore_keys=None, metric_key_prefix='eval')\n--\n\n"
    "Run prediction_step on every batch; return EvalLoopOutput(predictions,\n"
    "label_ids, metrics, num_samples).\n\n"
    "Predictions and labels become arrays as the batches come, in no more memory\n"
    "than they take; where the second dimension differs it is filled with -100.\n"
    "<prefix>_loss is the mean over rows of their batch's loss. Raises ValueError\n"
    "when there is no batch.";

static PyObject *
Trainer_evaluation_loop(PyObject *op, PyObject *args, PyObject *kwargs)
{
    return evaluation_loop(op, args, kwargs, "OO|OOO:evaluation_loop");
}

static const char Trainer_prediction_loop_doc[] =
    "prediction_loop($self, dataloader, description, prediction_loss_only=None,\n"
    "                ignore_keys=None, metric_key_prefix='eval')\n--\n\n"
    "Do what evaluation_loop does, by the name it had in older releases.";

static PyObject *
Trainer_prediction_loop(PyObject *op, PyObject *args, PyObject *kwargs)
{
    return evaluation_loop(op, args, kwargs, "OO|OOO:prediction_loop");
}

/* Trainer: the batches of an evaluation, one after the other. */

/* Trainer: prediction_step, one batch without gradients. */

/* What prediction_step knows of its batch. */
typedef struct eval_step {
    PyObject *op, *model; /* borrowed */
    PyObject *inputs;     /* owned: after _prepare_inputs */
    PyObject *labels;     /* owned: detached, or None */
    PyObject *ignore;     /* owned: list of keys of outputs that are no predictions */
    PyObject *loss;       /* owned: detached, or NULL without one */
    int with_loss;        /* the batch has labels, or the model a loss without */
    int loss_only;
} eval_step;

/* None where the batch has no such entry. */
static PyObject *
input(PyObject *inputs, PyObject *key)
{
    int failed;
    PyObject *found = ctpy_batch_entry(inputs, key, &failed);
    return found == NULL && !failed ? Py_NewRef(Py_None) : found;
}

/* The batch's values for label_names, as a tuple; *all says that each is there. */
static PyObject *
take_labels(PyObject *inputs, PyObject *label_names, int *all)
{
    PyObject *keys = PySequence_Tuple(label_names), *values = NULL;
    const Py_ssize_t n = keys == NULL ? 0 : PyTuple_GET_SIZE(keys);
    *all = n > 0;
    if (keys != NULL) {
        values = PyTuple_New(n);
    }
    for (Py_ssize_t i = 0; values != NULL && i < n; i++) {
        PyObject *value = input(inputs, PyTuple_GET_ITEM(keys, i));
        if (value == NULL) {
            Py_CLEAR(values);
            break;
        }
        *all = *all && value != Py_None;
        PyTuple_SET_ITEM(values, i, value);
    }
    Py_XDECREF(keys);
    return values;
}

/* Does the model return a loss without labels, as CLIP does when asked to? */
static int
returns_loss(PyObject *op, PyObject *inputs, const ctpy_state *names)
{
    PyObject *said = input(inputs, names->str_return_loss);
    if (said == Py_None) {
        Py_SETREF(said, PyObject_GetAttr(op, names->str_can_return_loss));
    }
    int result = said == NULL ? -1 : PyObject_IsTrue(said);
    Py_XDECREF(said);
    return result;
}

/* A list: what the caller named, or what the model's configuration says. */
static PyObject *
ignored_keys(PyObject *op, PyObject *given, const ctpy_state *names)
{
    int failed;
    PyObject *model, *config, *keys = NULL;
    if (given != Py_None) {
        return PySequence_List(given);
    }
    if ((model = PyObject_GetAttr(op, names->str_model)) == NULL) {
        return NULL;
    }
    config = ctpy_get_optional(model, names->str_config, &failed);
    Py_DECREF(model);
    if (config == NULL) {
        return failed ? NULL : PyList_New(0);
    }
    keys = ctpy_get_optional(config, names->str_keys_to_ignore_at_inference, &failed);
    Py_DECREF(config);
    if (keys == NULL) {
        return failed ? NULL : Py_BuildValue("[O]", names->str_past_key_values);
    }
    Py_SETREF(keys, PySequence_List(keys));
    return keys;
}

static void
step_fini(eval_step *s)
{
    Py_CLEAR(s->inputs);
    Py_CLEAR(s->labels);
    Py_CLEAR(s->ignore);
    Py_CLEAR(s->loss);
}

/* The labels, taken before the loss, which may pop them. A single one stands alone. */
static PyObject *
detached_labels(PyObject *inputs, PyObject *label_names, const ctpy_state *names)
{
    int all;
    PyObject *values = take_labels(inputs, label_names, &all), *labels = NULL;
    if (values != NULL) {
        labels = ctpy_detach_all(values, names);
        Py_DECREF(values);
    }
    if (labels != NULL && PyTuple_GET_SIZE(labels) == 1) {
        Py_SETREF(labels, Py_NewRef(PyTuple_GET_ITEM(labels, 0)));
    }
    return labels;
}

/* A batch that is no mapping can be run by an override of compute_loss alone. */
static int
decide_loss(eval_step *s, PyObject *inputs, PyObject *label_names,
            const ctpy_state *names)
{
    const int kind = ctpy_kind_of(inputs);
    if (kind != CTPY_MAPPING) {
        s->with_loss = 1;
        return kind < 0 ? -1 : 0;
    }
    PyObject *given = take_labels(inputs, label_names, &s->with_loss);
    if (given == NULL) {
        return -1;
    }
    if (PyTuple_GET_SIZE(given) == 0) {
        s->with_loss = returns_loss(s->op, inputs, names);
    }
    Py_DECREF(given);
    return s->with_loss < 0 ? -1 : 0;
}

static int
step_begin(eval_step *s, PyObject *inputs, PyObject *ignore, const ctpy_state *names)
{
    PyObject *label_names = PyObject_GetAttr(s->op, names->str_label_names);
    int result = -1;
    if (label_names == NULL || decide_loss(s, inputs, label_names, names) < 0 ||
        (s->inputs = PyObject_CallMethodOneArg(s->op, names->str__prepare_inputs,
                                               inputs)) == NULL ||
        (s->ignore = ignored_keys(s->op, ignore, names)) == NULL) {
        goto done;
    }
    s->labels = s->with_loss ? detached_labels(s->inputs, label_names, names)
                             : Py_NewRef(Py_None);
    result = s->labels == NULL ? -1 : 0;
done:
    Py_XDECREF(label_names);
    return result;
}

/* The hook's count of the batch's targets, which compute_loss is passed. */
static PyObject *
count_items(const eval_step *s, const ctpy_state *names)
{
    PyObject *count = NULL, *device = NULL, *batches = NULL;
    PyObject *args = PyObject_GetAttr(s->op, names->str_args);
    if (args != NULL && (device = PyObject_GetAttr(args, names->str_device)) != NULL &&
        (batches = Py_BuildValue("[O]", s->inputs)) != NULL) {
        PyObject *stack[] = {s->op, batches, device};
        count = PyObject_VectorcallMethod(names->str__get_num_items_in_batch, stack, 3,
                                          NULL);
    }
    Py_XDECREF(batches);
    Py_XDECREF(device);
    Py_XDECREF(args);
    return count;
}

/* A hook's loss without its graph; of several elements, their mean. */
static PyObject *
bare_loss(PyObject *loss, const ctpy_state *names)
{
    const int tensor = ctpy_is_tensor(loss);
    if (tensor <= 0) {
        return tensor < 0 ? NULL : Py_NewRef(loss);
    }
    PyObject *shape = NULL, *bare = PyObject_CallMethodNoArgs(loss, names->str_detach);
    if (bare != NULL && (shape = PyObject_GetAttr(bare, names->str_shape)) != NULL) {
        const Py_ssize_t ndim = PyObject_Size(shape);
        Py_DECREF(shape);
        if (ndim > 0) {
            Py_SETREF(bare, PyObject_CallMethodNoArgs(bare, names->str_mean));
        }
        if (ndim >= 0) {
            return bare;
        }
    }
    Py_XDECREF(bare);
    return NULL;
}

/* compute_loss(..., return_outputs=True): sets s->loss, returns the outputs. */
static PyObject *
loss_and_outputs(eval_step *s, const ctpy_state *names)
{
    PyObject *outputs = NULL, *pair = NULL, *keywords = NULL;
    PyObject *count = count_items(s, names);
    if (count == NULL ||
        (keywords = PyTuple_Pack(2, names->str_return_outputs,
                                 names->str_num_items_in_batch)) == NULL) {
        goto done;
    }
    PyObject *stack[] = {s->model, s->inputs, Py_True, count};
    pair = ctpy_call_adapted(s->op, names->str_compute_loss, stack, 2, keywords);
    if (pair == NULL) {
        goto done;
    }
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_Format(PyExc_TypeError,
                     "compute_loss(..., return_outputs=True) must return (loss, "
                     "outputs), got a %.100s; evaluation needs the outputs",
                     Py_TYPE(pair)->tp_name);
        goto done;
    }
    s->loss = bare_loss(PyTuple_GET_ITEM(pair, 0), names);
    outputs = s->loss == NULL ? NULL : Py_NewRef(PyTuple_GET_ITEM(pair, 1));
done:
    Py_XDECREF(keywords);
    Py_XDECREF(pair);
    Py_XDECREF(count);
    return outputs;
}

/* model(**inputs), and what an old model wants back with its next batch. */
static PyObject *
outputs_alone(eval_step *s, const ctpy_state *names)
{
    PyObject *none = PyTuple_New(0), *keywords = PyDict_New(), *outputs = NULL;
    if (none != NULL && keywords != NULL && PyDict_Update(keywords, s->inputs) == 0) {
        outputs = PyObject_Call(s->model, none, keywords);
    }
    Py_XDECREF(keywords);
    Py_XDECREF(none);
    if (outputs != NULL && ctpy_eval_keep_past(s->op, outputs, names) < 0) {
        Py_CLEAR(outputs);
    }
    return outputs;
}

static PyObject *
run_forward(eval_step *s, const ctpy_state *names)
{
    return s->with_loss ? loss_and_outputs(s, names) : outputs_alone(s, names);
}

static PyObject *
run_in_loss_context(eval_step *s, const ctpy_state *names)
{
    PyObject *context;
    if (ctpy_enter_loss_context(s->op, &context) < 0) {
        return NULL;
    }
    return ctpy_leave_context_steal(context, names->str___exit__,
                                    run_forward(s, names));
}

static PyObject *
run_without_gradients(eval_step *s, const ctpy_state *names)
{
    PyObject *context, *adapter = PyObject_GetAttr(s->op, names->str__adapter);
    if (adapter == NULL) {
        return NULL;
    }
    context = ctpy_enter_context_steal(
        PyObject_CallMethodNoArgs(adapter, names->str_no_grad), names->str___enter__);
    Py_DECREF(adapter);
    return context == NULL ? NULL
                           : ctpy_leave_context_steal(context, names->str___exit__,
                                                      run_in_loss_context(s, names));
}

/* Values of the outputs that are predictions, as a tuple. */
static PyObject *
predictions_of_mapping(const eval_step *s, PyObject *outputs, const ctpy_state *names)
{
    PyObject *keys = NULL, *list = PyList_New(0), *result = NULL;
    PyObject *values = ctpy_children(outputs, CTPY_MAPPING, &keys);
    if (values == NULL || list == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++) {
        PyObject *key = PyTuple_GET_ITEM(keys, i);
        int skip = PySequence_Contains(s->ignore, key);
        if (skip == 0 && s->with_loss) {
            skip = PyObject_RichCompareBool(key, names->str_loss, Py_EQ);
        }
        if (skip < 0 ||
            (!skip && PyList_Append(list, PyTuple_GET_ITEM(values, i)) < 0)) {
            goto done;
        }
    }
    result = PyList_AsTuple(list);
done:
    Py_XDECREF(values);
    Py_XDECREF(keys);
    Py_XDECREF(list);
    return result;
}

/* The predictions among the outputs; a single one stands alone. A bare tensor is one
 * prediction: transformers would take its first row for the loss. */
static PyObject *
predictions(const eval_step *s, PyObject *outputs, const ctpy_state *names)
{
    PyObject *chosen = NULL, *detached = NULL;
    const int kind = ctpy_kind_of(outputs);
    if (kind < 0) {
        return NULL;
    }
    if (kind == CTPY_MAPPING) {
        chosen = predictions_of_mapping(s, outputs, names);
    }
    else if (kind == CTPY_SEQUENCE && s->with_loss) {
        chosen = PySequence_GetSlice(outputs, 1, PY_SSIZE_T_MAX);
    }
    else {
        chosen = Py_NewRef(outputs);
    }
    if (chosen != NULL) {
        detached = ctpy_detach_all(chosen, names);
        Py_DECREF(chosen);
    }
    if (detached != NULL && ctpy_kind_of(detached) == CTPY_SEQUENCE &&
        PySequence_Size(detached) == 1) {
        Py_SETREF(detached, PySequence_GetItem(detached, 0));
    }
    return detached;
}

static const char Trainer_prediction_step_doc[] =
    "prediction_step($self, model, inputs, prediction_loss_only, ignore_keys=None)\n"
    "--\n\n"
    "Run one batch without gradients; return (loss, predictions, labels), detached.\n\n"
    "The loss is None for a batch without labels; with prediction_loss_only so are\n"
    "the other two. Predictions are the model's outputs but for the loss and the\n"
    "ignore_keys (default: model.config.keys_to_ignore_at_inference).";

static PyObject *
Trainer_prediction_step(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"model", "inputs", "prediction_loss_only", "ignore_keys",
                               NULL};
    const ctpy_state *names = ctpy_state_borrow(op);
    eval_step s = {.op = op};
    PyObject *inputs, *loss_only, *ignore = Py_None, *result = NULL;
    PyObject *outputs = NULL, *logits = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|O:prediction_step", keywords,
                                     &s.model, &inputs, &loss_only, &ignore) ||
        (s.loss_only = PyObject_IsTrue(loss_only)) < 0 ||
        step_begin(&s, inputs, ignore, names) < 0 ||
        (outputs = run_without_gradients(&s, names)) == NULL) {
        goto done;
    }
    PyObject *loss = s.loss == NULL ? Py_None : s.loss;
    if (s.loss_only) {
        result = PyTuple_Pack(3, loss, Py_None, Py_None);
    }
    else if ((logits = predictions(&s, outputs, names)) != NULL) {
        result = PyTuple_Pack(3, loss, logits, s.labels);
    }
done:
    Py_XDECREF(logits);
    Py_XDECREF(outputs);
    step_fini(&s);
    return result;
}

PyMethodDef Trainer_evaluate_loop_methods[] = {
    {"evaluation_loop", (PyCFunction)(void (*)(void))Trainer_evaluation_loop,
     METH_VARARGS | METH_KEYWORDS,                                               Trainer_evaluation_loop_doc},
    {"prediction_loop", (PyCFunction)(void (*)(void))Trainer_prediction_loop,
     METH_VARARGS | METH_KEYWORDS,                                               Trainer_prediction_loop_doc},
    {"prediction_step", (PyCFunction)(void (*)(void))Trainer_prediction_step,
     METH_VARARGS | METH_KEYWORDS,                                               Trainer_prediction_step_doc},
    {NULL,              NULL,                                                 0, NULL                       },
};
