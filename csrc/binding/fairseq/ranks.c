/* FairseqTrainer on several ranks: what an update agrees on with the others. */
#include "binding/comm/communicator.h"
#include "binding/fairseq/trainer.h"

#include "core/base/alloc.h"
#include "core/base/crc.h"

#include <math.h>
#include <string.h>

/* ---- the sums of an update ---------------------------------------------------------
 */

static int
should_sync(PyObject *op)
{
    PyObject *answer =
        PyObject_CallMethodNoArgs(op, ctpy_state_borrow(op)->str__sync_stats);
    int yes = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return yes;
}

/* Names the step whose sums are exchanged next: ranks that are in another one, or have
 * another number of samples, have different data. */
static int
name_step(PyObject *op, const char *format, Py_ssize_t samples)
{
    ct_label *step = &((FairseqTrainer *)op)->step;
    char name[sizeof step->name];
    int64_t updates;
    if (ctpy_get_int64(op, ctpy_state_borrow(op)->str__num_updates, &updates) < 0) {
        return -1;
    }
    (void)PyOS_snprintf(name, sizeof name, format, (long long)updates,
                        (long long)samples);
    ct_label_set(step, name, 0);
    step->is_step = true;
    return 0;
}

/* op._aggregate_logging_outputs(logs, *extras, ignore=...) as its two parts. */
static int
aggregate(PyObject *op, PyObject *logs, PyObject *extras, bool ignore,
          PyObject **all_logs, PyObject **sums)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *method = PyObject_GetAttr(op, names->str__aggregate_logging_outputs);
    PyObject *first = PyTuple_Pack(1, logs), *kwargs = PyDict_New(), *pair = NULL;
    PyObject *args = first == NULL ? NULL : PySequence_Concat(first, extras);
    if (method != NULL && args != NULL && kwargs != NULL &&
        PyDict_SetItem(kwargs, names->str_ignore, ignore ? Py_True : Py_False) == 0) {
        pair = PyObject_Call(method, args, kwargs);
    }
    ((FairseqTrainer *)op)->step.tag = 0;
    int failed = pair == NULL || !PyArg_ParseTuple(pair, "OO", all_logs, sums);
    if (!failed) {
        *all_logs = PySequence_List(*all_logs);
        *sums = PySequence_Tuple(*sums);
        failed = *all_logs == NULL || *sums == NULL;
        if (failed) {
            Py_CLEAR(*all_logs);
            Py_CLEAR(*sums);
        }
    }
    Py_XDECREF(pair);
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    Py_XDECREF(first);
    Py_XDECREF(method);
    return failed ? -1 : 0;
}

/* Takes the sums over: sample size, samples without memory, seconds and real samples.
 */
static int
take_sums(PyObject *op, fairseq_update *u, PyObject *logs, PyObject *sums)
{
    double size, ooms, seconds, real;
    if (!PyArg_ParseTuple(sums, "dddd", &size, &ooms, &seconds, &real)) {
        return -1;
    }
    PyObject *total = PyFloat_FromDouble(size);
    if (total == NULL) {
        return -1;
    }
    Py_SETREF(u->sample_size, total);
    u->ooms = (int64_t)ooms;
    u->real = (int64_t)real;
    if (u->real > 0) { /* else the dummies stand for themselves */
        Py_SETREF(u->outputs, Py_NewRef(logs));
    }
    const double ranks = (double)((FairseqTrainer *)op)->settings.world_size;
    return ctpy_set_double(op, ctpy_state_borrow(op)->str__cumulative_training_time,
                           seconds / ranks);
}

int
fairseq_sync_update(PyObject *op, fairseq_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    const bool original = ((FairseqTrainer *)op)->settings.original_dummies;
    const Py_ssize_t own = PyList_GET_SIZE(u->outputs);
    PyObject *logs = NULL, *sums = NULL;
    u->real = own;
    int syncs = ((FairseqTrainer *)op)->settings.world_size > 1 ? should_sync(op) : 0;
    if (syncs < 1) {
        return syncs;
    }
    PyObject *seconds =
        PyObject_CallMethodNoArgs(op, names->str__local_cumulative_training_time);
    PyObject *extras =
        seconds == NULL
            ? NULL
            : Py_BuildValue("(OLNn)", u->sample_size, (long long)u->ooms, seconds, own);
    const bool ignore = own == 0 || (u->last_is_dummy && original);
    int failed =
        extras == NULL ||
        name_step(op, "train_step() after %lld updates (number of samples: %lld)",
                  PyList_GET_SIZE(u->samples)) < 0 ||
        aggregate(op, own > 0 ? u->outputs : u->dummies, extras, ignore, &logs, &sums) <
            0;
    Py_XDECREF(extras);
    if (!failed) {
        u->synced = true;
        failed = take_sums(op, u, logs, sums) < 0;
        Py_DECREF(logs);
        Py_DECREF(sums);
    }
    return failed ? -1 : 0;
}

