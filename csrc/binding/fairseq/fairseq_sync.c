/* FairseqTrainer on several ranks: the sums and logs that they exchange.
 *
 * Sums travel in blocks of 64 doubles. The first has the extra sums, a description of
 * the keys that a rank logs, and the first of its values; where ranks log different
 * keys, or one has nothing to log, all see it there and exchange the logs themselves
 * instead: nobody waits in a collective that the others do not join. */
#include "binding/comm/communicator.h"
#include "binding/fairseq/trainer.h"

#include "core/base/alloc.h"
#include "core/base/crc32.h"

#include <string.h>

enum {
    BLOCK = 64,
    /* places in the first block */
    KNOWN = 0, /* 1: this rank knows its keys */
    HASH = 1,  /* of the keys, 16 bits: its squares add up exactly */
    HASH_SQUARED = 2,
    EXTRAS = 3
};

/* Ranks that are in different steps are told so: the sums are for the step that the
 * trainer is in. */
static int
sum_over_ranks(PyObject *op, double *values, size_t n)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const ct_label *step = &((FairseqTrainer *)op)->step;
    PyObject *group = PyObject_GetAttr(op, names->str__communicator);
    int failed = group == NULL ||
                 ctpy_comm_reduce_numbers(names, group, step->tag == 0 ? NULL : step,
                                          values, n, CT_REDUCE_SUM) < 0;
    Py_XDECREF(group);
    return failed ? -1 : 0;
}

/* ---- sums of logs ------------------------------------------------------------------
 */

/* The keys of the first log in order, so that all ranks have the same one. */
static PyObject *
sorted_keys(PyObject *logs)
{
    if (PyList_GET_SIZE(logs) == 0) {
        return PyList_New(0);
    }
    PyObject *keys = PySequence_List(PyList_GET_ITEM(logs, 0));
    if (keys != NULL && PyList_Sort(keys) < 0) {
        Py_CLEAR(keys);
    }
    return keys;
}

static int
hash_keys(PyObject *keys, double *hash)
{
    uint32_t crc = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys); i++) {
        Py_ssize_t n;
        const char *text = PyUnicode_AsUTF8AndSize(PyList_GET_ITEM(keys, i), &n);
        if (text == NULL) {
            return -1;
        }
        crc = ct_crc32(crc, text, (size_t)n + 1); /* with its NUL, which separates */
    }
    *hash = (double)(crc & 0xffff);
    return 0;
}

/* Adds log[key] where the log has it. */
static int
add_value(PyObject *log, PyObject *key, double *sum)
{
    int has = PySequence_Contains(log, key);
    PyObject *value = has < 1 ? NULL : PyObject_GetItem(log, key);
    PyObject *number = value == NULL ? NULL : PyNumber_Float(value);
    if (number != NULL) {
        *sum += PyFloat_AS_DOUBLE(number);
        Py_DECREF(number);
    }
    else if (value != NULL && !PyErr_ExceptionMatches(PyExc_MemoryError)) {
        PyErr_Format(PyExc_TypeError,
                     "the criterion logs a %.100s as %R, which cannot be summed over "
                     "workers; let its logging_outputs_can_be_summed() return False",
                     Py_TYPE(value)->tp_name, key);
    }
    Py_XDECREF(value);
    return has < 0 || PyErr_Occurred() ? -1 : 0;
}

static int
add_logs(PyObject *logs, PyObject *keys, double *sums)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(logs); i++) {
        for (Py_ssize_t k = 0; k < PyList_GET_SIZE(keys); k++) {
            if (add_value(PyList_GET_ITEM(logs, i), PyList_GET_ITEM(keys, k),
                          &sums[k]) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

static int
take_numbers(PyObject *tuple, double *to)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *number = PyNumber_Float(PyTuple_GET_ITEM(tuple, i));
        if (number == NULL) {
            return -1;
        }
        to[i] = PyFloat_AS_DOUBLE(number);
        Py_DECREF(number);
    }
    return 0;
}

static PyObject *
tuple_of(const double *values, Py_ssize_t n)
{
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) {
        PyObject *number = PyFloat_FromDouble(values[i]);
        if (number == NULL) {
            Py_CLEAR(tuple);
        }
        else {
            PyTuple_SET_ITEM(tuple, i, number);
        }
    }
    return tuple;
}

