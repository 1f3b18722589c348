/* ctrainer._C.BatchShard: one rank's part of a stream of batches, as
 * core/data/batches.h deals them out. */
#include "binding/runtime/ctpy.h"
#include "core/data/batches.h"

typedef struct BatchShard {
    PyObject_HEAD
    ct_shard shard;
    PyObject *source; /* an iterator over the batches; NULL before __init__ */
    PyObject
        *beginning;  /* a list: items, or whole batches where those have any length */
    PyObject *ahead; /* the batch that has been taken to see whether one follows */
    size_t begun;    /* batches that `beginning` has */
} BatchShard;

static int
parse(ct_shard *shard, PyObject *args, PyObject *kwargs, const char *format,
      char *first_name, PyObject **first)
{
    char *names[] = {first_name, "rank", "world_size", "batch_size",
                     "split",    "even", "drop_last",  NULL};
    PyObject *size = Py_None;
    int split = false, even = true, drop_last = false;
    ct_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, first, &shard->rank,
                                     &shard->world_size, &size, &split, &even,
                                     &drop_last)) {
        return -1;
    }
    shard->batch_size = size == Py_None ? 0 : PyLong_AsSize_t(size);
    if (PyErr_Occurred()) {
        return -1;
    }
    shard->split = split;
    shard->even = even;
    shard->drop_last = drop_last;
    return ct_shard_check(shard, &err) == CT_OK ? 0 : ctpy_raise_int(&err);
}

PyDoc_STRVAR(
    BatchShard_doc,
    "BatchShard(batches, rank, world_size, batch_size=None, *, split=False,\n"
    "           even=True, drop_last=False)\n--\n\n"
    "Iterator over the batches of one rank, lists, out of those of all.\n"
    "\n"
    "batches: an iterable of sequences. Each world_size of them make a round, of "
    "which\n"
    "every rank gets one; with split one batch is a round, of which every rank gets\n"
    "an equal part. batch_size: items of a whole batch, None for any length. even: "
    "the\n"
    "last round is filled up from the beginning of the stream, so that all ranks have\n"
    "equally many batches of one length. drop_last: a round that is not whole is left\n"
    "out. Source: accelerate 1.x, BatchSamplerShard.\n"
    "\n"
    "Raises ValueError for a rank out of range, and for batches that cannot be split.");

static int
BatchShard_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    BatchShard *self = (BatchShard *)op;
    PyObject *batches;
    ct_shard shard = {0};
    if (parse(&shard, args, kwargs, "Oii|O$ppp:BatchShard", "batches", &batches) < 0) {
        return -1;
    }
    PyObject *source = PyObject_GetIter(batches);
    PyObject *beginning = source == NULL ? NULL : PyList_New(0);
    if (beginning == NULL) {
        Py_XDECREF(source);
        return -1;
    }
    Py_XSETREF(self->source, source);
    Py_XSETREF(self->beginning, beginning);
    Py_CLEAR(self->ahead);
    self->begun = 0;
    self->shard = shard;
    return 0;
}

static int
BatchShard_traverse(PyObject *op, visitproc visit, void *arg)
{
    BatchShard *self = (BatchShard *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->source);
    Py_VISIT(self->beginning);
    Py_VISIT(self->ahead);
    return 0;
}

static int
BatchShard_clear(PyObject *op)
{
    BatchShard *self = (BatchShard *)op;
    Py_CLEAR(self->source);
    Py_CLEAR(self->beginning);
    Py_CLEAR(self->ahead);
    return 0;
}

static void
BatchShard_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)BatchShard_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

/* ---- a round -----------------------------------------------------------------------
 */

/* The next batch as a new list; NULL at the end or with an exception. */
static PyObject *
next_batch(BatchShard *self)
{
    PyObject *batch = self->ahead;
    if (batch != NULL) {
        self->ahead = NULL;
        return batch;
    }
    PyObject *found = PyIter_Next(self->source);
    batch = found == NULL ? NULL : PySequence_List(found);
    Py_XDECREF(found);
    return batch;
}

/* Keeps a batch of the stream's beginning for filling up. */
static int
remember(BatchShard *self, PyObject *batch)
{
    if (self->begun >= ct_shard_beginning(&self->shard)) {
        return 0;
    }
    self->begun++;
    if (self->shard.batch_size == 0) {
        return PyList_Append(self->beginning, batch);
    }
    const Py_ssize_t end = PyList_GET_SIZE(self->beginning);
    return PyList_SetSlice(self->beginning, end, end, batch);
}

