/* ctrainer._C.FSDPUnit: parameters that are sharded, gathered and reduced together. */
#include "binding/fsdp/unit.h"

#include "binding/comm/backends.h"
#include "binding/comm/memory.h"
#include "core/base/alloc.h"
#include "core/fsdp/fsdp_codes.h"

#include <string.h>

ctpy_state *
fsdp_state_borrow(FSDPUnit *self)
{
    return ctpy_state_borrow((PyObject *)self);
}

/* ---- lifetime ----------------------------------------------------------------------
 */

static PyObject *
FSDPUnit_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    FSDPUnit *self = (FSDPUnit *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->state = FSDP_IDLE;
        self->require_sync = self->reshard_after_forward = 1;
        self->first_node = FSDP_NO_SEQUENCE;
        self->core.ledger = &self->ledger;
    }
    return (PyObject *)self;
}

/* Every object that a unit owns. */
#define EACH_OBJECT(f, self)                                                           \
    f((self)->communicator);                                                           \
    f((self)->replicas);                                                               \
    f((self)->full);                                                                   \
    f((self)->grads);                                                                  \
    f((self)->residual);                                                               \
    f((self)->shards);                                                                 \
    f((self)->grad_owners);                                                            \
    f((self)->root);                                                                   \
    f((self)->units);                                                                  \
    f((self)->forwards.before);                                                        \
    f((self)->forwards.now);                                                           \
    f((self)->backwards.before);                                                       \
    f((self)->backwards.now);                                                          \
    f((self)->in_use);                                                                 \
    f((self)->ending)

static int
FSDPUnit_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    EACH_OBJECT(Py_VISIT, (FSDPUnit *)op);
    return 0;
}

/* The memory stays until dealloc: the core's tables point at it. */
static int
FSDPUnit_clear(PyObject *op)
{
    FSDPUnit *self = (FSDPUnit *)op;
    ct_fsdp_move_account(&self->core, &self->ledger);
    Py_CLEAR(self->shards);
    Py_CLEAR(self->grad_owners);
    Py_CLEAR(self->root);
    Py_CLEAR(self->units);
    fsdp_order_forget(&self->forwards);
    fsdp_order_forget(&self->backwards);
    Py_CLEAR(self->in_use);
    return 0;
}

static void
FSDPUnit_dealloc(PyObject *op)
{
    FSDPUnit *self = (FSDPUnit *)op;
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    fsdp_drop_prefetch(self);
    EACH_OBJECT(Py_CLEAR, self);
    if (self->core.device != NULL) {
        ct_fsdp_ledger_close(&self->ledger, self->core.device);
    }
    ct_fsdp_fini(&self->core);
    ct_free(self->leaves);
    type->tp_free(op);
    Py_DECREF(type);
}

/* ---- construction ------------------------------------------------------------------
 */

static int
dtype_of(const char *name, ct_dtype *dtype)
{
    static const ct_dtype known[] = {CT_F32, CT_BF16, CT_F16};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(ct_dtype_name(known[i]), name) == 0) {
            *dtype = known[i];
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "dtype is '%.100s'; expected float32, bfloat16 or float16", name);
    return -1;
}

static int
read_groups(PyObject *groups, size_t *sizes, bool *trainable)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(groups); i++) {
        Py_ssize_t size;
        int trains;
        PyObject *group = PyTuple_GET_ITEM(groups, i);
        if (!PyTuple_Check(group) || !PyArg_ParseTuple(group, "np", &size, &trains)) {
            return -1;
        }
        if (size < 0) {
            PyErr_Format(PyExc_ValueError, "group %zd has size %zd, below 0", i, size);
            return -1;
        }
        sizes[i] = (size_t)size;
        trainable[i] = trains != 0;
    }
    return 0;
}

static int
lay_out(FSDPUnit *self, PyObject *plugin, PyObject *groups, int world_size)
{
    const ct_device *device = ctpy_device_borrow(plugin);
    const size_t n = (size_t)PyTuple_GET_SIZE(groups);
    size_t *sizes = PyMem_New(size_t, n + 1);
    bool *trainable = PyMem_New(bool, n + 1);
    int result = -1;
    ct_error err;
    if (sizes == NULL || trainable == NULL) {
        PyErr_NoMemory();
    }
    else if (device != NULL && read_groups(groups, sizes, trainable) == 0) {
        ct_fsdp made;
        const ct_status status =
            ct_fsdp_init(&made, device, sizes, trainable, n, world_size, &err);
        if (status == CT_OK) {
            made.ledger = &self->ledger;
            self->core = made;
        }
        result = status == CT_OK ? 0 : ctpy_raise_int(&err);
    }
    PyMem_Free(trainable);
    PyMem_Free(sizes);
    return result;
}

