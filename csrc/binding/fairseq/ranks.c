/* FairseqTrainer on several ranks: what an update agrees on with the others. */
#include "binding/comm/communicator.h"
#include "binding/fairseq/trainer.h"

#include "core/base/alloc.h"

#include <math.h>

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

const char FairseqTrainer__check_grad_norms_doc[] =
    "_check_grad_norms($self, grad_norm, /)\n--\n\n"
    "Compare the norm with that of the other workers, on any device.\n\n"
    "Raises FloatingPointError, with a table of the norms, where they differ by more\n"
    "than 1e-6 of the first worker's: the parameters would drift apart.";

PyObject *
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