/* The batches of a round, fewer or none at the end of the stream. */
static PyObject *
next_round(BatchShard *self)
{
    PyObject *round = PyList_New(0);
    for (size_t i = 0; round != NULL && i < ct_shard_round(&self->shard); i++) {
        PyObject *batch = next_batch(self);
        if (batch == NULL) {
            break;
        }
        if (remember(self, batch) < 0 || PyList_Append(round, batch) < 0) {
            Py_CLEAR(round);
        }
        Py_DECREF(batch);
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(round);
    }
    return round;
}

/* Does no batch follow? Looks only where that matters. 1, 0 or -1. */
static int
is_last(BatchShard *self, size_t n, size_t last_length)
{
    if (ct_shard_is_whole(&self->shard, n, last_length)) {
        return 0;
    }
    if (n == ct_shard_round(&self->shard)) {
        self->ahead = next_batch(self);
    }
    return PyErr_Occurred() ? -1 : self->ahead == NULL;
}

/* Appends what the part takes of the stream's beginning. */
static int
fill(const BatchShard *self, const ct_shard_part *part, PyObject *batch)
{
    const size_t n = (size_t)PyList_GET_SIZE(self->beginning);
    for (size_t i = 0; n > 0 && i < part->fill; i++) {
        PyObject *item =
            PyList_GET_ITEM(self->beginning, (Py_ssize_t)((part->fill_from + i) % n));
        if (PyList_Append(batch, item) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
take(const BatchShard *self, const ct_shard_part *part, PyObject *round)
{
    if (part->whole) {
        return Py_NewRef(PyList_GET_ITEM(round, (Py_ssize_t)part->batch));
    }
    if (self->shard.batch_size == 0) {
        const size_t n = (size_t)PyList_GET_SIZE(self->beginning);
        return PySequence_List(
            PyList_GET_ITEM(self->beginning, (Py_ssize_t)(part->fill_from % n)));
    }
    PyObject *batch = PyList_GetSlice(PyList_GET_ITEM(round, (Py_ssize_t)part->batch),
                                      (Py_ssize_t)part->from, (Py_ssize_t)part->to);
    if (batch != NULL && fill(self, part, batch) < 0) {
        Py_CLEAR(batch);
    }
    return batch;
}

static PyObject *
BatchShard_next(PyObject *op)
{
    BatchShard *self = (BatchShard *)op;
    PyObject *batch = NULL;
    bool more = self->source != NULL;
    while (more && batch == NULL) {
        PyObject *round = next_round(self);
        const Py_ssize_t n = round == NULL ? 0 : PyList_GET_SIZE(round);
        more = n > 0;
        if (more) {
            const size_t length =
                (size_t)PyList_GET_SIZE(PyList_GET_ITEM(round, n - 1));
            const int last = is_last(self, (size_t)n, length);
            const ct_shard_part part =
                ct_shard_take(&self->shard, (size_t)n, length, last > 0);
            batch = last < 0 || part.none ? NULL : take(self, &part, round);
            more = last == 0;
        }
        Py_XDECREF(round);
        more = more && !PyErr_Occurred();
    }
    return batch;
}

/* ---- lengths -----------------------------------------------------------------------
 */

PyDoc_STRVAR(count_doc,
             "count(n, rank, world_size, batch_size=None, *, split=False, even=True,\n"
             "      drop_last=False)\n--\n\n"
             "How many batches such a shard gives of n.");

static PyObject *
BatchShard_count(PyObject *Py_UNUSED(type), PyObject *args, PyObject *kwargs)
{
    ct_shard shard = {0};
    PyObject *n;
    if (parse(&shard, args, kwargs, "Oii|O$ppp:count", "n", &n) < 0) {
        return NULL;
    }
    const size_t batches = PyLong_AsSize_t(n);
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(ct_shard_count(&shard, batches));
}

static PyMethodDef BatchShard_methods[] = {
    {"count", (PyCFunction)(void (*)(void))BatchShard_count,
     METH_VARARGS | METH_KEYWORDS | METH_STATIC,                count_doc},
    {NULL,    NULL,                                          0, NULL     },
};

static PyType_Slot BatchShard_slots[] = {
    {Py_tp_doc,      (void *)BatchShard_doc},
    {Py_tp_init,     BatchShard_init       },
    {Py_tp_traverse, BatchShard_traverse   },
    {Py_tp_clear,    BatchShard_clear      },
    {Py_tp_dealloc,  BatchShard_dealloc    },
    {Py_tp_iter,     PyObject_SelfIter     },
    {Py_tp_iternext, BatchShard_next       },
    {Py_tp_methods,  BatchShard_methods    },
    {0,              NULL                  },
};

PyType_Spec BatchShard_spec = {
    .name = "ctrainer._C.BatchShard",
    .basicsize = sizeof(BatchShard),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = BatchShard_slots,
};
