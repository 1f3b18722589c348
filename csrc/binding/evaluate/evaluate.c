/* Trainer: evaluate, predict and what they share with training. */
#include "binding/evaluate/evaluate.h"

#include "binding/callbacks/handler.h"

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

PyObject *
ctpy_eval_utility(const char *name, PyObject *args_steal, PyObject *kwargs)
{
    PyObject *function = NULL, *result = NULL;
    PyObject *module = PyImport_ImportModule("ctrainer.trainer_utils");
    if (module != NULL && args_steal != NULL &&
        (function = PyObject_GetAttrString(module, name)) != NULL) {
        result = PyObject_Call(function, args_steal, kwargs);
    }
    Py_XDECREF(function);
    Py_XDECREF(module);
    Py_XDECREF(args_steal);
    return result;
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

static const char Trainer_evaluate_doc[] =
    "evaluate($self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval')\n"
    "--\n\n"
    "Evaluate, log and return the metrics: the loss, what compute_metrics computes,\n"
    "and the speed, each key beginning with the prefix.\n\n"
    "eval_dataset is a data set, a dict of several (their metrics then begin with\n"
    "'<prefix>_<name>_'), the name of one in the trainer's dict, or None for the\n"
    "trainer's own.";

static PyObject *
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

static const char Trainer_predict_doc[] =
    "predict($self, test_dataset, ignore_keys=None, metric_key_prefix='test')\n--\n\n"
    "Return PredictionOutput(predictions, label_ids, metrics) for a data set.\n\n"
    "label_ids is None, and the metrics are the speed alone, where it has no labels.";

static PyObject *
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

/* Trainer: from the outputs of an evaluation to its metrics. */

/* prefix + "_" + name */
static PyObject *
ctpy_eval_key(PyObject *prefix, const char *name)
{
    return PyUnicode_FromFormat("%S_%s", prefix, name);
}

static int
set_mean(PyObject *metrics, PyObject *prefix, const char *name, double sum, double n)
{
    PyObject *key = ctpy_eval_key(prefix, name);
    PyObject *mean = PyFloat_FromDouble(n > 0.0 ? sum / n : Py_NAN);
    int result = key == NULL || mean == NULL ? -1 : PyDict_SetItem(metrics, key, mean);
    Py_XDECREF(mean);
    Py_XDECREF(key);
    return result;
}

static int
copy_as(PyObject *to, PyObject *key, PyObject *value, PyObject *before)
{
    PyObject *name = PyUnicode_Concat(before, key);
    int result = name == NULL ? -1 : PyDict_SetItem(to, name, value);
    Py_XDECREF(name);
    return result;
}

/* Copies the items whose key begins with `bar`, or those whose key does not, which then
 * get it. */
static int
copy_items(PyObject *to, PyObject *from, PyObject *bar, int with_bar)
{
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(from, &position, &key, &value)) {
        if (!PyUnicode_Check(key)) {
            PyErr_Format(PyExc_TypeError,
                         "compute_metrics must name its metrics by strings, got %R",
                         key);
            return -1;
        }
        const Py_ssize_t found = PyUnicode_Tailmatch(key, bar, 0, PY_SSIZE_T_MAX, -1);
        if (found < 0 || (found && with_bar && PyDict_SetItem(to, key, value) < 0) ||
            (!found && !with_bar && copy_as(to, key, value, bar) < 0)) {
            return -1;
        }
    }
    return 0;
}

/* A metric that compute_metrics calls "loss" thus replaces the mean of the losses, as
 * it does in transformers. */
static PyObject *
prefixed(PyObject *metrics, PyObject *prefix)
{
    PyObject *bar = PyUnicode_FromFormat("%S_", prefix), *result = PyDict_New();
    if (bar == NULL || result == NULL || copy_items(result, metrics, bar, 1) < 0 ||
        copy_items(result, metrics, bar, 0) < 0) {
        Py_CLEAR(result);
    }
    Py_XDECREF(bar);
    return result;
}