static int
map_memory(FSDPUnit *self, PyObject *plugin, ct_dtype compute, int watched,
           int poisoned)
{
    const size_t full = ct_fsdp_full_bytes(&self->core, compute);
    const size_t grads = ct_fsdp_grad_bytes(&self->core);
    self->full = fsdp_new_memory(self, plugin, full, watched);
    self->grads =
        self->full == NULL ? NULL : fsdp_new_memory(self, plugin, grads, watched);
    if (self->grads == NULL) {
        return -1;
    }
    self->core.full = &((MappedMemory *)self->full)->pages;
    self->core.grads = &((MappedMemory *)self->grads)->pages;
    if (poisoned) {
        ct_mapping_poison(self->core.full);
        ct_mapping_poison(self->core.grads);
    }
    ct_mapping_detect(self->core.full);
    return 0;
}

/* What codes miss has to stay from one update to the next. */
static int
map_residual(FSDPUnit *self, PyObject *plugin)
{
    self->residual = fsdp_new_zeros(self, plugin, ct_fsdp_grad_bytes(&self->core));
    if (self->residual == NULL) {
        return -1;
    }
    self->core.residual = ((MappedMemory *)self->residual)->pages.data;
    return 0;
}

static int
check_bits(const char *name, int bits)
{
    if (bits == 0 || ct_fsdp_codes_known(bits)) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s is %d; expected 8 or 4, or 0 for whole elements",
                 name, bits);
    return -1;
}

static int
FSDPUnit_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "communicator",   "groups",      "compute_dtype", "reduce_dtype", "watched",
        "lone_gather",    "lone_reduce", "replicas",      "gather_bits",  "reduce_bits",
        "error_feedback", "plugin",      "offload",       "poisoned",     NULL};
    FSDPUnit *self = (FSDPUnit *)op;
    PyObject *communicator, *groups, *replicas = Py_None, *plugin = Py_None;
    const char *compute = "float32", *reduce = "float32";
    int watched = 0, lone_gather = 0, lone_reduce = 0, feedback = 1, offload = 0,
        poisoned = 0;
    ct_fsdp_config config = {.predivide = 1.0, .postdivide = 1.0};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO!|$sspppOiipOpp:FSDPUnit", names, &communicator,
            &PyTuple_Type, &groups, &compute, &reduce, &watched, &lone_gather,
            &lone_reduce, &replicas, &config.gather_bits, &config.reduce_bits,
            &feedback, &plugin, &offload, &poisoned) ||
        check_bits("gather_bits", config.gather_bits) < 0 ||
        check_bits("reduce_bits", config.reduce_bits) < 0 ||
        dtype_of(compute, &config.compute) < 0 ||
        dtype_of(reduce, &config.reduce) < 0) {
        return -1;
    }
    if (self->communicator != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a FSDPUnit is made once");
        return -1;
    }
    ct_comm *comm = ctpy_comm_borrow(fsdp_state_borrow(self), communicator);
    if (comm == NULL ||
        (!Py_IsNone(replicas) &&
         ctpy_comm_borrow(fsdp_state_borrow(self), replicas) == NULL) ||
        lay_out(self, plugin, groups, comm->world_size) < 0 ||
        map_memory(self, plugin, config.compute, watched, poisoned) < 0 ||
        (config.reduce_bits != 0 && feedback && map_residual(self, plugin) < 0)) {
        return -1;
    }
    config.postdivide = (double)comm->world_size;
    config.lone_gather = lone_gather != 0;
    config.lone_reduce = lone_reduce != 0;
    config.offload = offload != 0;
    self->core.config = config;
    self->communicator = Py_NewRef(communicator);
    self->replicas = Py_IsNone(replicas) ? NULL : Py_NewRef(replicas);
    return 0;
}

PyDoc_STRVAR(add_parameter_doc,
             "add_parameter($self, group, at, numel, /)\n--\n\n"
             "Name a trainable parameter, elements [at, at + numel) of a group; return "
             "its index.\n\nThey are named in the order in which they lie there.");

