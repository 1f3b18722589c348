/* Trainer: what the ranks of an evaluation tell each other.
 *
 * All ranks run the same number of batches, since a hook or a wrapped model may have
 * collectives of its own: who has none left runs its last one again, and its rows do
 * not count. After each batch comes one small collective that says who goes on and who
 * has failed, and then the values. */
#include "binding/data/gather.h"
#include "binding/engine/trainer_account.h"
#include "binding/evaluate/evaluate.h"
#include "binding/engine/ranks.h"

#include "binding/comm/communicator.h"

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
ctpy_eval_meet(ctpy_eval_ranks *ranks, ctpy_state *names, bool has_batch, int *first)
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

/* ---- values ------------------------------------------------------------------------
 */

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

/* One rank's batch out of its message. */
typedef struct arrival {
    PyObject *bytes;
    int rank;
    Py_ssize_t kept;
    bool as_tensors, last;
} arrival;

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
