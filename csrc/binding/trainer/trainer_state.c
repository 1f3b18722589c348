/* Trainer: log(), the learning rate, and counting work. */
#include "binding/runtime/nested.h"
#include "binding/engine/ranks.h"

/* logs["epoch"] = state.epoch, and the tokens seen where they are counted. */
static int
add_progress(PyObject *op, PyObject *logs, PyObject *state, PyObject *start_time)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int counted, result = 0;
    PyObject *epoch = PyObject_GetAttr(state, names->str_epoch);
    if (epoch == NULL || ctpy_get_bool(op, names->str__counts_tokens, &counted) < 0) {
        Py_XDECREF(epoch);
        return -1;
    }
    if (epoch != Py_None) {
        result = PyObject_SetItem(logs, names->str_epoch, epoch);
    }
    Py_DECREF(epoch);
    if (result == 0 && counted) {
        PyObject *answer =
            PyObject_CallMethod(op, "_log_tokens", "OO", logs, start_time);
        Py_XDECREF(answer);
        result = answer == NULL ? -1 : 0;
    }
    return result;
}

/* Appends {**logs, "step": global_step} to the history. */
static int
append_history(PyObject *state, PyObject *logs, ctpy_state *names)
{
    PyObject *entry = PyDict_New(), *step = NULL, *history = NULL, *answer = NULL;
    if (entry != NULL && PyDict_Update(entry, logs) == 0 &&
        (step = PyObject_GetAttr(state, names->str_global_step)) != NULL &&
        PyDict_SetItem(entry, names->str_step, step) == 0 &&
        (history = PyObject_GetAttr(state, names->str_log_history)) != NULL) {
        answer = PyObject_CallMethodOneArg(history, names->str_append, entry);
    }
    Py_XDECREF(history);
    Py_XDECREF(step);
    Py_XDECREF(entry);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

const char Trainer_log_doc[] =
    "log($self, logs, start_time=None)\n--\n\n"
    "Add logs, a dict of numbers, to state.log_history and fire on_log.\n\n"
    "'epoch' is added to logs, and the tokens seen where they are counted; start_time\n"
    "is the start of training in seconds since the epoch.";

PyObject *
Trainer_log(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"logs", "start_time", NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *logs, *start_time = Py_None, *extra = NULL;
    int result = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:log", keywords, &logs,
                                     &start_time)) {
        return NULL;
    }
    PyObject *state = PyObject_GetAttr(op, names->str_state);
    if (state != NULL && add_progress(op, logs, state, start_time) == 0 &&
        append_history(state, logs, names) == 0 && (extra = PyDict_New()) != NULL &&
        PyDict_SetItem(extra, names->str_logs, logs) == 0) {
        result = ctpy_trainer_fire(op, names->str_on_log, extra);
    }
    Py_XDECREF(extra);
    Py_XDECREF(state);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* optimizer.param_groups[0]["lr"] */
static PyObject *
first_group_lr(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *rate = NULL, *group = NULL, *groups = NULL;
    PyObject *optimizer = PyObject_GetAttr(op, names->str_optimizer);
    if (optimizer != NULL &&
        (groups = PyObject_GetAttr(optimizer, names->str_param_groups)) != NULL &&
        (group = PySequence_GetItem(groups, 0)) != NULL) {
        rate = PyObject_GetItem(group, names->str_lr);
    }
    Py_XDECREF(group);
    Py_XDECREF(groups);
    Py_XDECREF(optimizer);
    return rate;
}

static PyObject *
last_scheduled_lr(PyObject *scheduler, ctpy_state *names)
{
    PyObject *all = PyObject_CallMethodNoArgs(scheduler, names->str_get_last_lr);
    if (all == NULL) {
        return NULL;
    }
    PyObject *rate = PySequence_GetItem(all, 0);
    Py_DECREF(all);
    return rate;
}

