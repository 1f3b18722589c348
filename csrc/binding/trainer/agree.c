/* Agreement of the ranks of a Trainer before, in and after an update: on the number of
 * batches, on whether gradients are finite, and on what callbacks and signals request.
 * Each rank takes part in each agreement, in the same order, or every rank raises. */
#include "binding/trainer/trainer.h"
#include "binding/engine/targets.h"
#include "binding/data/gather.h"
#include "binding/engine/ranks.h"

#include <string.h>

/* ---- before: batches and targets ------------------------------------------------- */

static int
warn_left_over(PyObject *op, Py_ssize_t batches, int64_t without)
{
    int64_t step;
    ctpy_state *names = ctpy_state_borrow(op);
    if (ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0) {
        return -1;
    }
    return PyErr_WarnFormat(
        PyExc_UserWarning, 1,
        "the epoch ends after step %lld, where %lld of %d ranks have no batch left; "
        "%zd batches of rank %d are not trained on. even_batches in accelerator_config "
        "gives all ranks equally many",
        (long long)step, (long long)without, ctpy_trainer_world_size(op), batches,
        ctpy_trainer_comm_borrow(op)->rank);
}

/* The hook _ranks_differ raises for different numbers of batches, unless the arguments
 * allow them. */
static int
report_batches(PyObject *op, Py_ssize_t n)
{
    int64_t step;
    ctpy_state *names = ctpy_state_borrow(op);
    if (ctpy_field_int64(op, names->str_state, names->str_global_step, &step) < 0) {
        return -1;
    }
    PyObject *what = PyUnicode_FromFormat(
        "the ranks have different numbers of batches for update %lld",
        (long long)step + 1);
    PyObject *own = PyUnicode_FromFormat("has %zd", n), *answer = NULL;
    if (what != NULL && own != NULL) {
        PyObject *stack[] = {op, what, own};
        answer = PyObject_VectorcallMethod(names->str__ranks_differ, stack, 3, NULL);
    }
    Py_XDECREF(own);
    Py_XDECREF(what);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

int
ctpy_ranks_begin(PyObject *op, ctpy_run *run, PyObject *batches, bool *enough)
{
    enum {
        WITHOUT,
        TARGETS,
        UNCOUNTED,
        BATCHES,
        SQUARES, /* of their numbers: those are alike where none is above the mean */
        COUNT
    };
    ctpy_state *names = ctpy_state_borrow(op);
    const Py_ssize_t n = PyList_GET_SIZE(batches);
    const int ranks = ctpy_trainer_world_size(op);
    int64_t values[COUNT] = {n == 0, 0, 0, n, n * n};
    int counts, failed = 0;
    run->targets = -1;
    *enough = n > 0;
    if (ranks <= 1) {
        return ranks < 0 ? -1 : 0;
    }
    if (ctpy_field_bool(op, names->str_args, names->str_average_tokens_across_devices,
                        &counts) < 0) {
        return -1;
    }
    const int64_t targets = counts ? ctpy_count_batches(op, batches, &failed) : -1;
    values[TARGETS] = targets < 0 ? 0 : targets;
    values[UNCOUNTED] = targets < 0;
    if (failed || ctpy_trainer_sum(op, values, COUNT) < 0) {
        return -1;
    }
    if (values[SQUARES] * ranks != values[BATCHES] * values[BATCHES] &&
        report_batches(op, n) < 0) {
        return -1;
    }
    *enough = values[WITHOUT] == 0;
    if (values[UNCOUNTED] == 0 && values[TARGETS] > 0) {
        run->targets = values[TARGETS];
    }
    return *enough || n == 0 ? 0 : warn_left_over(op, n, values[WITHOUT]);
}

/* ---- in: finite gradients -------------------------------------------------------- */

int
ctpy_ranks_agree_finite(PyObject *op, bool *finite)
{
    double value = *finite ? 1.0 : 0.0;
    if (ctpy_trainer_reduce(op, &value, 1, CT_REDUCE_MIN) < 0) {
        return -1;
    }
    *finite = value > 0.0;
    return 0;
}

/* ---- after: requests of callbacks and signals ------------------------------------ */

enum {
    LOG,
    EVALUATE,
    SAVE,
    EPOCH_STOP,
    TRAINING_STOP,
    SIGNAL,
    WISHES
};

static int
read_wishes(PyObject *control, PyObject *const *fields, double *wishes)
{
    for (int i = 0; i < SIGNAL; i++) {
        int value;
        if (ctpy_get_bool(control, fields[i], &value) < 0) {
            return -1;
        }
        wishes[i] = value;
    }
    wishes[SIGNAL] = ctpy_signal_requested();
    return 0;
}

static int
grant_wishes(PyObject *control, PyObject *const *fields, const double *had,
             const double *wishes)
{
    for (int i = 0; i < SIGNAL; i++) {
        if (wishes[i] > had[i] && PyObject_SetAttr(control, fields[i], Py_True) < 0) {
            return -1;
        }
    }
    return 0;
}

/* A request of one rank's control (to log, evaluate, save or stop), or a signal that
 * one rank has received, becomes the request of all ranks. *due: some rank logs,
 * evaluates or saves, and callbacks of the other ranks will see the request; false with
 * one rank.
 */
static int
ctpy_ranks_agree(PyObject *op, bool *due)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    PyObject *const fields[] = {names->str_should_log, names->str_should_evaluate,
                                names->str_should_save, names->str_should_epoch_stop,
                                names->str_should_training_stop};
    const int ranks = ctpy_trainer_world_size(op);
    double wishes[WISHES], had[WISHES];
    *due = false;
    if (ranks <= 1) {
        return ranks < 0 ? -1 : 0;
    }
    PyObject *control = PyObject_GetAttr(op, names->str_control);
    int result = control == NULL ? -1 : read_wishes(control, fields, wishes);
    if (result == 0) {
        memcpy(had, wishes, sizeof had);
        result = ctpy_trainer_reduce(op, wishes, WISHES, CT_REDUCE_MAX);
    }
    if (result == 0) {
        result = grant_wishes(control, fields, had, wishes);
        ctpy_signal_request((int)wishes[SIGNAL]);
        ((Trainer *)op)->agreed_signal = (int)wishes[SIGNAL];
        *due = wishes[LOG] > 0.0 || wishes[EVALUATE] > 0.0 || wishes[SAVE] > 0.0;
    }
    Py_XDECREF(control);
    return result;
}

