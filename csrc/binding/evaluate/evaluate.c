/* Trainer: evaluate, predict and what they share with training. */
#include "binding/callbacks/ctpy_callbacks.h"
#include "binding/evaluate/evaluate.h"

#include <math.h>
#include <time.h>

static double
time_now(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* op._memory_tracker.start(stage), or stop_and_update_metrics(metrics, stage) where
 * there are metrics; nothing without a tracker. */
static int
track_memory(PyObject *op, const char *stage, PyObject *metrics,
             const ctpy_state *names)
{
    int failed;
    PyObject *tracker = ctpy_get_optional(op, names->str__memory_tracker, &failed);
    PyObject *answer = NULL;
    if (tracker == NULL || tracker == Py_None) {
        Py_XDECREF(tracker);
        return failed ? -1 : 0;
    }
    answer = metrics == NULL ? PyObject_CallMethod(tracker, "start", "s", stage)
                             : PyObject_CallMethod(tracker, "stop_and_update_metrics",
                                                   "Os", metrics, stage);
    Py_DECREF(tracker);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* Adds runtime, samples and steps per second to the metrics. */
static int
add_speed(PyObject *op, PyObject *metrics, PyObject *prefix, double start,
          PyObject *n_samples, const ctpy_state *names)
{
    int64_t rows = 1, ranks = 1;
    PyObject *args = PyObject_GetAttr(op, names->str_args), *options, *speed = NULL;
    if (args == NULL || ctpy_get_int64(args, names->str_eval_batch_size, &rows) < 0 ||
        ctpy_get_int64(args, names->str_world_size, &ranks) < 0) {
        Py_XDECREF(args);
        return -1;
    }
    Py_DECREF(args);
    const double n = PyFloat_AsDouble(n_samples);
    if (n == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    const long long steps = (long long)ceil(n / ((double)rows * (double)ranks));
    options = Py_BuildValue("{s:O,s:L}", "num_samples", n_samples, "num_steps", steps);
    if (options != NULL) {
        speed = ctpy_eval_utility("speed_metrics", Py_BuildValue("(Od)", prefix, start),
                                  options);
        Py_DECREF(options);
    }
    int result = speed == NULL ? -1 : PyDict_Update(metrics, speed);
    Py_XDECREF(speed);
    return result;
}

static int
fire_with_metrics(PyObject *op, PyObject *event, PyObject *metrics)
{
    PyObject *extra = Py_BuildValue("{s:O}", "metrics", metrics);
    int result = extra == NULL ? -1 : ctpy_trainer_fire(op, event, extra);
    Py_XDECREF(extra);
    return result;
}

/* op.name(...), with the averaged weights in the model where there are any. */
static PyObject *
with_averages(PyObject *op, PyObject *name, PyObject *const *stack, PyObject *keywords,
              const ctpy_state *names)
{
    PyObject *context = PyObject_CallMethodNoArgs(op, names->str__averaged_weights);
    if (context == Py_None) {
        Py_CLEAR(context);
    }
    else if ((context = ctpy_enter_context_steal(context, names->str___enter__)) ==
             NULL) {
        return NULL;
    }
    return ctpy_leave_context_steal(context, names->str___exit__,
                                    ctpy_call_adapted(op, name, stack, 1, keywords));
}

/* The hook evaluation_loop, or prediction_loop where args ask for the old one. */
static PyObject *
call_loop(PyObject *op, PyObject *loader, const char *description, PyObject *loss_only,
          PyObject *ignore, PyObject *prefix, const ctpy_state *names)
{
    int failed, legacy = 0;
    PyObject *args = PyObject_GetAttr(op, names->str_args), *flag = NULL,
             *output = NULL;
    PyObject *text = PyUnicode_FromString(description);
    PyObject *keywords =
        PyTuple_Pack(4, names->str_description, names->str_prediction_loss_only,
                     names->str_ignore_keys, names->str_metric_key_prefix);
    if (args == NULL || text == NULL || keywords == NULL) {
        goto done;
    }
    flag = ctpy_get_optional(args, names->str_use_legacy_prediction_loop, &failed);
    if (failed || (flag != NULL && (legacy = PyObject_IsTrue(flag)) < 0)) {
        goto done;
    }
    PyObject *stack[] = {loader, text, loss_only, ignore, prefix};
    PyObject *name = legacy ? names->str_prediction_loop : names->str_evaluation_loop;
    output = with_averages(op, name, stack, keywords, names);
done:
    Py_XDECREF(keywords);
    Py_XDECREF(text);
    Py_XDECREF(flag);
    Py_XDECREF(args);
    return output;
}

/* One data set: loop, speed and memory. Returns the loop's output; *metrics is its
 * dict, a new reference. loader is a new reference or NULL, and stolen. */
static PyObject *
measure_steal(PyObject *op, PyObject *loader, const char *description,
              PyObject *loss_only, PyObject *ignore, PyObject *prefix,
              PyObject **metrics)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    const double start = time_now();
    PyObject *output, *n_samples = NULL;
    if (loader == NULL) {
        return NULL;
    }
    output = call_loop(op, loader, description, loss_only, ignore, prefix, names);
    Py_DECREF(loader);
    if (output == NULL ||
        (*metrics = PyObject_GetAttr(output, names->str_metrics)) == NULL ||
        (n_samples = PyObject_GetAttr(output, names->str_num_samples)) == NULL ||
        add_speed(op, *metrics, prefix, start, n_samples, names) < 0) {
        Py_CLEAR(output);
    }
    Py_XDECREF(n_samples);
    return output;
}

static PyObject *
evaluate_one(PyObject *op, PyObject *dataset, PyObject *ignore, PyObject *prefix)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    PyObject *output = NULL, *metrics = NULL, *answer = NULL, *function, *result = NULL;
    if (track_memory(op, "eval", NULL, names) < 0 ||
        (function = PyObject_GetAttr(op, names->str_compute_metrics)) == NULL) {
        return NULL;
    }
    PyObject *loss_only = function == Py_None ? Py_True : Py_None;
    Py_DECREF(function);
    output = measure_steal(
        op, PyObject_CallMethodOneArg(op, names->str_get_eval_dataloader, dataset),
        "Evaluation", loss_only, ignore, prefix, &metrics);
    if (output == NULL ||
        (answer = PyObject_CallMethodOneArg(op, names->str_log, metrics)) == NULL ||
        fire_with_metrics(op, names->str_on_evaluate, metrics) < 0 ||
        track_memory(op, "eval", metrics, names) < 0) {
        goto done;
    }
    result = Py_NewRef(metrics);
done:
    Py_XDECREF(answer);
    Py_XDECREF(metrics);
    Py_XDECREF(output);
    return result;
}

/* evaluate(one of several data sets) by lookup, its metrics under "<prefix>_<name>_".
 */
static int
evaluate_named(PyObject *op, PyObject *all, PyObject *dataset, PyObject *name,
               PyObject *ignore, PyObject *prefix)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    PyObject *longer = PyUnicode_FromFormat("%S_%S", prefix, name), *metrics = NULL;
    PyObject *keywords =
        PyTuple_Pack(3, names->str_eval_dataset, names->str_ignore_keys,
                     names->str_metric_key_prefix);
    if (longer != NULL && keywords != NULL) {
        PyObject *stack[] = {dataset, ignore, longer};
        metrics = ctpy_call_adapted(op, names->str_evaluate, stack, 0, keywords);
    }
    int result = metrics == NULL ? -1 : PyDict_Update(all, metrics);
    Py_XDECREF(metrics);
    Py_XDECREF(keywords);
    Py_XDECREF(longer);
    return result;
}

