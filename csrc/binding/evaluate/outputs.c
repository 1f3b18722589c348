/* Trainer: the outputs of an evaluation on their way into host memory. */
#include "binding/comm/communicator.h"
#include "binding/data/gather.h"
#include "binding/engine/ranks.h"
#include "binding/evaluate/evaluate.h"

static const char *const kind_names[CTPY_EVAL_KINDS] = {"predictions", "label_ids",
                                                        "inputs", "losses"};

/* Does the model run in host memory? Trainers without a notion of devices do. */
static int
runs_on_host(PyObject *op, const ctpy_state *names, int *on_host)
{
    int failed;
    PyObject *found = ctpy_get_optional(op, names->str__inputs_stay, &failed);
    *on_host = failed ? -1 : found == NULL ? 1 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return *on_host < 0 ? -1 : 0;
}

/* A setting that only our own arguments have; None with transformers'. */
static PyObject *
own_setting(PyObject *args, PyObject *name)
{
    int failed;
    PyObject *found = ctpy_get_optional(args, name, &failed);
    return failed ? NULL : found != NULL ? found : Py_NewRef(Py_None);
}

static int
own_flag(PyObject *args, PyObject *name, int *value)
{
    PyObject *found = own_setting(args, name);
    *value = found == NULL ? -1 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return *value < 0 ? -1 : 0;
}

/* How many batches may stay on the device: as many as args say, else the one whose
 * copy overlaps with the next one's forward. */
static int
read_waiting(PyObject *op, PyObject *args, const ctpy_state *names, Py_ssize_t *n)
{
    int on_host;
    *n = 0;
    if (runs_on_host(op, names, &on_host) < 0 || on_host) {
        return on_host < 0 ? -1 : 0;
    }
    PyObject *steps = PyObject_GetAttr(args, names->str_eval_accumulation_steps);
    if (steps == NULL) {
        return -1;
    }
    *n = steps == Py_None ? 1 : PyLong_AsSsize_t(steps);
    Py_DECREF(steps);
    return *n < 0 && PyErr_Occurred() ? -1 : 0;
}

static int
read_keeps_losses(PyObject *args, const ctpy_state *names, int *keeps)
{
    PyObject *wanted = PyObject_GetAttr(args, names->str_include_for_metrics);
    *keeps = wanted == NULL ? -1 : PySequence_Contains(wanted, names->str_loss);
    Py_XDECREF(wanted);
    return *keeps < 0 ? -1 : 0;
}

void
ctpy_eval_store_fini(ctpy_eval_store *store)
{
    for (int i = 0; i < CTPY_EVAL_KINDS; i++) {
        Py_CLEAR(store->sinks[i]);
    }
    Py_CLEAR(store->expected_rows);
    Py_CLEAR(store->spill_bytes);
    Py_CLEAR(store->waiting);
}

int
ctpy_eval_store_init(ctpy_eval_store *store, PyObject *op, PyObject *args,
                     Py_ssize_t n_rows)
{
    const ctpy_state *names = ctpy_state_borrow(op);
    *store = (ctpy_eval_store){0};
    if (ctpy_get_bool(args, names->str_eval_do_concat_batches, &store->concat) < 0 ||
        read_keeps_losses(args, names, &store->keep_losses) < 0 ||
        own_flag(args, names->str_eval_loss_by_token, &store->by_token) < 0 ||
        read_waiting(op, args, names, &store->max_waiting) < 0 ||
        (store->spill_bytes = own_setting(args, names->str_eval_spill_bytes)) == NULL ||
        (store->waiting = PyList_New(0)) == NULL ||
        (store->expected_rows =
             n_rows < 0 ? Py_NewRef(Py_None) : PyLong_FromSsize_t(n_rows)) == NULL) {
        ctpy_eval_store_fini(store);
        return -1;
    }
    return 0;
}

