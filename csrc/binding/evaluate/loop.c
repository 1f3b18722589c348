/* Trainer: the batches of an evaluation, run and brought into host memory.
 *
 * Python's evaluation_loop prepares the model and computes the metrics; `take` runs
 * prediction_step on a batch; here the values go into the sinks. Sums of losses are in
 * double. On several ranks Python's `exchange` gives the batches of all, in rank order.
 */
#include "binding/callbacks/handler.h"
#include "binding/engine/parts.h"
#include "binding/engine/run.h"
#include "binding/runtime/buffer.h"
#include "binding/runtime/ctpy.h"

/* The values of a batch that are kept. */
enum {
    PREDICTIONS,
    LABELS,
    INPUTS,
    KINDS
};

/* A batch that has run: the fields of the tuple that the batch is kept as, borrowed.
 * None for what is absent. */
typedef struct eval_batch {
    PyObject *values[KINDS];
    PyObject *whole; /* the model's inputs, for compute_metrics by batch */
    PyObject *loss;
    Py_ssize_t rows;   /* 0: a dummy batch, for the collectives of other ranks */
    long long targets; /* labels that count, or 0 when nobody asks for the count */
} eval_batch;

/* One run of the loop. Borrowed from the arguments, but for `waiting`. */
typedef struct eval_loop {
    PyObject *op;
    PyObject *take;         /* (inputs, rows, targets) -> the batch */
    PyObject *sinks;        /* tuple: ArrayAccumulator or list for each kind */
    PyObject *keep_losses;  /* (loss, rows) -> None, or None */
    PyObject *on_batch;     /* (batch, is_last) -> None: metrics by batch, or None */
    PyObject *exchange;     /* (batch, as_tensors) -> the ranks' batches, or None */
    PyObject *parts;        /* Evaluations, by which batches are split, or None */
    PyObject *waiting;      /* list of (batch, wait) on their way to host memory */
    Py_ssize_t max_waiting; /* 0 for a model in host memory */
    int keeps_values;       /* predictions, labels and inputs go into the sinks */
    int by_token;           /* count the targets of batches */
    bool has_loss;
    Py_ssize_t n_batches;          /* that have run on this rank */
    Py_ssize_t n_rows;             /* of all ranks */
    double loss_sum, loss_rows;    /* of each row the batch's loss */
    double token_sum, token_count; /* of each target the batch's loss */
} eval_loop;

/* ---- into the sinks -------------------------------------------------------------- */

static int
keep_value(const eval_loop *loop, const ctpy_state *names, int kind, PyObject *value)
{
    PyObject *sink = PyTuple_GET_ITEM(loop->sinks, kind);
    if (!PyList_Check(sink)) {
        PyObject *answer = PyObject_CallMethodOneArg(sink, names->str_append, value);
        Py_XDECREF(answer);
        return answer == NULL ? -1 : 0;
    }
    PyObject *arrays = ctpy_numpify_all(value, names);
    int result = arrays == NULL ? -1 : PyList_Append(sink, arrays);
    Py_XDECREF(arrays);
    return result;
}