static int
add_losses(PyObject *metrics, const ctpy_eval_store *store, PyObject *prefix)
{
    if (!store->has_loss) {
        return 0;
    }
    if (set_mean(metrics, prefix, "loss", store->loss_sum, store->loss_rows) < 0) {
        return -1;
    }
    return store->by_token ? set_mean(metrics, prefix, "loss_by_token",
                                      store->token_sum, store->token_count)
                           : 0;
}

PyObject *
ctpy_eval_metrics(PyObject *metrics, const ctpy_eval_store *store, PyObject *prefix)
{
    PyObject *plain, *result = NULL;
    if (metrics != Py_None && !PyDict_Check(metrics)) {
        PyErr_Format(
            PyExc_TypeError,
            "compute_metrics must return a dict of names to numbers, got %.200R",
            metrics);
        return NULL;
    }
    plain = metrics == Py_None ? PyDict_New()
                               : ctpy_eval_utility("denumpify_detensorize",
                                                   PyTuple_Pack(1, metrics), NULL);
    if (plain != NULL && add_losses(plain, store, prefix) == 0) {
        result = prefixed(plain, prefix);
    }
    Py_XDECREF(plain);
    return result;
}

/* Trainer: the model while it is evaluated: wrapped, in another dtype, in eval mode;
 * and as it was before. */

PyObject *
ctpy_eval_wrap_model(PyObject *op, const ctpy_state *names)
{
    PyObject *model = PyObject_GetAttr(op, names->str_model), *wrapped = NULL;
    PyObject *keyword = PyTuple_Pack(1, names->str_training);
    if (model != NULL && keyword != NULL) {
        PyObject *stack[] = {model, Py_False};
        wrapped = ctpy_call_adapted(op, names->str__wrap_model, stack, 1, keyword);
    }
    Py_XDECREF(keyword);
    Py_XDECREF(model);
    return wrapped;
}

/* fp16_full_eval and bf16_full_eval, unless this happens within a training: then the
 * weights are needed as they are. */
static int
cast_model(ctpy_eval_loop *loop, PyObject *adapter, const ctpy_state *names)
{
    int fp16, bf16;
    if (ctpy_get_bool(loop->args, names->str_fp16_full_eval, &fp16) < 0 ||
        ctpy_get_bool(loop->args, names->str_bf16_full_eval, &bf16) < 0) {
        return -1;
    }
    if (loop->in_train || (!fp16 && !bf16)) {
        return 0;
    }
    PyObject *device = PyObject_GetAttr(loop->args, names->str_device);
    if (device != NULL) {
        loop->uncast = PyObject_CallMethod(adapter, "cast_model", "OsO", loop->model,
                                           fp16 ? "float16" : "bfloat16", device);
        Py_DECREF(device);
    }
    return loop->uncast == NULL ? -1 : 0;
}

/* model.eval() or model.train(), and the optimizer's. */
static int
set_mode(const ctpy_eval_loop *loop, PyObject *mode)
{
    return ctpy_call_if_there(loop->model, mode) < 0
               ? -1
               : ctpy_set_optimizer_mode(loop->op, mode);
}

int
ctpy_eval_ready_model(ctpy_eval_loop *loop, PyObject *adapter, const ctpy_state *names)
{
    return cast_model(loop, adapter, names) < 0 ? -1 : set_mode(loop, names->str_eval);
}

/* Its own weights, and its own forward, which _wrap_model may have put under autocast.
 */
static int
undo_precision(const ctpy_eval_loop *loop, PyObject *adapter, const ctpy_state *names)
{
    PyObject *answer;
    if (loop->uncast != NULL) {
        if ((answer = PyObject_CallNoArgs(loop->uncast)) == NULL) {
            return -1;
        }
        Py_DECREF(answer);
    }
    answer = PyObject_CallMethodOneArg(adapter, names->str_leave_mixed_precision,
                                       loop->model);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* A training goes on. The model stays in eval mode until the next training_step, as it
 * does with transformers: logs and callbacks tell evaluations by it. One that has no
 * flag to tell by, or whose evaluation has failed, is put back at once. */
static int
resume_training(const ctpy_eval_loop *loop, bool failed, const ctpy_state *names)
{
    bool on = false;
    const int flagged = failed ? 0 : ctpy_has_eval_mode(loop->model, names, &on);
    if (flagged < 0) {
        return -1;
    }
    return flagged ? ctpy_set_optimizer_mode(loop->op, names->str_train)
                   : set_mode(loop, names->str_train);
}

int
ctpy_eval_release_model(const ctpy_eval_loop *loop, PyObject *adapter,
                        const ctpy_state *names)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    int result = loop->in_train ? resume_training(loop, type != NULL, names)
                                : undo_precision(loop, adapter, names);
    if (type != NULL) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
        return -1;
    }
    return result;
}