static PyObject *
accumulator_new(const ctpy_eval_store *store, const ctpy_state *names, int kind)
{
    PyObject *result = NULL, *none = PyTuple_New(0), *options = NULL, *folder = NULL;
    PyObject *module = PyImport_ImportModule("tempfile");
    if (module != NULL && none != NULL &&
        (folder = PyObject_CallMethod(module, "gettempdir", NULL)) != NULL &&
        (options =
             Py_BuildValue("{s:O,s:s,s:O,s:O}", "n_rows_hint", store->expected_rows,
                           "name", kind_names[kind], "spill_bytes", store->spill_bytes,
                           "spill_folder", folder)) != NULL) {
        result = PyObject_Call((PyObject *)names->ArrayAccumulator, none, options);
    }
    Py_XDECREF(options);
    Py_XDECREF(folder);
    Py_XDECREF(module);
    Py_XDECREF(none);
    return result;
}

static PyObject *
sink_borrow(ctpy_eval_store *store, const ctpy_state *names, int kind)
{
    if (store->sinks[kind] == NULL) {
        store->sinks[kind] =
            store->concat ? accumulator_new(store, names, kind) : PyList_New(0);
    }
    return store->sinks[kind];
}

static int
keep(ctpy_eval_store *store, const ctpy_state *names, int kind, PyObject *value)
{
    PyObject *sink = sink_borrow(store, names, kind);
    if (sink == NULL) {
        return -1;
    }
    if (store->concat) {
        PyObject *answer = PyObject_CallMethodOneArg(sink, names->str_append, value);
        Py_XDECREF(answer);
        return answer == NULL ? -1 : 0;
    }
    PyObject *arrays = ctpy_numpify_all(value, names);
    int result = arrays == NULL ? -1 : PyList_Append(sink, arrays);
    Py_XDECREF(arrays);
    return result;
}

/* A loss as a number: of a vector, which an override may return, its mean. */
static int
ctpy_eval_loss_value(PyObject *loss, const ctpy_state *names, double *value)
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

/* numpy.full(rows, value, float32): the loss as compute_metrics gets it. */
static int
keep_row_losses(ctpy_eval_store *store, const ctpy_state *names, double value,
                Py_ssize_t rows)
{
    int result = -1;
    PyObject *numpy = PyImport_ImportModule("numpy"), *losses = NULL;
    if (numpy != NULL) {
        losses = PyObject_CallMethod(numpy, "full", "nds", rows, value, "float32");
        Py_DECREF(numpy);
    }
    if (losses != NULL) {
        result = keep(store, names, CTPY_EVAL_LOSSES, losses);
        Py_DECREF(losses);
    }
    return result;
}

static int
add_loss(ctpy_eval_store *store, const ctpy_state *names, const ctpy_eval_batch *batch)
{
    double value;
    if (ctpy_eval_loss_value(batch->loss, names, &value) < 0) {
        return -1;
    }
    store->has_loss = 1;
    store->loss_sum += value * (double)batch->rows;
    store->loss_rows += (double)batch->rows;
    if (batch->targets > 0) { /* without targets the mean is 0 / 0 */
        store->token_sum += value * (double)batch->targets;
        store->token_count += (double)batch->targets;
    }
    return store->keep_losses ? keep_row_losses(store, names, value, batch->rows) : 0;
}

/* Puts the batch of one rank into the sinks. */
static int
commit_one(ctpy_eval_store *store, const ctpy_state *names,
           const ctpy_eval_batch *batch)
{
    store->n_rows += batch->rows;
    if (batch->loss != Py_None && add_loss(store, names, batch) < 0) {
        return -1;
    }
    for (int kind = 0; kind < CTPY_EVAL_LOSSES; kind++) {
        if (batch->values[kind] != Py_None &&
            keep(store, names, kind, batch->values[kind]) < 0) {
            return -1;
        }
    }
    return 0;
}

typedef struct visit_context {
    ctpy_eval_store *store;
    const ctpy_state *names;
} visit_context;

static int
visit_commit(void *context, const ctpy_eval_batch *batch, bool Py_UNUSED(last))
{
    visit_context *c = context;
    return commit_one(c->store, c->names, batch);
}