/* The trainer's own data sets are passed on by name, so that their loaders are kept. */
static PyObject *
evaluate_all(PyObject *op, PyObject *datasets, int by_name, PyObject *ignore,
             PyObject *prefix)
{
    PyObject *all = PyDict_New(), *items = PyMapping_Items(datasets);
    for (Py_ssize_t i = 0; all != NULL && items != NULL && i < PyList_GET_SIZE(items);
         i++) {
        PyObject *pair = PyList_GET_ITEM(items, i);
        PyObject *name = PyTuple_GET_ITEM(pair, 0);
        if (evaluate_named(op, all, by_name ? name : PyTuple_GET_ITEM(pair, 1), name,
                           ignore, prefix) < 0) {
            Py_CLEAR(all);
        }
    }
    if (items == NULL) {
        Py_CLEAR(all);
    }
    Py_XDECREF(items);
    return all;
}

const char Trainer_evaluate_doc[] =
    "evaluate($self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval')\n"
    "--\n\n"
    "Evaluate, log and return the metrics: the loss, what compute_metrics computes,\n"
    "and the speed, each key beginning with the prefix.\n\n"
    "eval_dataset is a data set, a dict of several (their metrics then begin with\n"
    "'<prefix>_<name>_'), the name of one in the trainer's dict, or None for the\n"
    "trainer's own.";