/* [{key: sum}] */
static PyObject *
log_of(PyObject *keys, const double *sums)
{
    PyObject *log = PyDict_New();
    for (Py_ssize_t k = 0; log != NULL && k < PyList_GET_SIZE(keys); k++) {
        PyObject *sum = PyFloat_FromDouble(sums[k]);
        if (sum == NULL || PyDict_SetItem(log, PyList_GET_ITEM(keys, k), sum) < 0) {
            Py_CLEAR(log);
        }
        Py_XDECREF(sum);
    }
    return log == NULL ? NULL : Py_BuildValue("[N]", log);
}

/* Do all ranks log the same keys? Every rank sees the same sums, so all agree on the
 * answer: hashes are equal if and only if the mean of their squares is the square of
 * their mean. */
static bool
all_alike(const double *block, double ranks)
{
    return block[KNOWN] == ranks &&
           ranks * block[HASH_SQUARED] == block[HASH] * block[HASH];
}

/* One sum of the first block, and of the rest where all ranks have the same keys. */
static int
exchange_sums(PyObject *op, double *values, size_t n, double ranks, bool *alike)
{
    if (sum_over_ranks(op, values, BLOCK) < 0) {
        return -1;
    }
    *alike = all_alike(values, ranks);
    return *alike && n > BLOCK ? sum_over_ranks(op, values + BLOCK, n - BLOCK) : 0;
}

static int
fill(PyObject *logs, PyObject *keys, PyObject *extras, bool ignore, double *values)
{
    double *sums = values + EXTRAS + PyTuple_GET_SIZE(extras);
    double hash;
    if (hash_keys(keys, &hash) < 0 || take_numbers(extras, values + EXTRAS) < 0) {
        return -1;
    }
    values[KNOWN] = PyList_GET_SIZE(logs) > 0;
    values[HASH] = hash;
    values[HASH_SQUARED] = hash * hash;
    return ignore ? 0 : add_logs(logs, keys, sums);
}

/* The result of the call: (logs, extras). */
static PyObject *
sync_sums(PyObject *op, PyObject *logs, PyObject *extras, bool ignore)
{
    const double ranks = (double)((FairseqTrainer *)op)->settings.world_size;
    const Py_ssize_t n_extras = PyTuple_GET_SIZE(extras);
    PyObject *keys = sorted_keys(logs), *made = NULL;
    if (keys == NULL) {
        return NULL;
    }
    const size_t used = (size_t)(EXTRAS + n_extras + PyList_GET_SIZE(keys));
    const size_t n = (used + BLOCK - 1) / BLOCK * BLOCK;
    double *values = ct_calloc(n, sizeof *values);
    bool alike = false;
    if (values == NULL) {
        (void)PyErr_NoMemory();
    }
    else if (fill(logs, keys, extras, ignore, values) == 0 &&
             exchange_sums(op, values, n, ranks, &alike) == 0) {
        PyObject *sums = alike ? log_of(keys, values + EXTRAS + n_extras) : NULL;
        if (!alike) {
            PyObject *stack[] = {ignore ? Py_None : logs};
            sums =
                ctpy_call_hook(op, ctpy_state_borrow(op)->str__gather_logs, stack, 1);
        }
        PyObject *more = tuple_of(values + EXTRAS, n_extras);
        made = sums != NULL && more != NULL ? PyTuple_Pack(2, sums, more) : NULL;
        Py_XDECREF(more);
        Py_XDECREF(sums);
    }
    ct_free(values);
    Py_DECREF(keys);
    return made;
}

/* ---- the methods -------------------------------------------------------------------
 */

/* (logging_outputs, *extras, ignore=False) */
static int
parse(PyObject *args, PyObject *kwargs, PyObject **logs, PyObject **extras, int *ignore)
{
    static char *names[] = {"ignore", NULL};
    PyObject *none = PyTuple_New(0);
    *ignore = false;
    *logs = *extras = NULL;
    if (PyTuple_GET_SIZE(args) < 1) {
        PyErr_SetString(PyExc_TypeError, "expected logging_outputs and numbers to sum");
    }
    else if (none != NULL &&
             PyArg_ParseTupleAndKeywords(none, kwargs, "|$p", names, ignore)) {
        *logs = PySequence_List(PyTuple_GET_ITEM(args, 0));
        *extras = PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args));
    }
    Py_XDECREF(none);
    if (*logs != NULL && *extras != NULL &&
        EXTRAS + PyTuple_GET_SIZE(*extras) > BLOCK) {
        PyErr_Format(PyExc_ValueError, "cannot sum %zd numbers beside logs; at most %d",
                     PyTuple_GET_SIZE(*extras), BLOCK - EXTRAS);
        Py_CLEAR(*logs);
    }
    if (*logs == NULL || *extras == NULL) {
        Py_CLEAR(*logs);
        Py_CLEAR(*extras);
        return -1;
    }
    return 0;
}