enum {
    RANK_DONE,
    RANK_HAS_BATCH,
    RANK_STOPPED,
    RANK_FAILED
};

/* What comes before the values of a rank's batch. */
typedef struct batch_head {
    int64_t state;
    int64_t rows;
    int64_t targets;
    int64_t has_loss;
    double loss;
} batch_head;

static int
put_head(ct_packet *packet, const batch_head *head)
{
    ct_error err;
    return ct_packet_put(packet, head, sizeof *head, &err) == CT_OK
               ? 0
               : ctpy_raise_int(&err);
}

static int
write_batch(ct_packet *packet, const ctpy_eval_batch *batch, ctpy_state *names)
{
    batch_head head = {.state = RANK_HAS_BATCH,
                       .rows = batch->rows,
                       .targets = batch->targets,
                       .has_loss = batch->loss != Py_None};
    if ((head.has_loss && ctpy_eval_loss_value(batch->loss, names, &head.loss) < 0) ||
        put_head(packet, &head) < 0) {
        return -1;
    }
    int result = 0;
    for (int kind = 0; batch->rows > 0 && result == 0 && kind < CTPY_EVAL_LOSSES;
         kind++) {
        result = ctpy_pack(packet, batch->values[kind], names);
    }
    return batch->rows > 0 && result == 0 ? ctpy_pack(packet, batch->whole, names)
                                          : result;
}

/* The messages of all ranks, also where this one has only to say that it failed; its
 * exception then stays. */
static PyObject *
exchange(ctpy_eval_ranks *ranks, ctpy_state *names, const ctpy_eval_batch *batch)
{
    PyObject *type = NULL, *value = NULL, *trace = NULL, *parts = NULL;
    ct_packet packet = {0};
    if (write_batch(&packet, batch, names) < 0) {
        PyErr_Fetch(&type, &value, &trace);
        packet.n = 0;
        if (put_head(&packet, &(batch_head){.state = RANK_FAILED}) < 0) {
            PyErr_Clear(); /* an empty message says it too */
        }
    }
    ranks->told = true;
    parts = ctpy_exchange(names, ranks->group, &packet);
    ct_packet_fini(&packet);
    if (parts == NULL) {
        ctpy_name_doing(CTPY_EVALUATING);
    }
    if (type != NULL) {
        Py_CLEAR(parts);
        PyErr_Restore(type, value, trace);
    }
    return parts;
}

static int
raise_for(int64_t state, int rank)
{
    if (state == RANK_STOPPED) {
        PyErr_SetNone(PyExc_KeyboardInterrupt);
    }
    else {
        PyErr_Format(PyExc_RuntimeError, "%s: rank %d failed; its own error says why",
                     CTPY_EVALUATING, rank);
    }
    return -1;
}

static const batch_head *
head_of(PyObject *bytes)
{
    return PyBytes_GET_SIZE(bytes) < (Py_ssize_t)sizeof(batch_head)
               ? NULL
               : (const batch_head *)PyBytes_AS_STRING(bytes);
}

/* How many rows of each rank are kept; the last rank that has some, -1 for none, -2
 * with an exception where one has failed. */
static int
count_kept(ctpy_eval_ranks *ranks, PyObject *parts, Py_ssize_t *kept)
{
    int last = -1;
    for (Py_ssize_t r = 0; r < PyList_GET_SIZE(parts); r++) {
        const batch_head *head = head_of(PyList_GET_ITEM(parts, r));
        if (head == NULL || head->state == RANK_FAILED) {
            (void)raise_for(RANK_FAILED, (int)r);
            return -2;
        }
        kept[r] = (Py_ssize_t)head->rows;
        if (ranks->left >= 0) {
            kept[r] = kept[r] > ranks->left ? ranks->left : kept[r];
            ranks->left -= kept[r];
        }
        last = kept[r] > 0 ? (int)r : last;
    }
    return last;
}

/* One rank's batch out of its message. */
typedef struct arrival {
    PyObject *bytes;
    int rank;
    Py_ssize_t kept;
    bool as_tensors, last;
} arrival;