int
fairseq_sync_valid(PyObject *op, PyObject **logs, PyObject **sample_size, bool dummy)
{
    PyObject *all = NULL, *sums = NULL;
    if (((FairseqTrainer *)op)->settings.world_size == 1) {
        return 0;
    }
    PyObject *extras = PyTuple_Pack(1, *sample_size);
    int failed = extras == NULL ||
                 name_step(op, "valid_step() after %lld updates", 0) < 0 ||
                 aggregate(op, *logs, extras, dummy, &all, &sums) < 0;
    Py_XDECREF(extras);
    if (failed) {
        return -1;
    }
    Py_SETREF(*logs, all);
    PyObject *size = PySequence_GetItem(sums, 0);
    Py_DECREF(sums);
    if (size == NULL) {
        return -1;
    }
    Py_SETREF(*sample_size, size);
    return 0;
}

/* ---- the norms of all ranks --------------------------------------------------------
 */

static PyObject *
table_of(const double *norms, int64_t ranks)
{
    PyObject *lines = PyList_New(0), *end = PyUnicode_FromString("\n"), *table = NULL;
    int failed = lines == NULL || end == NULL;
    for (int64_t r = 0; !failed && r < ranks; r++) {
        char text[64];
        (void)PyOS_snprintf(text, sizeof text, "rank %3d = %.8f", (int)r, norms[r]);
        PyObject *line = PyUnicode_FromString(text);
        failed = line == NULL || PyList_Append(lines, line) < 0;
        Py_XDECREF(line);
    }
    if (!failed) {
        table = PyUnicode_Join(end, lines);
    }
    Py_XDECREF(end);
    Py_XDECREF(lines);
    return table;
}

static int
raise_inconsistent(const double *norms, int64_t ranks)
{
    static const char rule[] =
        "--------------------------------------------------------"
        "------------------------";
    PyObject *table = table_of(norms, ranks);
    if (table != NULL) {
        PyErr_Format(PyExc_FloatingPointError,
                     "Fatal error: gradients are inconsistent between workers. Try "
                     "--ddp-backend=legacy_ddp. Or are you mixing up different "
                     "generation of GPUs in training?\n%s\ngrad_norm across the "
                     "workers:\n%U\n\n%s",
                     rule, table, rule);
        Py_DECREF(table);
    }
    return -1;
}

/* All norms are finite and those of rank 0 to 1e-6 of it, or all are not finite: that
 * is told of otherwise. amp lets some be. */
static bool
consistent(const double *norms, int64_t ranks, bool amp)
{
    int64_t finite = 0;
    bool near = true;
    for (int64_t r = 0; r < ranks; r++) {
        finite += isfinite(norms[r]) != 0;
        near = near && fabs(norms[r] - norms[0]) / (norms[0] + 1e-6) < 1e-6;
    }
    return finite == ranks ? near : finite == 0 || amp;
}

static int
gather_norms(PyObject *op, double norm, double *norms, int64_t ranks)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *group = PyObject_GetAttr(op, names->str__communicator);
    const ct_request request = {
        .what = CT_ALL_GATHER,
        .in = {&norm, 1,             CT_F64},
        .out = {norms, (size_t)ranks, CT_F64},
    };
    int failed = group == NULL || ctpy_comm_run(names, group, &request) < 0;
    Py_XDECREF(group);
    return failed ? -1 : 0;
}

static const char FairseqTrainer__check_grad_norms_doc[] =
    "_check_grad_norms($self, grad_norm, /)\n--\n\n"
    "Compare the norm with that of the other workers, on any device.\n\n"
    "Raises FloatingPointError, with a table of the norms, where they differ by more\n"
    "than 1e-6 of the first worker's: the parameters would drift apart.";