PyObject *
Trainer_evaluate(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"eval_dataset", "ignore_keys", "metric_key_prefix",
                               NULL};
    const ctpy_state *names = ctpy_state_borrow(op);
    PyObject *given = Py_None, *ignore = Py_None, *prefix = names->str_eval;
    PyObject *dataset, *result;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OOO:evaluate", keywords, &given,
                                     &ignore, &prefix)) {
        return NULL;
    }
    dataset = given != Py_None ? Py_NewRef(given)
                               : PyObject_GetAttr(op, names->str_eval_dataset);
    if (dataset == NULL) {
        return NULL;
    }
    result = PyDict_Check(dataset)
                 ? evaluate_all(op, dataset, given == Py_None, ignore, prefix)
                 : evaluate_one(op, dataset, ignore, prefix);
    Py_DECREF(dataset);
    return result;
}

const char Trainer_predict_doc[] =
    "predict($self, test_dataset, ignore_keys=None, metric_key_prefix='test')\n--\n\n"
    "Return PredictionOutput(predictions, label_ids, metrics) for a data set.\n\n"
    "label_ids is None, and the metrics are the speed alone, where it has no labels.";

PyObject *
Trainer_predict(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"test_dataset", "ignore_keys", "metric_key_prefix",
                               NULL};
    const ctpy_state *names = ctpy_state_borrow(op);
    PyObject *dataset, *ignore = Py_None, *prefix = NULL, *metrics = NULL;
    PyObject *output = NULL, *predictions = NULL, *labels = NULL, *result = NULL;
    PyObject *standard = PyUnicode_FromString("test");
    if (standard == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO:predict", keywords, &dataset,
                                     &ignore, &prefix) ||
        track_memory(op, "test", NULL, names) < 0) {
        goto done;
    }
    prefix = prefix == NULL ? standard : prefix;
    output = measure_steal(
        op, PyObject_CallMethodOneArg(op, names->str_get_test_dataloader, dataset),
        "Prediction", Py_None, ignore, prefix, &metrics);
    if (output == NULL || fire_with_metrics(op, names->str_on_predict, metrics) < 0 ||
        track_memory(op, "test", metrics, names) < 0 ||
        (predictions = PyObject_GetAttr(output, names->str_predictions)) == NULL ||
        (labels = PyObject_GetAttr(output, names->str_label_ids)) == NULL) {
        goto done;
    }
    result = ctpy_eval_utility("PredictionOutput",
                               PyTuple_Pack(3, predictions, labels, metrics), NULL);
done:
    Py_XDECREF(labels);
    Py_XDECREF(predictions);
    Py_XDECREF(metrics);
    Py_XDECREF(output);
    Py_XDECREF(standard);
    return result;
}