/* The loss of another rank as this one has its own. */
static PyObject *
loss_like(const batch_head *head, PyObject *like, bool as_tensors)
{
    PyObject *loss =
        head->has_loss ? PyFloat_FromDouble(head->loss) : Py_NewRef(Py_None);
    const int tensor = as_tensors && head->has_loss ? ctpy_is_tensor(like) : 0;
    if (loss != NULL && tensor != 0) {
        Py_SETREF(loss, tensor < 0 ? NULL : ctpy_tensor_like(like, loss));
    }
    return loss;
}

static int
visit_arrival(const arrival *from, const ctpy_eval_batch *mine, ctpy_state *names,
              ctpy_eval_visit *visit, void *context)
{
    const batch_head *head = head_of(from->bytes);
    ctpy_parcel parcel = ctpy_parcel_open(from->bytes, from->rank);
    PyObject *values[CTPY_EVAL_LOSSES + 1] = {NULL};
    ctpy_eval_batch batch = {.rows = from->kept, .targets = head->targets};
    int result = -1;
    parcel.rows = (Py_ssize_t)head->rows;
    parcel.kept = from->kept;
    parcel.tensors = from->as_tensors;
    (void)ct_packet_take(&parcel.reader, sizeof *head);
    for (int kind = 0; kind <= CTPY_EVAL_LOSSES; kind++) {
        PyObject *like = kind < CTPY_EVAL_LOSSES ? mine->values[kind] : mine->whole;
        PyObject **slot = kind < CTPY_EVAL_LOSSES ? &batch.values[kind] : &batch.whole;
        if ((*slot = values[kind] = ctpy_unpack(&parcel, like, names)) == NULL) {
            goto done;
        }
    }
    if ((batch.loss = loss_like(head, mine->loss, from->as_tensors)) != NULL) {
        result = visit(context, &batch, from->last);
        Py_DECREF(batch.loss);
    }
done:
    for (int kind = 0; kind <= CTPY_EVAL_LOSSES; kind++) {
        Py_XDECREF(values[kind]);
    }
    return result;
}

static int
visit_all(ctpy_eval_ranks *ranks, ctpy_state *names, PyObject *parts,
          const ctpy_eval_batch *mine, bool as_tensors, ctpy_eval_visit *visit,
          void *context)
{
    const Py_ssize_t n = PyList_GET_SIZE(parts);
    Py_ssize_t *kept = PyMem_Calloc((size_t)n, sizeof *kept);
    if (kept == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const int last = count_kept(ranks, parts, kept);
    int result = last == -2 ? -1 : 0;
    ranks->told = result < 0;
    for (int r = 0; result == 0 && r <= last; r++) {
        const arrival from = {
            .bytes = PyList_GET_ITEM(parts, r),
            .rank = r,
            .kept = kept[r],
            .as_tensors = as_tensors,
            .last = r == last && !ranks->gathered,
        };
        if (kept[r] > 0) {
            result = visit_arrival(&from, mine, names, visit, context);
        }
    }
    PyMem_Free(kept);
    return result;
}

/* Values that the user's gather_function has joined are on every rank already. */
static ctpy_eval_batch
without_values(const ctpy_eval_batch *batch)
{
    ctpy_eval_batch bare = *batch;
    for (int kind = 0; kind < CTPY_EVAL_LOSSES; kind++) {
        bare.values[kind] = Py_None;
    }
    return bare;
}

int
ctpy_eval_share(ctpy_eval_ranks *ranks, ctpy_state *names, const ctpy_eval_batch *batch,
                bool as_tensors, ctpy_eval_visit *visit, void *context)
{
    const ctpy_eval_batch sent = ranks->gathered ? without_values(batch) : *batch;
    PyObject *parts = exchange(ranks, names, &sent);
    int result = parts == NULL ? -1
                               : visit_all(ranks, names, parts, &sent, as_tensors,
                                           visit, context);
    Py_XDECREF(parts);
    if (result == 0 && ranks->gathered) {
        ctpy_eval_batch joined = *batch;
        joined.loss = Py_None; /* counted above */
        joined.rows = 0;
        result = visit(context, &joined, true);
    }
    return result;
}

/* Puts this rank's batch, and those that the others have in this round, into the sinks.
 */
static int
commit(ctpy_eval_store *store, ctpy_state *names, const ctpy_eval_batch *batch)
{
    visit_context context = {store, names};
    return store->ranks == NULL ? commit_one(store, names, batch)
                                : ctpy_eval_share(store->ranks, names, batch, false,
                                                  visit_commit, &context);
}

/* Brings the first n waiting batches into host memory. */
static int
commit_waiting(ctpy_eval_store *store, ctpy_state *names, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        ctpy_eval_batch batch = {.whole = Py_None};
        long long targets;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(store->waiting, i), "OOOOnL",
                              &batch.values[0], &batch.values[1], &batch.values[2],
                              &batch.loss, &batch.rows, &targets)) {
            return -1;
        }
        batch.targets = targets;
        if (commit(store, names, &batch) < 0) {
            return -1;
        }
    }
    return PyList_SetSlice(store->waiting, 0, n, NULL);
}