const char FairseqTrainer__fast_stat_sync_sum_doc[] =
    "_fast_stat_sync_sum($self, logging_outputs, /, *extra_stats_to_sum, "
    "ignore=False)\n--\n\n"
    "Return ([sums of the logs], sums of the extra numbers) over all workers.\n\n"
    "One collective; a worker that ignores its logs adds zeros. Workers that log\n"
    "different keys get the logs themselves instead.";

PyObject *
FairseqTrainer__fast_stat_sync_sum(PyObject *op, PyObject *args, PyObject *kwargs)
{
    PyObject *logs, *extras, *made;
    int ignore;
    if (parse(args, kwargs, &logs, &extras, &ignore) < 0) {
        return NULL;
    }
    made = sync_sums(op, logs, extras, ignore);
    Py_DECREF(extras);
    Py_DECREF(logs);
    return made;
}

const char FairseqTrainer__all_gather_list_sync_doc[] =
    "_all_gather_list_sync($self, logging_outputs, /, *extra_stats_to_sum, "
    "ignore=False)\n--\n\n"
    "Return (the logs of all workers, sums of the extra numbers).\n\n"
    "Logs are plain data: containers, numbers, text, tensors and arrays, of any size.";

PyObject *
FairseqTrainer__all_gather_list_sync(PyObject *op, PyObject *args, PyObject *kwargs)
{
    PyObject *logs, *extras, *all = NULL, *sums = NULL, *made = NULL;
    double numbers[BLOCK] = {0};
    int ignore;
    if (parse(args, kwargs, &logs, &extras, &ignore) < 0) {
        return NULL;
    }
    PyObject *stack[] = {ignore ? Py_None : logs};
    if (take_numbers(extras, numbers) == 0 && sum_over_ranks(op, numbers, BLOCK) == 0) {
        sums = tuple_of(numbers, PyTuple_GET_SIZE(extras));
        all = ctpy_call_hook(op, ctpy_state_borrow(op)->str__gather_logs, stack, 1);
    }
    if (sums != NULL && all != NULL) {
        made = PyTuple_Pack(2, all, sums);
    }
    Py_XDECREF(all);
    Py_XDECREF(sums);
    Py_DECREF(extras);
    Py_DECREF(logs);
    return made;
}

/* type(task).logging_outputs_can_be_summed(criterion) */
static int
can_be_summed(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *task = PyObject_GetAttr(op, names->str_task);
    PyObject *criterion = PyObject_CallMethodNoArgs(op, names->str_get_criterion);
    PyObject *answer = NULL;
    if (task != NULL && criterion != NULL) {
        answer = PyObject_CallMethodOneArg((PyObject *)Py_TYPE(task),
                                           names->str_logging_outputs_can_be_summed,
                                           criterion);
    }
    int yes = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    Py_XDECREF(criterion);
    Py_XDECREF(task);
    return yes;
}

const char FairseqTrainer__aggregate_logging_outputs_doc[] =
    "_aggregate_logging_outputs($self, logging_outputs, /, *extra_stats_to_sum, "
    "ignore=False)\n--\n\n"
    "Return (logs, sums of the extra numbers) over all workers: the logs summed where\n"
    "the task says that the criterion's can be, else all of them.";

PyObject *
FairseqTrainer__aggregate_logging_outputs(PyObject *op, PyObject *args,
                                          PyObject *kwargs)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int summed = can_be_summed(op);
    PyObject *method =
        summed < 0 ? NULL
                   : PyObject_GetAttr(op, summed ? names->str__fast_stat_sync_sum
                                                 : names->str__all_gather_list_sync);
    PyObject *made = method == NULL ? NULL : PyObject_Call(method, args, kwargs);
    Py_XDECREF(method);
    return made;
}
