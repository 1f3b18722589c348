/* Trainer: evaluation_loop, the batches of evaluate and predict. */
#include "binding/callbacks/ctpy_callbacks.h"
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

const char Trainer_evaluation_loop_doc[] =
    "evaluation_loop($self, dataloader, description, prediction_loss_only=None,\n"
    "                ignore_keys=None, metric_key_prefix='eval')\n--\n\n"
    "Run prediction_step on every batch; return EvalLoopOutput(predictions,\n"
    "label_ids, metrics, num_samples).\n\n"
    "Predictions and labels become arrays as the batches come, in no more memory\n"
    "than they take; where the second dimension differs it is filled with -100.\n"
    "<prefix>_loss is the mean over rows of their batch's loss. Raises ValueError\n"
    "when there is no batch.";

PyObject *
Trainer_evaluation_loop(PyObject *op, PyObject *args, PyObject *kwargs)
{
    return evaluation_loop(op, args, kwargs, "OO|OOO:evaluation_loop");
}

const char Trainer_prediction_loop_doc[] =
    "prediction_loop($self, dataloader, description, prediction_loss_only=None,\n"
    "                ignore_keys=None, metric_key_prefix='eval')\n--\n\n"
    "Do what evaluation_loop does, by the name it had in older releases.";

PyObject *
Trainer_prediction_loop(PyObject *op, PyObject *args, PyObject *kwargs)
{
    return evaluation_loop(op, args, kwargs, "OO|OOO:prediction_loop");
}