int
ctpy_eval_store_add(ctpy_eval_store *store, ctpy_state *names,
                    const ctpy_eval_batch *batch)
{
    if (store->max_waiting == 0) {
        return commit(store, names, batch);
    }
    PyObject *item =
        Py_BuildValue("(OOOOnL)", batch->values[0], batch->values[1], batch->values[2],
                      batch->loss, batch->rows, (long long)batch->targets);
    int result = item == NULL ? -1 : PyList_Append(store->waiting, item);
    Py_XDECREF(item);
    const Py_ssize_t n = PyList_GET_SIZE(store->waiting);
    return result < 0               ? -1
           : n > store->max_waiting ? commit_waiting(store, names, store->max_waiting)
                                    : 0;
}

int
ctpy_eval_store_flush(ctpy_eval_store *store, ctpy_state *names)
{
    return commit_waiting(store, names, PyList_GET_SIZE(store->waiting));
}

PyObject *
ctpy_eval_store_take(ctpy_eval_store *store, int kind)
{
    PyObject *sink = store->sinks[kind];
    store->sinks[kind] = NULL;
    if (sink == NULL) {
        Py_RETURN_NONE;
    }
    if (!store->concat) {
        return sink;
    }
    PyObject *result = PyObject_CallMethod(sink, "result", NULL);
    Py_DECREF(sink);
    return result;
}

/* Trainer: what the ranks of an evaluation tell each other.
 *
 * All ranks run the same number of batches, since a hook or a wrapped model may have
 * collectives of its own: who has none left runs its last one again, and its rows do
 * not count. After each batch comes one small collective that says who goes on and who
 * has failed, and then the values. */

/* ---- who goes on -------------------------------------------------------------------
 */

/* accelerate's loaders repeat rows to be even, and say how many there really are. */
static int
read_length(PyObject *loader, const ctpy_state *names, Py_ssize_t *n)
{
    int failed;
    PyObject *length =
        ctpy_get_optional(loader, names->str_total_dataset_length, &failed);
    *n = -1;
    if (length != NULL && PyLong_Check(length)) {
        *n = PyLong_AsSsize_t(length);
    }
    Py_XDECREF(length);
    return failed || PyErr_Occurred() ? -1 : 0;
}

int
ctpy_eval_ranks_init(ctpy_eval_ranks *ranks, PyObject *op, PyObject *loader)
{
    const int n = ctpy_trainer_world_size(op);
    *ranks = (ctpy_eval_ranks){.left = -1};
    if (n <= 1) {
        return n < 0 ? -1 : 0;
    }
    ranks->group = Py_NewRef(((Trainer *)op)->group);
    return read_length(loader, ctpy_state_borrow(op), &ranks->left);
}

static int64_t
own_state(bool has_batch)
{
    if (!PyErr_Occurred()) {
        return has_batch ? RANK_HAS_BATCH : RANK_DONE;
    }
    return PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) ? RANK_STOPPED : RANK_FAILED;
}

