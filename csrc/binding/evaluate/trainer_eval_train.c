/* Trainer: where evaluation and training meet. */
#include "binding/evaluate/evaluate.h"

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

const char Trainer_num_examples_doc[] =
    "num_examples($self, dataloader)\n--\n\n"
    "Return the length of the loader's data set; without one, batches times\n"
    "per_device_train_batch_size. Raises TypeError when the loader has no length.";

PyObject *
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

const char Trainer__evaluate_doc[] =
    "_evaluate($self, trial, ignore_keys_for_eval, skip_scheduler=False)\n--\n\n"
    "Evaluate within a training: report to a search, and step a learning rate that\n"
    "depends on a metric. Return the metrics.";

PyObject *
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
