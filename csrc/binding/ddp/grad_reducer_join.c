/* Ranks whose data ends before that of others, and that then take part without any. */
#include "binding/ddp/reducer.h"

#include "binding/comm/sync.h"
#include "core/base/alloc.h"

enum {
    HAS_DATA = 1,
    SYNCS = 2,
    HAS_BUFFERS = 4
};

/* What all ranks are about to do. */
typedef struct census {
    int active; /* ranks that have data */
    int last;   /* the last of them, whose buffers count, as in torch */
    int flags;  /* of any of them */
} census;

static int
gather_flags(GradReducer *self, int64_t mine, int64_t *all)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    const ct_comm *comm = ctpy_comm_borrow(state, self->communicator);
    if (comm == NULL) {
        return -1;
    }
    const ct_request request = {
        .what = CT_ALL_GATHER,
        .in = {&mine, 1,                        CT_I64},
        .out = {all,   (size_t)comm->world_size, CT_I64}
    };
    return ctpy_comm_run(state, self->communicator, &request);
}

static int
take_census(GradReducer *self, int mine, census *found)
{
    const ct_comm *comm =
        ctpy_comm_borrow(ctpy_state_borrow((PyObject *)self), self->communicator);
    if (comm == NULL) {
        return -1;
    }
    const int ranks = comm->world_size;
    int64_t *all = ct_calloc((size_t)ranks, sizeof *all);
    *found = (census){0};
    if (all == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const int result = gather_flags(self, mine, all);
    for (int r = 0; r < ranks; r++) {
        if (all[r] & HAS_DATA) {
            found->active++;
            found->last = r;
            found->flags |= (int)all[r];
        }
    }
    ct_free(all);
    self->root = found->active > 0 ? found->last : self->root;
    self->core.factor = self->keeps_divisor || found->active == 0
                            ? 1.0
                            : (double)ranks / (double)found->active;
    if (result == 0 && self->throws_early && found->active > 0 &&
        found->active < ranks) {
        PyErr_Format(PyExc_RuntimeError,
                     "%d of %d ranks have no data left, and "
                     "throw_on_early_termination is set",
                     ranks - found->active, ranks);
        return -1;
    }
    return result;
}

int
grad_reducer_tell(GradReducer *self, bool syncs, bool has_buffers)
{
    census found;
    return self->joining ? take_census(self,
                                       HAS_DATA | (syncs ? SYNCS : 0) |
                                           (has_buffers ? HAS_BUFFERS : 0),
                                       &found)
                         : 0;
}

const char GradReducer_join_doc[] =
    "join($self, keeps_divisor, throws_early, /)\n--\n\n"
    "Have ranks tell each other before each pass whether they have data.\n\n"
    "keeps_divisor: sums are divided by the number of all ranks, not of those with\n"
    "data. throws_early: all raise RuntimeError as soon as one has none.";

PyObject *
GradReducer_join(PyObject *op, PyObject *args)
{
    GradReducer *self = (GradReducer *)op;
    int keeps, throws;
    if (!PyArg_ParseTuple(args, "pp:join", &keeps, &throws)) {
        return NULL;
    }
    if (self->owners != NULL) {
        PyErr_SetString(PyExc_ValueError,
                        "join() is not for gradients that go to their owners alone: "
                        "each rank has to update its parameters to the end");
        return NULL;
    }
    self->keeps_divisor = keeps;
    self->throws_early = throws;
    self->joining = true;
    Py_RETURN_NONE;
}

/* A backward pass of zeros. */
static int
shadow_pass(GradReducer *self)
{
    const Py_ssize_t n = PyTuple_GET_SIZE(self->params);
    int result = 0;
    ct_reducer_begin(&self->core);
    for (Py_ssize_t i = n; result == 0 && i-- > 0;) {
        result = grad_reducer_give_zeros(self, i);
    }
    for (Py_ssize_t i = 0; !self->usage_known && i < n; i++) {
        self->used[i] = false;
    }
    if (result < 0 || grad_reducer_meet(self) < 0 ||
        grad_reducer_release_given(self) < 0) {
        grad_reducer_abandon(self);
        return -1;
    }
    self->usage_known = self->usage_known || self->static_graph;
    return 0;
}

static int
shadow_all(GradReducer *self, PyObject *buffers)
{
    ctpy_state *state = ctpy_state_borrow((PyObject *)self);
    census found;
    for (;;) {
        if (take_census(self, 0, &found) < 0) {
            return -1;
        }
        if (found.active == 0) {
            return 0;
        }
        if ((found.flags & HAS_BUFFERS) != 0 &&
            ctpy_broadcast_sequence(state, self->communicator, buffers, self->root) <
                0) {
            return -1;
        }
        if ((found.flags & SYNCS) != 0 && shadow_pass(self) < 0) {
            return -1;
        }
    }
}

const char GradReducer_shadow_doc[] =
    "shadow($self, buffers, tensors, /)\n--\n\n"
    "Take part in the others' passes with zeros until no rank has data; then take "
    "over\n"
    "tensors from one that was the last to have some.\n\n"
    "Raises RuntimeError naming the rank when another fails or stays away.";

PyObject *
GradReducer_shadow(PyObject *op, PyObject *args)
{
    GradReducer *self = (GradReducer *)op;
    PyObject *buffers, *tensors;
    if (!PyArg_ParseTuple(args, "OO:shadow", &buffers, &tensors)) {
        return NULL;
    }
    int result = shadow_all(self, buffers);
    if (result == 0) {
        result = ctpy_broadcast_sequence(ctpy_state_borrow(op), self->communicator,
                                         tensors, self->root);
    }
    self->joining = self->throws_early = false;
    self->core.factor = 1.0;
    self->root = 0;
    return result < 0 ? NULL : Py_NewRef(Py_None);
}