int
ctpy_do_what_is_due(PyObject *op, ctpy_run *run, PyObject *learning_rate)
{
    bool due;
    if (ctpy_ranks_agree(op, &due) < 0 ||
        ctpy_log_save_evaluate(op, run, learning_rate) < 0) {
        return -1;
    }
    return due ? ctpy_ranks_agree(op, &due) : 0;
}

bool
ctpy_ranks_stop(PyObject *op)
{
    const Trainer *self = (const Trainer *)op;
    return ctpy_trainer_is_alone(op) ? ctpy_stop_requested() : self->agreed_signal != 0;
}

/* ---- accumulation ---------------------------------------------------------------- */

int
ctpy_enter_no_sync(PyObject *op, PyObject *model, PyObject **context)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const int ranks = ctpy_trainer_world_size(op);
    PyObject *method;
    *context = NULL;
    if (ranks <= 1 || ((Trainer *)op)->syncs_each_batch) {
        return ranks < 0 ? -1 : 0;
    }
    const int has = ctpy_lookup(model, names->str_no_sync, &method);
    if (has <= 0) {
        return has;
    }
    *context =
        ctpy_enter_context_steal(PyObject_CallNoArgs(method), names->str___enter__);
    Py_DECREF(method);
    return *context == NULL ? -1 : 0;
}

/* ---- hooks by which subclasses gather over the ranks ----------------------------- */

/* The rows of all ranks, without the rows of a dummy batch; `value` itself on one rank.
 */
static PyObject *
gather(PyObject *op, PyObject *value)
{
    ctpy_state *state = ctpy_state_borrow(op);
    const int ranks = ctpy_trainer_world_size(op);
    if (ranks <= 1 || value == Py_None) {
        return ranks < 0 ? NULL : Py_NewRef(value);
    }
    PyObject *group = Py_NewRef(((Trainer *)op)->rank_group), *result = NULL;
    PyObject *padding = PyLong_FromLong(-100);
    if (padding != NULL) {
        result = ctpy_gather_nested(state, group, value, padding,
                                    !((Trainer *)op)->dummy_batch);
        Py_DECREF(padding);
    }
    Py_DECREF(group);
    return result;
}

static const char Trainer_gather_function_doc[] =
    "gather_function($self, input_data, use_gather_object=False)\n--\n\n"
    "Return the rows that all ranks have of nested tensors, each row once, in rank\n"
    "order; what is given, where there is one rank. All ranks have to call it.\n\n"
    "Shorter rows are filled with -100. use_gather_object changes nothing: other\n"
    "objects travel pickled anyway. A function that is assigned to this name takes\n"
    "its place in evaluation; the loop then does not gather what it returns.";

static PyObject *
Trainer_gather_function(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"input_data", "use_gather_object", NULL};
    PyObject *value;
    int objects = 0;
    return PyArg_ParseTupleAndKeywords(args, kwargs, "O|p:gather_function", keywords,
                                       &value, &objects)
               ? gather(op, value)
               : NULL;
}

static const char Trainer__nested_gather_doc[] =
    "_nested_gather($self, tensors, name=None)\n--\n\n"
    "Do what gather_function does, by the name it had in older releases.";

static PyObject *
Trainer__nested_gather(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"tensors", "name", NULL};
    PyObject *value, *name = Py_None;
    return PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:_nested_gather", keywords,
                                       &value, &name)
               ? gather(op, value)
               : NULL;
}

PyMethodDef Trainer_trainer_agree_methods[] = {
    {"gather_function", (PyCFunction)(void (*)(void))Trainer_gather_function,
     METH_VARARGS | METH_KEYWORDS,                                               Trainer_gather_function_doc},
    {"_nested_gather",  (PyCFunction)(void (*)(void))Trainer__nested_gather,
     METH_VARARGS | METH_KEYWORDS,                                               Trainer__nested_gather_doc },
    {NULL,              NULL,                                                 0, NULL                       },
};