static PyObject *
FairseqTrainer__check_grad_norms(PyObject *op, PyObject *grad_norm)
{
    const fairseq_settings *s = &((FairseqTrainer *)op)->settings;
    const double norm = PyFloat_AsDouble(grad_norm);
    if (norm == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    if (s->world_size == 1) {
        Py_RETURN_NONE;
    }
    double *norms = ct_calloc((size_t)s->world_size, sizeof *norms);
    if (norms == NULL) {
        return PyErr_NoMemory();
    }
    int failed = gather_norms(op, norm, norms, s->world_size) < 0;
    if (!failed && !consistent(norms, s->world_size, s->amp != 0)) {
        failed = raise_inconsistent(norms, s->world_size) < 0;
    }
    ct_free(norms);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* ---- the exchange of gradients during the backward pass ----------------------------
 */

/* model.no_sync() entered, NULL where it has none: its exchange of gradients waits for
 * the last sample of an update. */
int
fairseq_no_sync(PyObject *op, PyObject **context)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *model = PyObject_GetAttr(op, names->str_model), *method = NULL;
    int has = model == NULL ? -1 : ctpy_lookup(model, names->str_no_sync, &method);
    *context = NULL;
    if (has > 0) {
        *context = PyObject_CallNoArgs(method);
        PyObject *entered =
            *context == NULL
                ? NULL
                : PyObject_CallMethodNoArgs(*context, names->str___enter__);
        if (entered == NULL) {
            Py_CLEAR(*context);
            has = -1;
        }
        Py_XDECREF(entered);
    }
    Py_XDECREF(method);
    Py_XDECREF(model);
    return has < 0 ? -1 : 0;
}

int
fairseq_exchanges_early(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    if (((FairseqTrainer *)op)->settings.world_size == 1) {
        return 0;
    }
    PyObject *model = PyObject_GetAttr(op, names->str_model), *method = NULL;
    int late =
        model == NULL ? -1 : ctpy_lookup(model, names->str_all_reduce_grads, &method);
    Py_XDECREF(method);
    Py_XDECREF(model);
    return late < 0 ? -1 : !late;
}

/* FairseqTrainer on several ranks: the sums and logs that they exchange.
 *
 * Sums travel in blocks of 64 doubles. The first has the extra sums, a description of
 * the keys that a rank logs, and the first of its values; where ranks log different
 * keys, or one has nothing to log, all see it there and exchange the logs themselves
 * instead: nobody waits in a collective that the others do not join. */

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

static const char FairseqTrainer__fast_stat_sync_sum_doc[] =
    "_fast_stat_sync_sum($self, logging_outputs, /, *extra_stats_to_sum, "
    "ignore=False)\n--\n\n"
    "Return ([sums of the logs], sums of the extra numbers) over all workers.\n\n"
    "One collective; a worker that ignores its logs adds zeros. Workers that log\n"
    "different keys get the logs themselves instead.";

static PyObject *
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

static const char FairseqTrainer__all_gather_list_sync_doc[] =
    "_all_gather_list_sync($self, logging_outputs, /, *extra_stats_to_sum, "
    "ignore=False)\n--\n\n"
    "Return (the logs of all workers, sums of the extra numbers).\n\n"
    "Logs are plain data: containers, numbers, text, tensors and arrays, of any size.";

static PyObject *
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

static const char FairseqTrainer__aggregate_logging_outputs_doc[] =
    "_aggregate_logging_outputs($self, logging_outputs, /, *extra_stats_to_sum, "
    "ignore=False)\n--\n\n"
    "Return (logs, sums of the extra numbers) over all workers: the logs summed where\n"
    "the task says that the criterion's can be, else all of them.";

static PyObject *
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

PyMethodDef FairseqTrainer_fairseq_ranks_methods[] = {
    {"_check_grad_norms",          FairseqTrainer__check_grad_norms,         METH_O,
     FairseqTrainer__check_grad_norms_doc                                                                                         },
    {"_aggregate_logging_outputs",
     (PyCFunction)(void (*)(void))FairseqTrainer__aggregate_logging_outputs,
     METH_VARARGS | METH_KEYWORDS,                                                   FairseqTrainer__aggregate_logging_outputs_doc},
    {"_all_gather_list_sync",
     (PyCFunction)(void (*)(void))FairseqTrainer__all_gather_list_sync,
     METH_VARARGS | METH_KEYWORDS,                                                   FairseqTrainer__all_gather_list_sync_doc     },
    {"_fast_stat_sync_sum",
     (PyCFunction)(void (*)(void))FairseqTrainer__fast_stat_sync_sum,
     METH_VARARGS | METH_KEYWORDS,                                                   FairseqTrainer__fast_stat_sync_sum_doc       },
    {NULL,                         NULL,                                     0,      NULL                                         },
};