/* What the states of all ranks come to; an exception of this rank's own stays. */
static int
judge(const int64_t *states, int n, int *first)
{
    int going = 0;
    *first = -1;
    for (int r = 0; r < n; r++) {
        if (states[r] >= RANK_STOPPED) {
            return PyErr_Occurred() ? -1 : raise_for(states[r], r);
        }
        if (states[r] == RANK_HAS_BATCH) {
            *first = *first < 0 ? r : *first;
            going++;
        }
    }
    return going;
}

/* Gathers under the exception that may be set. */
static int
gather_states(PyObject *group, ctpy_state *names, int64_t own, int64_t *states,
              size_t n)
{
    PyObject *type, *value, *trace;
    const ct_request request = {
        .what = CT_ALL_GATHER, .in = {&own,   1, CT_I64},
             .out = {states, n, CT_I64}
    };
    PyErr_Fetch(&type, &value, &trace);
    int result = ctpy_comm_run(names, group, &request);
    if (result < 0) {
        ctpy_name_doing(CTPY_EVALUATING);
    }
    if (type != NULL) { /* the first failure is the one to tell */
        PyErr_Restore(type, value, trace);
    }
    return result;
}

int
ctpy_eval_sync_round(ctpy_eval_ranks *ranks, ctpy_state *names, bool has_batch,
                     int *first)
{
    const ct_comm *comm = ctpy_comm_borrow(names, ranks->group);
    if (comm == NULL) {
        return -1;
    }
    const int n = comm->world_size;
    int64_t *states = PyMem_Calloc((size_t)n, sizeof *states);
    int result = -1;
    if (states == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    ranks->told = true; /* whatever happens here happens to all */
    if (gather_states(ranks->group, names, own_state(has_batch), states, (size_t)n) ==
        0) {
        result = judge(states, n, first);
    }
    ranks->told = result < 0;
    PyMem_Free(states);
    return result;
}

/* Trainer: a batch for the ranks of an evaluation that have none at all. */

static PyObject *
pickled(const char *function, PyObject *value)
{
    PyObject *module = PyImport_ImportModule("pickle"), *result = NULL;
    if (module != NULL) {
        result = PyObject_CallMethod(module, function, "O", value);
        Py_DECREF(module);
    }
    return result;
}

/* On the root its batch as bytes, or none where pickle fails; elsewhere None. */
static PyObject *
pickled_batch(PyObject *inputs, bool is_root)
{
    if (!is_root) {
        return Py_NewRef(Py_None);
    }
    PyObject *data = pickled("dumps", inputs);
    if (data == NULL) {
        PyErr_WriteUnraisable(inputs); /* the others must not wait for it */
        data = PyBytes_FromStringAndSize("", 0);
    }
    return data;
}

PyObject *
ctpy_eval_broadcast_batch(ctpy_eval_ranks *ranks, ctpy_state *names, PyObject *inputs,
                          int root)
{
    const ct_comm *comm = ctpy_comm_borrow(names, ranks->group);
    if (comm == NULL) {
        return NULL;
    }
    const bool is_root = comm->rank == root;
    PyObject *data = pickled_batch(inputs, is_root), *received = NULL;
    if (data == NULL) {
        return NULL;
    }
    ranks->told = true;
    PyObject *bytes =
        PyObject_CallMethod(ranks->group, "broadcast_bytes", "Oi", data, root);
    Py_DECREF(data);
    if (bytes == NULL) {
        ctpy_name_doing(CTPY_EVALUATING);
    }
    else if (PyBytes_GET_SIZE(bytes) == 0) {
        PyErr_Format(PyExc_RuntimeError,
                     "rank %d has the only batch of this evaluation, and it cannot be "
                     "pickled for the others; give each rank a batch of its own",
                     root);
    }
    else {
        ranks->told = false;
        received = is_root ? Py_NewRef(inputs) : pickled("loads", bytes);
    }
    Py_XDECREF(bytes);
    return received;
}