/* Trainer: where evaluation and training meet. */

int
ctpy_eval_keep_past(PyObject *op, PyObject *outputs, const ctpy_state *names)
{
    int failed = 1;
    PyObject *args = PyObject_GetAttr(op, names->str_args), *found = NULL;
    if (args != NULL) {
        found = ctpy_get_optional(args, names->str_past_index, &failed);
        Py_DECREF(args);
    }
    if (found == NULL) {
        return failed ? -1 : 0;
    }
    const Py_ssize_t index = PyLong_AsSsize_t(found);
    Py_DECREF(found);
    if (index < 0) {
        return PyErr_Occurred() ? -1 : 0;
    }
    PyObject *at = PyLong_FromSsize_t(index - 1);
    PyObject *past = at == NULL ? NULL : PyObject_GetItem(outputs, at);
    int result = past == NULL ? -1 : PyObject_SetAttr(op, names->str__past, past);
    Py_XDECREF(past);
    Py_XDECREF(at);
    return result;
}

int
ctpy_eval_drop_past(PyObject *op, const ctpy_state *names)
{
    int failed;
    PyObject *past = ctpy_get_optional(op, names->str__past, &failed);
    if (past == NULL) {
        return failed ? -1 : 0;
    }
    Py_DECREF(past);
    return PyObject_SetAttr(op, names->str__past, Py_None);
}

/* len(loader.dataset), or -1 where one of them is not there. */
static Py_ssize_t
dataset_size(PyObject *loader, const ctpy_state *names)
{
    int failed;
    PyObject *dataset = ctpy_get_optional(loader, names->str_dataset, &failed);
    const Py_ssize_t n = dataset == NULL ? -1 : PyObject_Size(dataset);
    Py_XDECREF(dataset);
    if (n < 0 && PyErr_Occurred() &&
        (PyErr_ExceptionMatches(PyExc_TypeError) ||
         PyErr_ExceptionMatches(PyExc_AttributeError))) {
        PyErr_Clear();
    }
    return n;
}

static const char Trainer_num_examples_doc[] =
    "num_examples($self, dataloader)\n--\n\n"
    "Return the length of the loader's data set; without one, batches times\n"
    "per_device_train_batch_size. Raises TypeError when the loader has no length.";

static PyObject *
Trainer_num_examples(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"dataloader", NULL};
    const ctpy_state *names = ctpy_state_borrow(op);
    PyObject *loader;
    int64_t rows;
    Py_ssize_t n;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:num_examples", keywords,
                                     &loader)) {
        return NULL;
    }
    if ((n = dataset_size(loader, names)) >= 0) {
        return PyLong_FromSsize_t(n);
    }
    if (PyErr_Occurred() || (n = PyObject_Size(loader)) < 0 ||
        ctpy_field_int64(op, names->str_args, names->str_per_device_train_batch_size,
                         &rows) < 0) {
        return NULL;
    }
    return PyLong_FromLongLong((long long)n * rows);
}