static PyObject *
FSDPUnit_add_parameter(PyObject *op, PyObject *args)
{
    FSDPUnit *self = (FSDPUnit *)op;
    Py_ssize_t group, at, numel;
    ct_error err;
    if (!PyArg_ParseTuple(args, "nnn:add_parameter", &group, &at, &numel)) {
        return NULL;
    }
    if (group < 0 || (size_t)group >= self->core.n_groups || at < 0 || numel < 0 ||
        (size_t)at + (size_t)numel > self->core.groups[group].n ||
        !self->core.groups[group].trainable) {
        return PyErr_Format(PyExc_ValueError,
                            "elements [%zd, %zd + %zd) of group %zd are not those of a "
                            "trainable group",
                            at, at, numel, group);
    }
    const fsdp_leaf *last =
        self->n_leaves == 0 ? NULL : &self->leaves[self->n_leaves - 1];
    if (last != NULL &&
        ((size_t)group < last->group ||
         ((size_t)group == last->group && (size_t)at < last->at + last->n))) {
        return PyErr_Format(
            PyExc_ValueError,
            "elements [%zd, %zd + %zd) of group %zd lie before the end of "
            "the parameter before: parameters are named in order",
            at, at, numel, group);
    }
    if (ct_grow((void **)&self->leaves, &self->leaves_room, self->n_leaves + 1,
                sizeof *self->leaves, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    self->leaves[self->n_leaves] =
        (fsdp_leaf){.group = (size_t)group, .at = (size_t)at, .n = (size_t)numel};
    return PyLong_FromSize_t(self->n_leaves++);
}

/* ---- states ------------------------------------------------------------------------
 */

int
fsdp_expect(FSDPUnit *self, unsigned states)
{
    const bool known = self->state >= FSDP_IDLE && self->state <= FSDP_BACKWARD_POST;
    if (known && (states >> self->state & 1) != 0) {
        return 0;
    }
    PyObject *wanted = PyList_New(0);
    for (int s = FSDP_IDLE; wanted != NULL && s <= FSDP_BACKWARD_POST; s++) {
        PyObject *number = (states >> s & 1) != 0 ? PyLong_FromLong(s) : NULL;
        if (number != NULL && PyList_Append(wanted, number) < 0) {
            Py_CLEAR(wanted);
        }
        Py_XDECREF(number);
    }
    PyObject *answer =
        wanted == NULL
            ? NULL
            : ctpy_call_hook((PyObject *)self,
                             fsdp_state_borrow(self)->str_assert_state, &wanted, 1);
    if (answer != NULL) {
        PyErr_Format(PyExc_ValueError, "the unit is in state %d", self->state);
    }
    Py_XDECREF(answer);
    Py_XDECREF(wanted);
    return -1;
}

#define METHOD(name, flags)                                                            \
    {#name, (PyCFunction)(void (*)(void))FSDPUnit_##name, flags, FSDPUnit_##name##_doc}

static PyMethodDef FSDPUnit_methods[] = {
    {"add_parameter", FSDPUnit_add_parameter, METH_VARARGS, add_parameter_doc},
    METHOD(clip, METH_VARARGS),
    METHOD(finish, METH_NOARGS),
    METHOD(forget_root, METH_NOARGS),
    METHOD(forward, METH_VARARGS),
    METHOD(gather, METH_NOARGS),
    METHOD(input_done, METH_O),
    METHOD(recover, METH_NOARGS),
    METHOD(release, METH_NOARGS),
    METHOD(set_units, METH_O),
    METHOD(take_grad, METH_FASTCALL),
    {NULL,            NULL,                   0,            NULL             },
};

PyDoc_STRVAR(
    FSDPUnit_doc,
    "FSDPUnit(communicator, groups, *, compute_dtype='float32',\n"
    "         reduce_dtype='float32', watched=False, lone_gather=False,\n"
    "         lone_reduce=False, replicas=None, gather_bits=0,\n"
    "         reduce_bits=0, error_feedback=True, plugin=None,\n"
    "         offload=False, poisoned=False)\n--\n\n"
    "Parameters that are sharded over the ranks of a group, gathered and reduced\n"
    "together; ctrainer.fsdp.FullyShardedDataParallel has one for a module.\n\n"
    "groups: a tuple of (elements with padding, trainable). watched: parameters that\n"
    "are used while they are not there end the process; poisoned: or are NaN, rather\n"
    "than reading zeros, which RuntimeError tells afterwards.\n"
    "lone_gather, lone_reduce: leave the other ranks out, to measure without.\n"
    "replicas: a group of ranks that have the same shards in other groups, over which\n"
    "gradients are averaged. gather_bits, reduce_bits: parameters and gradients "
    "travel\n"
    "as codes of so many bits. error_feedback: what these miss of a gradient is added\n"
    "to the next, which takes a float32 for each of all ranks' elements. plugin: of a\n"
    "device, in whose memory all of it is, which the communicators have to take.\n"
    "offload: shards and their gradients are in the host's all the same.\n\n"
    "Its hooks: _grad_enabled(), _graph_task(), _current_node(), _next_sequence_nr(),\n"
    "_new_gradient(group), _check_order(what), _settle_trained(),\n"
    "assert_state(states), and _queue(), which returns a weak reference to what ends\n"
    "the backward: dead when that has ended.");

static PyType_Slot FSDPUnit_slots[] = {
    {Py_tp_doc,      (void *)FSDPUnit_doc},
    {Py_tp_new,      FSDPUnit_new        },
    {Py_tp_init,     FSDPUnit_init       },
    {Py_tp_traverse, FSDPUnit_traverse   },
    {Py_tp_clear,    FSDPUnit_clear      },
    {Py_tp_dealloc,  FSDPUnit_dealloc    },
    {Py_tp_methods,  FSDPUnit_methods    },
    {Py_tp_members,  fsdp_members        },
    {Py_tp_getset,   fsdp_getset         },
    {0,              NULL                },
};

PyType_Spec FSDPUnit_spec = {
    .name = "ctrainer._C.FSDPUnit",
    .basicsize = sizeof(FSDPUnit),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = FSDPUnit_slots,
};