/* The loss as a number: of a vector, as an override may return, the mean. */
static int
loss_value(PyObject *loss, const ctpy_state *names, double *value)
{
    int failed;
    PyObject *mean = NULL, *shape = ctpy_get_optional(loss, names->str_shape, &failed);
    if (shape != NULL && PyObject_Length(shape) > 0) {
        mean = PyObject_CallMethodNoArgs(loss, names->str_mean);
        failed = mean == NULL;
    }
    Py_XDECREF(shape);
    if (failed || PyErr_Occurred()) {
        return -1;
    }
    *value = PyFloat_AsDouble(mean == NULL ? loss : mean);
    Py_XDECREF(mean);
    return *value == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int
add_loss(eval_loop *loop, const ctpy_state *names, const eval_batch *batch)
{
    double value;
    if (loss_value(batch->loss, names, &value) < 0) {
        return -1;
    }
    loop->has_loss = true;
    loop->loss_sum += value * (double)batch->rows;
    loop->loss_rows += (double)batch->rows;
    if (batch->targets > 0) { /* without targets the mean is 0 / 0 */
        loop->token_sum += value * (double)batch->targets;
        loop->token_count += (double)batch->targets;
    }
    if (loop->keep_losses == Py_None) {
        return 0;
    }
    PyObject *answer =
        PyObject_CallFunction(loop->keep_losses, "dn", value, batch->rows);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* Puts the batch of a rank into the sinks. */
static int
commit_one(eval_loop *loop, const ctpy_state *names, const eval_batch *batch)
{
    loop->n_rows += batch->rows;
    if (batch->loss != Py_None && add_loss(loop, names, batch) < 0) {
        return -1;
    }
    for (int kind = 0; loop->keeps_values && kind < KINDS; kind++) {
        if (batch->values[kind] != Py_None &&
            keep_value(loop, names, kind, batch->values[kind]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
open_batch(PyObject *item, eval_batch *b)
{
    return PyArg_ParseTuple(item, "OOOOOnL", &b->values[PREDICTIONS],
                            &b->values[LABELS], &b->values[INPUTS], &b->whole, &b->loss,
                            &b->rows, &b->targets)
               ? 0
               : -1;
}

/* The batches of all ranks in this round, as a list. Ranks exchange their batches as
 * tensors before compute_metrics by batch, else as arrays when the batch leaves the
 * device; at the other place the list has this rank's alone. */
static PyObject *
of_all_ranks(const eval_loop *loop, PyObject *item, bool as_tensors)
{
    if (loop->exchange == Py_None || as_tensors != (loop->on_batch != Py_None)) {
        return Py_BuildValue("[O]", item);
    }
    PyObject *stack[] = {item, as_tensors ? Py_True : Py_False};
    PyObject *all = PyObject_Vectorcall(loop->exchange, stack, 2, NULL);
    if (all != NULL) {
        Py_SETREF(all, PySequence_List(all));
    }
    return all;
}

/* Puts the batches of a round into the sinks. */
static int
commit(eval_loop *loop, const ctpy_state *names, PyObject *item)
{
    PyObject *all = of_all_ranks(loop, item, false);
    int result = all == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; result == 0 && i < PyList_GET_SIZE(all); i++) {
        eval_batch one;
        result = open_batch(PyList_GET_ITEM(all, i), &one) < 0
                     ? -1
                     : commit_one(loop, names, &one);
    }
    Py_XDECREF(all);
    return result;
}

/* Puts the first n waiting batches into the sinks. */
static int
commit_waiting(eval_loop *loop, const ctpy_state *names, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *pair = PyList_GET_ITEM(loop->waiting, i);
        PyObject *wait = PyTuple_GET_ITEM(pair, 1);
        PyObject *answer =
            wait == Py_None ? Py_NewRef(Py_None) : PyObject_CallNoArgs(wait);
        Py_XDECREF(answer);
        if (answer == NULL || commit(loop, names, PyTuple_GET_ITEM(pair, 0)) < 0) {
            return -1;
        }
    }
    return PyList_SetSlice(loop->waiting, 0, n, NULL);
}

/* Enqueues copies of a batch's values for the sinks, except for lists, where
 * the pinned memory would stay. (batch, function that waits or None), a new reference.
 */
static PyObject *
begin_copy(const eval_loop *loop, const ctpy_state *names, PyObject *item)
{
    eval_batch b;
    if (open_batch(item, &b) < 0) {
        return NULL;
    }
    PyObject *early[KINDS], *late[KINDS];
    for (int kind = 0; kind < KINDS; kind++) {
        const bool stays = PyList_Check(PyTuple_GET_ITEM(loop->sinks, kind));
        early[kind] = loop->keeps_values && !stays ? b.values[kind] : Py_None;
        late[kind] = loop->keeps_values && stays ? b.values[kind] : Py_None;
    }
    PyObject *pair = NULL;
    PyObject *given = PyTuple_Pack(KINDS + 1, early[PREDICTIONS], early[LABELS],
                                   early[INPUTS], b.loss);
    if (given != NULL) {
        pair = ctpy_ask_adapter(loop->op, names->str_begin_copy, &given, 1);
        Py_DECREF(given);
    }
    PyObject *copied, *wait, *result = NULL;
    if (pair != NULL && PyArg_ParseTuple(pair, "O!O", &PyTuple_Type, &copied, &wait)) {
        PyObject *values[KINDS];
        for (int kind = 0; kind < KINDS; kind++) {
            values[kind] =
                late[kind] != Py_None ? late[kind] : PyTuple_GET_ITEM(copied, kind);
        }
        result = Py_BuildValue("((OOOOOnL)O)", values[PREDICTIONS], values[LABELS],
                               values[INPUTS], Py_None, PyTuple_GET_ITEM(copied, KINDS),
                               b.rows, b.targets, wait);
    }
    Py_XDECREF(pair);
    return result;
}

/* Adds a batch. On a device its copies are enqueued behind its forward, and waited for
 * when the next batches are enqueued, so that the device always has work. */
static int
add_batch(eval_loop *loop, const ctpy_state *names, PyObject *item)
{
    if (loop->max_waiting == 0) {
        return commit(loop, names, item);
    }
    PyObject *pair = begin_copy(loop, names, item);
    const int result = pair == NULL ? -1 : PyList_Append(loop->waiting, pair);
    Py_XDECREF(pair);
    if (result < 0) {
        return -1;
    }
    return PyList_GET_SIZE(loop->waiting) > loop->max_waiting
               ? commit_waiting(loop, names, loop->max_waiting)
               : 0;
}

/* Adds a batch, for compute_metrics by batch, too. */
static int
keep_by_batch(eval_loop *loop, const ctpy_state *names, PyObject *item, bool is_last)
{
    PyObject *stack[] = {item, is_last ? Py_True : Py_False};
    PyObject *answer = add_batch(loop, names, item) < 0
                           ? NULL
                           : PyObject_Vectorcall(loop->on_batch, stack, 2, NULL);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* ---- a batch --------------------------------------------------------------------- */

/* Targets of the batch for the mean by token; 0 when nobody asks for that mean. */
static int
count_batch(const eval_loop *loop, PyObject *inputs, long long *targets)
{
    int failed = 0;
    *targets = loop->by_token ? ctpy_count_targets(loop->op, inputs, &failed) : 0;
    if (!failed && *targets < 0) {
        PyErr_SetString(PyExc_ValueError,
                        "eval_loss_by_token needs a batch with 'labels' to count; this "
                        "one has none");
        failed = 1;
    }
    return failed ? -1 : 0;
}

/* The parts of a batch that have run: a list of (what `take` returned, weight). */
typedef struct part_run {
    eval_loop *loop;
    ctpy_state *names;
    PyObject *taken;
} part_run;

static int
take_part(void *context, PyObject *part, double weight, bool Py_UNUSED(last))
{
    const part_run *run = context;
    const Py_ssize_t rows = ctpy_batch_size(part, run->names);
    PyObject *item =
        rows == -2 ? NULL
                   : PyObject_CallFunction(run->loop->take, "OnL", part, rows, 0LL);
    PyObject *pair = item == NULL ? NULL : Py_BuildValue("(Nd)", item, weight);
    const int result = pair == NULL ? -1 : PyList_Append(run->taken, pair);
    Py_XDECREF(pair);
    return result;
}

/* Runs the parts of a batch on all ranks. 1: the batch has to begin anew. */
static int
run_parts(part_run *run, PyObject *inputs)
{
    PyObject *parts = run->loop->parts;
    const int result = ctpy_parts_run(parts, inputs, take_part, run);
    return result == 0 ? ctpy_parts_agree(parts) : result;
}

/* Runs a batch, for which memory may not suffice, and joins the parts. */
static PyObject *
take_in_parts(eval_loop *loop, PyObject *inputs, long long targets, ctpy_state *names)
{
    part_run run = {loop, names, PyList_New(0)};
    PyObject *item = NULL;
    int result = run.taken == NULL ? -1 : ctpy_parts_call(loop->parts, "begin");
    while (result == 0 && (result = run_parts(&run, inputs)) > 0) {
        result = PyList_SetSlice(run.taken, 0, PY_SSIZE_T_MAX, NULL) < 0
                     ? -1
                     : ctpy_parts_call(loop->parts, "rewind");
    }
    if (result == 0) {
        item =
            PyObject_CallMethod(loop->parts, "join", "OLO", inputs, targets, run.taken);
    }
    Py_XDECREF(run.taken);
    ctpy_parts_end(loop->parts);
    return item;
}

/* Runs a batch. */
static PyObject *
take_batch(eval_loop *loop, PyObject *inputs, ctpy_state *names)
{
    const Py_ssize_t rows = ctpy_batch_size(inputs, names);
    long long targets;
    if (rows == -2 || count_batch(loop, inputs, &targets) < 0) {
        return NULL;
    }
    loop->n_batches++;
    return loop->parts == Py_None
               ? PyObject_CallFunction(loop->take, "OnL", inputs, rows, targets)
               : take_in_parts(loop, inputs, targets, names);
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

/* ---- the batches ----------------------------------------------------------------- */

/* Keeps the batches of this round: they may wait on the device, but not with
 * compute_metrics by batch. */
static int
keep_round(eval_loop *loop, PyObject *own, bool is_last, ctpy_state *names)
{
    int result = 0;
    if (loop->on_batch == Py_None) {
        result = add_batch(loop, names, own);
    }
    else {
        PyObject *all = of_all_ranks(loop, own, true);
        const Py_ssize_t n = all == NULL ? 0 : PyList_GET_SIZE(all);
        result = all == NULL ? -1 : 0;
        for (Py_ssize_t i = 0; result == 0 && i < n; i++) {
            result = keep_by_batch(loop, names, PyList_GET_ITEM(all, i),
                                   is_last && i + 1 == n);
        }
        Py_XDECREF(all);
    }
    return result < 0 ? -1 : ctpy_trainer_fire(loop->op, names->str_on_prediction_step);
}

/* A batch is known to be the last only after a request for another: compute_metrics by
 * batch wants to know, as in transformers, where accelerate's loader reads a batch
 * ahead; and on several ranks the request says whether all continue. */
static int
run_batches(eval_loop *loop, PyObject *iterator, ctpy_state *names)
{
    const bool asks_first = loop->on_batch != Py_None || loop->exchange != Py_None;
    PyObject *inputs = PyIter_Next(iterator), *next = NULL;
    int result = 0;
    while (result == 0 && inputs != NULL) {
        PyObject *item = check_stop() < 0 ? NULL : take_batch(loop, inputs, names);
        result = item == NULL ? -1 : 0;
        if (result == 0 && asks_first) {
            next = PyIter_Next(iterator);
            result = PyErr_Occurred() ? -1 : 0;
        }
        if (result == 0) {
            result = keep_round(loop, item, next == NULL, names);
        }
        Py_XDECREF(item);
        Py_DECREF(inputs);
        inputs = asks_first || result < 0 ? next : PyIter_Next(iterator);
        next = NULL;
    }
    Py_XDECREF(inputs);
    return result < 0 || PyErr_Occurred() ? -1 : 0;
}

/* ---- the method ------------------------------------------------------------------ */

/* The mean; None without a value, NaN of nothing. */
static PyObject *
mean_or_none(bool has, double sum, double n)
{
    return has ? PyFloat_FromDouble(n > 0.0 ? sum / n : Py_NAN) : Py_NewRef(Py_None);
}

static PyObject *
run_loop(eval_loop *loop, PyObject *batches, ctpy_state *names)
{
    PyObject *iterator = PyObject_GetIter(batches);
    if (iterator == NULL) {
        return NULL;
    }
    int result = run_batches(loop, iterator, names);
    Py_DECREF(iterator);
    if (result < 0 || commit_waiting(loop, names, PyList_GET_SIZE(loop->waiting)) < 0 ||
        ctpy_trainer_check_collectives(loop->op) < 0) {
        return NULL;
    }
    return Py_BuildValue("(nnNN)", loop->n_batches, loop->n_rows,
                         mean_or_none(loop->has_loss, loop->loss_sum, loop->loss_rows),
                         mean_or_none(loop->has_loss && loop->by_token, loop->token_sum,
                                      loop->token_count));
}

static const char Trainer__evaluate_batches_doc[] =
    "_evaluate_batches($self, take, batches, sinks, *, max_waiting, keeps_values,\n"
    "                  by_token, keep_losses, on_batch, exchange, parts)\n"
    "--\n\n"
    "Run take(inputs, rows, targets) on every batch, whose values go into the sinks:\n"
    "one for predictions, one for labels and one for inputs, an ArrayAccumulator or a\n"
    "list. rows is -1 for a batch without a tensor. parts splits batches for which\n"
    "memory does not suffice.\n\n"
    "Returns (batches run here, rows of all ranks, mean loss by row, mean loss by\n"
    "target), the means None without a loss. Raises KeyboardInterrupt when a signal\n"
    "asked the run to end.";

static PyObject *
Trainer__evaluate_batches(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"take",         "batches",  "sinks",       "max_waiting",
                               "keeps_values", "by_token", "keep_losses", "on_batch",
                               "exchange",     "parts",    NULL};
    eval_loop loop = {.op = op};
    PyObject *batches, *result;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!$nppOOOO:_evaluate_batches",
                                     keywords, &loop.take, &batches, &PyTuple_Type,
                                     &loop.sinks, &loop.max_waiting, &loop.keeps_values,
                                     &loop.by_token, &loop.keep_losses, &loop.on_batch,
                                     &loop.exchange, &loop.parts) ||
        (loop.waiting = PyList_New(0)) == NULL) {
        return NULL;
    }
    result = run_loop(&loop, batches, ctpy_state_borrow(op));
    Py_DECREF(loop.waiting);
    return result == NULL
               ? ctpy_locate_error("evaluation", "(OOn)", op, batches, loop.n_batches)
               : result;
}

PyMethodDef Trainer_evaluate_loop_methods[] = {
    {"_evaluate_batches", (PyCFunction)(void (*)(void))Trainer__evaluate_batches,
     METH_VARARGS | METH_KEYWORDS,                                                   Trainer__evaluate_batches_doc},
    {NULL,                NULL,                                                   0, NULL                         },
};