/* _report_to_hp_search(trial, step, metrics), for trainers that search. */
static int
report(PyObject *op, PyObject *trial, PyObject *metrics, const ctpy_state *names)
{
    int failed;
    int64_t step;
    PyObject *answer = NULL;
    PyObject *hook = ctpy_get_optional(op, names->str__report_to_hp_search, &failed);
    if (hook == NULL) {
        return failed ? -1 : 0;
    }
    if (ctpy_field_int64(op, names->str_state, names->str_global_step, &step) == 0) {
        answer = PyObject_CallFunction(hook, "OLO", trial, (long long)step, metrics);
    }
    Py_DECREF(hook);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* args.metric_for_best_model with "eval_" before it; the loss where none is named. */
static PyObject *
metric_key(PyObject *op, const ctpy_state *names)
{
    PyObject *args = PyObject_GetAttr(op, names->str_args), *name = NULL, *key = NULL;
    if (args != NULL) {
        name = PyObject_GetAttr(args, names->str_metric_for_best_model);
        Py_DECREF(args);
    }
    if (name == Py_None) {
        Py_SETREF(name, Py_NewRef(names->str_loss));
    }
    if (name == NULL || !PyUnicode_Check(name)) {
        Py_XDECREF(name);
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_TypeError,
                                               "metric_for_best_model must be a str");
    }
    key = strncmp(PyUnicode_AsUTF8(name), "eval_", 5) == 0
              ? Py_NewRef(name)
              : PyUnicode_FromFormat("eval_%U", name);
    Py_DECREF(name);
    return key;
}

/* lr_scheduler.step(metric), for schedules such as ReduceLROnPlateau. */
static int
step_on_metric(PyObject *op, PyObject *metrics, const ctpy_state *names)
{
    PyObject *key = metric_key(op, names), *scheduler = NULL, *answer = NULL;
    PyObject *value = key == NULL ? NULL : PyObject_GetItem(metrics, key);
    if (value == NULL && key != NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear();
        PyObject *had = PySequence_List(metrics);
        PyErr_Format(PyExc_KeyError,
                     "the learning rate depends on the metric %R (from "
                     "metric_for_best_model), and evaluation gave only %S",
                     key, had == NULL ? Py_None : had);
        Py_XDECREF(had);
    }
    if (value != NULL &&
        (scheduler = PyObject_GetAttr(op, names->str_lr_scheduler)) != NULL) {
        answer = PyObject_CallMethodOneArg(scheduler, names->str_step, value);
    }
    Py_XDECREF(scheduler);
    Py_XDECREF(value);
    Py_XDECREF(key);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static const char Trainer__evaluate_doc[] =
    "_evaluate($self, trial, ignore_keys_for_eval, skip_scheduler=False)\n--\n\n"
    "Evaluate within a training: report to a search, and step a learning rate that\n"
    "depends on a metric. Return the metrics.";

static PyObject *
Trainer__evaluate(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"trial", "ignore_keys_for_eval", "skip_scheduler", NULL};
    const ctpy_state *names = ctpy_state_borrow(op);
    PyObject *trial, *ignore, *metrics;
    int skip = 0, on_metric;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|p:_evaluate", keywords, &trial,
                                     &ignore, &skip)) {
        return NULL;
    }
    PyObject *stack[] = {ignore};
    metrics =
        ctpy_call_adapted(op, names->str_evaluate, stack, 0, names->kw_ignore_keys);
    if (metrics == NULL) {
        return NULL;
    }
    if (report(op, trial, metrics, names) < 0 ||
        ctpy_get_bool(op, names->str__schedule_on_metric, &on_metric) < 0 ||
        (on_metric && !skip && step_on_metric(op, metrics, names) < 0)) {
        Py_CLEAR(metrics);
    }
    return metrics;
}

PyMethodDef Trainer_evaluate_evaluate_methods[] = {
    {"evaluate",     (PyCFunction)(void (*)(void))Trainer_evaluate,
     METH_VARARGS | METH_KEYWORDS,                                         Trainer_evaluate_doc    },
    {"predict",      (PyCFunction)(void (*)(void))Trainer_predict,
     METH_VARARGS | METH_KEYWORDS,                                         Trainer_predict_doc     },
    {"_evaluate",    (PyCFunction)(void (*)(void))Trainer__evaluate,
     METH_VARARGS | METH_KEYWORDS,                                         Trainer__evaluate_doc   },
    {"num_examples", (PyCFunction)(void (*)(void))Trainer_num_examples,
     METH_VARARGS | METH_KEYWORDS,                                         Trainer_num_examples_doc},
    {NULL,           NULL,                                              0, NULL                    },
};