const char Trainer__get_learning_rate_doc[] =
    "_get_learning_rate($self, /)\n--\n\n"
    "Return the learning rate of the first parameter group's last update, a float.";

PyObject *
Trainer__get_learning_rate(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    int on_metric;
    PyObject *rate, *scheduler = PyObject_GetAttr(op, names->str_lr_scheduler);
    if (scheduler == NULL ||
        ctpy_get_bool(op, names->str__schedule_on_metric, &on_metric) < 0) {
        Py_XDECREF(scheduler);
        return NULL;
    }
    rate = on_metric || scheduler == Py_None ? first_group_lr(op)
                                             : last_scheduled_lr(scheduler, names);
    Py_DECREF(scheduler);
    if (rate == NULL || PyFloat_CheckExact(rate)) {
        return rate;
    }
    Py_SETREF(rate, PyNumber_Float(rate)); /* a tensor, or an int */
    return rate;
}

const char Trainer_floating_point_ops_doc[] =
    "floating_point_ops($self, inputs)\n--\n\n"
    "Return the estimated operations of forward and backward on inputs: 6 times the\n"
    "tokens times the parameters without embeddings; 0 for a model that cannot say, "
    "and\n"
    "for a batch without the model's main input by name.";

PyObject *
Trainer_floating_point_ops(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"inputs", NULL};
    ctpy_state *names = ctpy_state_borrow(op);
    double factor, n = 0.0;
    int failed = 0;
    PyObject *inputs, *main_input = NULL, *found = NULL, *numel = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:floating_point_ops", keywords,
                                     &inputs) ||
        ctpy_get_double(op, names->str__flos_per_token, &factor) < 0) {
        return NULL;
    }
    if (factor != 0.0 &&
        (main_input = PyObject_GetAttr(op, names->str__main_input_name)) != NULL) {
        found = ctpy_batch_entry(inputs, main_input, &failed);
        numel =
            found == NULL ? NULL : ctpy_get_optional(found, names->str_numel, &failed);
        if (numel != NULL) {
            Py_SETREF(numel, PyObject_CallNoArgs(numel));
            n = numel == NULL ? 0.0 : PyFloat_AsDouble(numel);
        }
    }
    Py_XDECREF(numel);
    Py_XDECREF(found);
    Py_XDECREF(main_input);
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(factor * n);
}

/* Adds what was counted on all ranks to a total of the state, and begins to count
 * anew. */
static int
add_counted(PyObject *op, PyObject *name, PyObject *total_name, int as_int)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *state = NULL, *sum = NULL;
    double counted, total;
    int result = -1;
    if (ctpy_get_double(op, name, &counted) < 0 ||
        ctpy_trainer_reduce(op, &counted, 1, CT_REDUCE_SUM) < 0 ||
        (state = PyObject_GetAttr(op, names->str_state)) == NULL ||
        ctpy_get_double(state, total_name, &total) < 0) {
        goto done;
    }
    if (counted == 0.0) {
        result = 0;
        goto done;
    }
    total += counted;
    sum = as_int ? PyLong_FromDouble(total) : PyFloat_FromDouble(total);
    if (sum != NULL && PyObject_SetAttr(state, total_name, sum) == 0) {
        result = ctpy_set_double(op, name, 0.0);
    }
done:
    Py_XDECREF(sum);
    Py_XDECREF(state);
    return result;
}

const char Trainer_store_flos_doc[] =
    "store_flos($self, /)\n--\n\n"
    "Move the operations counted since the last call, by all ranks, into\n"
    "state.total_flos, and their tokens into state.num_input_tokens_seen.\n\n"
    "All ranks have to call it.";

PyObject *
Trainer_store_flos(PyObject *op, PyObject *Py_UNUSED(unused))
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (add_counted(op, names->str_current_flos, names->str_total_flos, 0) < 0 ||
        add_counted(op, names->str__counted_tokens, names->str_num_input_tokens_seen,
                    1) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}
