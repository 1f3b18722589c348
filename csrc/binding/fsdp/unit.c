/* ctrainer._C.FSDPUnit: parameters that are sharded, gathered and reduced together.
 *
 * The unit owns the mapped memory, the communicators and the shards that the core's
 * tables point to, until dealloc: a unit in a collected cycle may still be released. */
#include "binding/fsdp/unit.h"

#include "binding/comm/communicator.h"
#include "binding/comm/memory.h"
#include "binding/optim/disk_memory.h"
#include "binding/runtime/buffer.h"

#include "core/base/alloc.h"
#include "core/comm/collectives.h"
#include "core/comm/hierarchical.h"
#include "core/fsdp/unit.h"

#include <math.h>
#include <string.h>

/* ---- lifetime -------------------------------------------------------------------- */

PyDoc_STRVAR(
    FSDPUnit_doc,
    "FSDPUnit(communicator, groups, *, reduce_dtype='float32',\n"
    "         watched=False, lone_gather=False, lone_reduce=False,\n"
    "         replicate_group=None, gather_bits=0, reduce_bits=0,\n"
    "         error_feedback=True, plugin=None, offload=False,\n"
    "         poisoned=False, secondary_shards=0, shard_file=None,\n"
    "         read_ahead=5)\n--\n\n"
    "Parameters that are sharded over a group of ranks, gathered and reduced\n"
    "together; ctrainer.fsdp.FullyShardedDataParallel has one for each module.\n\n"
    "groups: a tuple of (elements with padding, trainable, dtype of the shards,\n"
    "dtype of the gathered parameters); other dtypes than floats are neither trained\n"
    "nor converted.\n"
    "watched: a use of released parameters ends the process. poisoned: released\n"
    "parameters are NaN. With neither they read as zeros, and RuntimeError reports\n"
    "the use afterwards.\n"
    "lone_gather, lone_reduce: without the other ranks, for measurements.\n"
    "replicate_group: the ranks over which shards of gradients are averaged.\n"
    "gather_bits, reduce_bits: the bits of quantized parameters and gradients, 8 or\n"
    "4; 0: not quantized. error_feedback: add the rounding error of a gradient to\n"
    "the next, for a float32 for each element of all ranks.\n"
    "plugin: the device for all memory, which the communicators have to support.\n"
    "offload: shards and their gradients are in host memory nevertheless.\n"
    "secondary_shards: the ranks of each machine, which keep the parameters of a\n"
    "forward in so many shards for its backward; 0: they do not.\n"
    "shard_file: the DiskMemory of the shards; None: they are in memory. read_ahead:\n"
    "how many units' shards are read into memory at once at most.\n\n"
    "Its hooks: torch's is_grad_enabled(), _current_graph_task_id(),\n"
    "_current_autograd_node() and _get_sequence_nr(); _new_gradient(group),\n"
    "_check_order(what), _settle_trained(), _check_parameters(changed),\n"
    "assert_state(states), and _queue(), which returns a weak "
    "reference to the\n"
    "callback that ends the backward: dead when the backward has ended.");

static PyObject *
FSDPUnit_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    FSDPUnit *self = (FSDPUnit *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->state = FSDP_IDLE;
        self->require_sync = self->reshard_after_forward = 1;
        self->first_node = FSDP_NO_SEQUENCE;
        /* Of its own until the unit has a root: the ledger is never NULL. */
        self->core.ledger = &self->ledger;
    }
    return (PyObject *)self;
}

/* Every object that a unit owns. */
#define EACH_OBJECT(f, self)                                                           \
    f((self)->communicator);                                                           \
    f((self)->replicate_group);                                                        \
    f((self)->full);                                                                   \
    f((self)->grads);                                                                  \
    f((self)->secondary);                                                              \
    f((self)->residual);                                                               \
    f((self)->file);                                                                   \
    f((self)->copy);                                                                   \
    f((self)->shards);                                                                 \
    f((self)->gradients);                                                              \
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

/* The memory stays until dealloc: the core points to it. */
static int
FSDPUnit_clear(PyObject *op)
{
    FSDPUnit *self = (FSDPUnit *)op;
    fsdp_await_quietly(self);
    fsdp_drop_read(self);
    /* The root's ledger may be gone at dealloc. */
    ct_fsdp_set_ledger(&self->core, &self->ledger);
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
    PyObject_GC_UnTrack(op);
    /* First: a collective under way still writes into the memory. */
    fsdp_drop_prefetch(self);
    fsdp_await_quietly(self);
    fsdp_drop_read(self);
    EACH_OBJECT(Py_CLEAR, self);
    Py_BEGIN_ALLOW_THREADS /* waits for the device */
    if (self->core.device != NULL) {
        ct_fsdp_ledger_close(&self->ledger, self->core.device);
    }
    ct_fsdp_fini(&self->core);
    Py_END_ALLOW_THREADS
    ct_free(self->leaves);
    ctpy_leaf_dealloc(op);
}

/* ---- construction ---------------------------------------------------------------- */

static int
dtype_of(const char *name, bool trains, ct_dtype *dtype)
{
    for (int i = 0; i < CT_DTYPE_COUNT; i++) {
        const bool able = i == CT_F32 || i == CT_BF16 || i == CT_F16;
        if ((able || !trains) && strcmp(ct_dtype_name((ct_dtype)i), name) == 0) {
            *dtype = (ct_dtype)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "dtype is '%.100s'; expected float32, bfloat16 or float16%s", name,
                 trains ? "" : ", or for frozen parameters another of numbers");
    return -1;
}

static int
read_groups(PyObject *groups, ct_fsdp_group *read)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(groups); i++) {
        Py_ssize_t size;
        int trains;
        const char *shard, *full;
        PyObject *group = PyTuple_GET_ITEM(groups, i);
        if (!PyTuple_Check(group)) {
            PyErr_Format(PyExc_TypeError,
                         "group %zd must be a tuple (size, trainable, dtype, dtype), "
                         "got %.100s",
                         i, Py_TYPE(group)->tp_name);
            return -1;
        }
        if (!PyArg_ParseTuple(group, "npss", &size, &trains, &shard, &full)) {
            return -1;
        }
        if (size < 0) {
            PyErr_Format(PyExc_ValueError, "group %zd has size %zd, below 0", i, size);
            return -1;
        }
        read[i] = (ct_fsdp_group){.n = (size_t)size, .trainable = trains != 0};
        if (dtype_of(shard, trains != 0, &read[i].shard) < 0 ||
            dtype_of(full, trains != 0, &read[i].full) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
make_groups(FSDPUnit *self, PyObject *plugin, PyObject *groups, int world_size)
{
    const ct_device *device = ctpy_device_borrow(plugin);
    const size_t n = (size_t)PyTuple_GET_SIZE(groups);
    ct_fsdp_group *read = PyMem_New(ct_fsdp_group, n + 1);
    int result = -1;
    ct_error err;
    if (read == NULL) {
        PyErr_NoMemory();
    }
    else if (device != NULL && read_groups(groups, read) == 0) {
        /* Built aside: a failed __init__ leaves the unit as it was. */
        ct_fsdp made;
        const ct_status status = ct_fsdp_init(&made, device, read, n, world_size, &err);
        if (status == CT_OK) {
            made.ledger = &self->ledger;
            self->core = made;
        }
        result = status == CT_OK ? 0 : ctpy_raise_int(&err);
    }
    PyMem_Free(read);
    return result;
}

static PyObject *
new_memory(FSDPUnit *self, PyObject *plugin, size_t bytes, int watched)
{
    const ctpy_state *state = fsdp_state_borrow(self);
    PyObject *args = Py_BuildValue("(n)", (Py_ssize_t)bytes);
    PyObject *kwargs = Py_BuildValue("{s:i,s:O}", "watched", watched, "plugin", plugin);
    /* By the type's constructor, as units and users have the same kind of memory. */
    PyObject *memory =
        args == NULL || kwargs == NULL
            ? NULL
            : PyObject_Call((PyObject *)state->MappedMemory, args, kwargs);
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    return memory;
}

/* New host memory is zero; device memory is undefined. */
static PyObject *
new_zeros(FSDPUnit *self, PyObject *plugin, size_t bytes)
{
    ct_error err;
    PyObject *memory = new_memory(self, plugin, bytes, 0);
    if (memory == NULL || fsdp_use_stream(self) < 0) {
        Py_XDECREF(memory);
        return NULL;
    }
    ct_mapping *pages = &((MappedMemory *)memory)->pages;
    const ct_span all = {pages->data, pages->bytes, CT_U8};
    pages->stream = self->core.stream;
    /* Without a cache: the memory stays in use for the life of the unit. */
    ct_status status = ct_mapping_obtain(pages, pages->bytes, NULL, &err);
    if (status == CT_OK && pages->ops != NULL) {
        status = self->core.device->zero(self->core.stream, &all, 1, &err);
    }
    if (status != CT_OK) {
        Py_DECREF(memory);
        return ctpy_raise(&err);
    }
    return memory;
}

static int
map_memory(FSDPUnit *self, PyObject *plugin, int watched, int poisoned)
{
    const size_t full = ct_fsdp_full_bytes(&self->core);
    const size_t grads = ct_fsdp_grad_bytes(&self->core);
    self->full = new_memory(self, plugin, full, watched);
    self->grads = self->full == NULL ? NULL : new_memory(self, plugin, grads, watched);
    if (self->grads == NULL) {
        return -1;
    }
    self->core.full = &((MappedMemory *)self->full)->pages;
    self->core.grads = &((MappedMemory *)self->grads)->pages;
    if (poisoned) {
        ct_mapping_poison(self->core.full);
        ct_mapping_poison(self->core.grads);
    }
    /* Does nothing for poisoned memory, as written pages show no use. */
    ct_mapping_detect(self->core.full);
    return 0;
}

/* In a group on one machine all shards are secondary ones already. */
static int
map_secondary(FSDPUnit *self, PyObject *plugin, const ct_comm *comm, int shards)
{
    const int ranks = ct_comm_ranks_a_machine(comm);
    if (shards == 0 || (ranks == 0 && shards == comm->world_size)) {
        return 0;
    }
    if (shards != ranks) {
        PyErr_Format(PyExc_ValueError,
                     "secondary_shards is %d; expected the ranks of each machine that "
                     "share memory, which are %d in this group of %d (%s)",
                     shards, ranks == 0 ? 1 : ranks, comm->world_size, comm->ops->name);
        return -1;
    }
    self->secondary =
        new_memory(self, plugin, ct_fsdp_secondary_bytes(&self->core, ranks), 0);
    if (self->secondary == NULL) {
        return -1;
    }
    self->core.secondary = &((MappedMemory *)self->secondary)->pages;
    return 0;
}

/* The copy of a file is in host memory, whatever the device. */
static int
map_copy(FSDPUnit *self, PyObject *file)
{
    if (Py_IsNone(file)) {
        return 0;
    }
    if (!PyObject_TypeCheck(file, fsdp_state_borrow(self)->DiskMemory)) {
        PyErr_Format(PyExc_TypeError,
                     "shard_file is a %.200s; expected a DiskMemory or None",
                     Py_TYPE(file)->tp_name);
        return -1;
    }
    const ct_disk_memory *disk = &((DiskMemory *)file)->core;
    self->copy = new_memory(self, Py_None, disk->bytes, 0);
    if (self->copy == NULL) {
        return -1;
    }
    self->file = Py_NewRef(file);
    self->core.file.disk = disk;
    self->core.file.copy = &((MappedMemory *)self->copy)->pages;
    return 0;
}

static int
check_bits(const char *name, int bits)
{
    if (bits == 0 || bits == 4 || bits == 8) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s is %d; expected 8 or 4, or 0 for whole elements",
                 name, bits);
    return -1;
}

static int
check_read_ahead(Py_ssize_t units)
{
    if (units >= 1) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "read_ahead must be at least 1, got %zd", units);
    return -1;
}

/* What stays between updates: the residual of quantized gradients, and the gradients of
 * offloaded shards. */
static int
make_kept(FSDPUnit *self, PyObject *plugin, bool residual, bool offload)
{
    if (residual) {
        self->residual = new_zeros(self, plugin, ct_fsdp_grad_bytes(&self->core));
        if (self->residual == NULL) {
            return -1;
        }
        self->core.residual = ((MappedMemory *)self->residual)->pages.data;
    }
    return offload && (self->gradients = PyDict_New()) == NULL ? -1 : 0;
}

/* The arguments of a unit; objects are borrowed. */
typedef struct arguments {
    PyObject *communicator, *groups, *replicate_group, *plugin, *file;
    Py_ssize_t read_ahead;
    int watched, error_feedback, offload, poisoned, secondary_shards;
    ct_fsdp_config config;
} arguments;

static int
read_arguments(PyObject *args, PyObject *kwargs, arguments *a)
{
    static char *names[] = {"communicator",
                            "groups",
                            "reduce_dtype",
                            "watched",
                            "lone_gather",
                            "lone_reduce",
                            "replicate_group",
                            "gather_bits",
                            "reduce_bits",
                            "error_feedback",
                            "plugin",
                            "offload",
                            "poisoned",
                            "secondary_shards",
                            "shard_file",
                            "read_ahead",
                            NULL};
    const char *reduce = "float32";
    int lone_gather = 0, lone_reduce = 0;
    ct_fsdp_config *config = &a->config;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO!|$spppOiipOppiOn:FSDPUnit", names, &a->communicator,
            &PyTuple_Type, &a->groups, &reduce, &a->watched, &lone_gather, &lone_reduce,
            &a->replicate_group, &config->gather_bits, &config->reduce_bits,
            &a->error_feedback, &a->plugin, &a->offload, &a->poisoned,
            &a->secondary_shards, &a->file, &a->read_ahead) ||
        check_bits("gather_bits", config->gather_bits) < 0 ||
        check_bits("reduce_bits", config->reduce_bits) < 0 ||
        check_read_ahead(a->read_ahead) < 0 ||
        dtype_of(reduce, true, &config->reduce) < 0) {
        return -1;
    }
    config->lone_gather = lone_gather != 0;
    config->lone_reduce = lone_reduce != 0;
    config->offload = a->offload != 0;
    return 0;
}

static int
FSDPUnit_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    FSDPUnit *self = (FSDPUnit *)op;
    arguments a = {
        .replicate_group = Py_None,
        .plugin = Py_None,
        .file = Py_None,
        .read_ahead = 5,
        .error_feedback = 1,
        .config = {.predivide = 1.0, .postdivide = 1.0}
    };
    if (read_arguments(args, kwargs, &a) < 0) {
        return -1;
    }
    /* The core's tables point to memory of this unit, which a second call would
     * replace. */
    if (self->communicator != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a FSDPUnit is made once");
        return -1;
    }
    ct_comm *comm = ctpy_comm_borrow(fsdp_state_borrow(self), a.communicator);
    if (comm == NULL ||
        (!Py_IsNone(a.replicate_group) &&
         ctpy_comm_borrow(fsdp_state_borrow(self), a.replicate_group) == NULL) ||
        make_groups(self, a.plugin, a.groups, comm->world_size) < 0 ||
        map_memory(self, a.plugin, a.watched, a.poisoned) < 0 ||
        map_secondary(self, a.plugin, comm, a.secondary_shards) < 0 ||
        map_copy(self, a.file) < 0 ||
        make_kept(self, a.plugin, a.config.reduce_bits != 0 && a.error_feedback != 0,
                  a.config.offload) < 0) {
        return -1;
    }
    /* The average over the sharding group, unless divide_factors are set later. */
    a.config.postdivide = (double)comm->world_size;
    self->core.config = a.config;
    self->read_ahead = (size_t)a.read_ahead;
    self->communicator = Py_NewRef(a.communicator);
    self->replicate_group =
        Py_IsNone(a.replicate_group) ? NULL : Py_NewRef(a.replicate_group);
    return 0;
}

PyDoc_STRVAR(add_parameter_doc,
             "add_parameter($self, group, at, numel, /)\n--\n\n"
             "Name a trainable parameter, elements [at, at + numel) of a group; return "
             "its index.\n\nParameters are named in the order of their places.");

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
    /* Missing gradients are found as gaps between neighbours, so the order matters. */
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

/* ---- attributes ------------------------------------------------------------------ */

/* Sets a field with one object for each group. */
static int
set_tuple(FSDPUnit *self, PyObject *value, const char *what, PyObject **field)
{
    PyObject *each = value == NULL ? NULL : PySequence_Tuple(value);
    if (value == NULL) {
        PyErr_Format(PyExc_TypeError, "%s cannot be deleted", what);
    }
    if (each == NULL) {
        return -1;
    }
    if ((size_t)PyTuple_GET_SIZE(each) != self->core.n_groups) {
        PyErr_Format(PyExc_ValueError, "expected %zu %s, one a group, got %zd",
                     self->core.n_groups, what, PyTuple_GET_SIZE(each));
        Py_DECREF(each);
        return -1;
    }
    /* Last, as dropping the old tuple may run the user's code. */
    Py_XSETREF(*field, each);
    return 0;
}

static PyObject *
FSDPUnit_get_shards(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *shards = ((FSDPUnit *)op)->shards;
    return shards == NULL ? PyTuple_New(0) : Py_NewRef(shards);
}

static int
FSDPUnit_set_shards(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    return set_tuple((FSDPUnit *)op, value, "shards", &((FSDPUnit *)op)->shards);
}

static PyObject *
FSDPUnit_get_grad_owners(PyObject *op, void *closure)
{
    PyObject *owners = ((FSDPUnit *)op)->grad_owners;
    return owners == NULL ? FSDPUnit_get_shards(op, closure) : Py_NewRef(owners);
}

static int
FSDPUnit_set_grad_owners(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    return set_tuple((FSDPUnit *)op, value, "grad_owners",
                     &((FSDPUnit *)op)->grad_owners);
}

static PyObject *
FSDPUnit_get_label(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_DecodeUTF8(((FSDPUnit *)op)->core.label.name,
                                (Py_ssize_t)strlen(((FSDPUnit *)op)->core.label.name),
                                "replace");
}

/* The sizes of the groups count too: another model may have a module of this name. */
static int
FSDPUnit_set_label(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    ct_fsdp *core = &((FSDPUnit *)op)->core;
    const char *name = value == NULL ? NULL : PyUnicode_AsUTF8(value);
    const uint64_t calls = core->label.call;
    uint64_t shape = core->n_groups;
    if (name == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "label cannot be deleted");
        }
        return -1;
    }
    /* FNV's step for each size: any difference shows in the hash. */
    for (size_t i = 0; i < core->n_groups; i++) {
        shape = shape * 0x100000001b3u ^ core->groups[i].n;
    }
    ct_label_set(&core->label, name, shape);
    /* A renamed unit has called no fewer collectives. */
    core->label.call = calls;
    return 0;
}

static PyObject *
FSDPUnit_get_offsets(PyObject *op, void *Py_UNUSED(closure))
{
    const ct_fsdp *core = &((FSDPUnit *)op)->core;
    PyObject *offsets = PyTuple_New((Py_ssize_t)core->n_groups);
    for (size_t i = 0; offsets != NULL && i < core->n_groups; i++) {
        PyObject *at = PyLong_FromSize_t(core->groups[i].at);
        if (at == NULL) {
            Py_CLEAR(offsets);
        }
        else {
            PyTuple_SET_ITEM(offsets, (Py_ssize_t)i, at);
        }
    }
    return offsets;
}

static PyObject *
FSDPUnit_get_factors(PyObject *op, void *Py_UNUSED(closure))
{
    const ct_fsdp_config *config = &((FSDPUnit *)op)->core.config;
    return Py_BuildValue("dd", config->predivide, config->postdivide);
}

static int
FSDPUnit_set_factors(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    ct_fsdp_config *config = &((FSDPUnit *)op)->core.config;
    double pre, post;
    if (value == NULL || !PyTuple_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "divide_factors is a tuple of two numbers");
        return -1;
    }
    if (!PyArg_ParseTuple(value, "dd", &pre, &post)) {
        return -1;
    }
    /* NaN fails the comparison. */
    if (!(pre > 0.0 && post > 0.0 && isfinite(pre) && isfinite(post))) {
        PyErr_Format(PyExc_ValueError,
                     "gradients are divided by numbers above 0, got %R", value);
        return -1;
    }
    config->predivide = pre;
    config->postdivide = post;
    return 0;
}

static PyObject *
FSDPUnit_get_peak(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((FSDPUnit *)op)->ledger.peak);
}

static int
FSDPUnit_set_peak(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    ct_fsdp_ledger *ledger = &((FSDPUnit *)op)->ledger;
    const size_t peak = value == NULL ? 0 : PyLong_AsSize_t(value);
    if (PyErr_Occurred()) {
        return -1;
    }
    /* Memory in use now is a part of every peak. */
    ledger->peak = peak < ledger->live ? ledger->live : peak;
    return 0;
}

static PyGetSetDef FSDPUnit_getset[] = {
    {"divide_factors", FSDPUnit_get_factors,     FSDPUnit_set_factors,
     "What gradients are divided by, before and after their sum; both above 0.",         NULL},
    {"grad_owners",    FSDPUnit_get_grad_owners, FSDPUnit_set_grad_owners,
     "An object for each group whose grad is that of the shard; by default the shards.", NULL},
    {"label",          FSDPUnit_get_label,       FSDPUnit_set_label,
     "The unit's name in the model, by which ranks compare whose collective it is.",     NULL},
    {"offsets",        FSDPUnit_get_offsets,     NULL,
     "Where each group begins in full, in bytes.",                                       NULL},
    {"peak_bytes",     FSDPUnit_get_peak,        FSDPUnit_set_peak,
     "Of a root: the most that live_bytes has been; set it to 0 to count anew.",         NULL},
    {"shards",         FSDPUnit_get_shards,      FSDPUnit_set_shards,
     "A parameter for each group: this rank's part of it.",                              NULL},
    {NULL,             NULL,                     NULL,                     NULL,         NULL},
};

static PyMemberDef FSDPUnit_members[] = {
    {"communicator", T_OBJECT, offsetof(FSDPUnit, communicator), READONLY,
     "The communicator of the sharding group."},
    {"residual", T_OBJECT, offsetof(FSDPUnit, residual), READONLY,
     "The error-feedback residual, float32 in a MappedMemory, or None."},
    {"replicate_group", T_OBJECT, offsetof(FSDPUnit, replicate_group), READONLY,
     "The communicator of the replicate group, or None."},
    {"gathered", T_BOOL, offsetof(FSDPUnit, core.gathered), READONLY,
     "Whether the parameters are gathered."},
    {"holds_grads", T_BOOL, offsetof(FSDPUnit, core.holds_grads), READONLY,
     "Whether there are gradients that no reduction has taken, as of no_sync()."},
    {"live_bytes", T_PYSSIZET, offsetof(FSDPUnit, ledger.live), READONLY,
     "Of a root: bytes of gathered parameters and of gradients before their "
     "reduction."},
    {"gradients", T_OBJECT, offsetof(FSDPUnit, gradients), READONLY,
     "Of offloaded shards: what is kept of their gradients' memory; else None."},
    {"full", T_OBJECT, offsetof(FSDPUnit, full), READONLY,
     "The memory of the gathered parameters."},
    {"require_sync", T_BOOL, offsetof(FSDPUnit, require_sync), 0,
     "Whether gradients are reduced, or kept for a later backward."},
    {"reshard_after_forward", T_BOOL, offsetof(FSDPUnit, reshard_after_forward), 0,
     "Whether the parameters are released after the forward."},
    {"forward_prefetch", T_BOOL, offsetof(FSDPUnit, forward_prefetch), 0,
     "Whether the gather of the next unit begins before this one's forward."},
    {"backward_pre", T_BOOL, offsetof(FSDPUnit, backward_pre), 0,
     "Whether the gather of the next unit begins before this one's backward."},
    {"backward_post", T_BOOL, offsetof(FSDPUnit, backward_post), 0,
     "Whether the gather of the next unit begins after this one's backward."},
    {"return_memory", T_BOOL, offsetof(FSDPUnit, return_memory), 0,
     "Of a root: whether memory that is free goes back to the system before most of it "
     "is needed: when the last inner unit has run, and when the backward begins."},
    {"state", T_INT, offsetof(FSDPUnit, state), 0,
     "Where it is: a value of TrainingState."},
    {NULL, 0, 0, 0, NULL},
};

/* ---- by hand --------------------------------------------------------------------- */

static const char FSDPUnit_gather_doc[] =
    "gather($self, /)\n--\n\n"
    "Bring the unit's parameters together from all ranks. Collective.\n\n"
    "Raises what the communicator does; then nothing is gathered.";

static PyObject *
FSDPUnit_gather(PyObject *op, PyObject *Py_UNUSED(unused))
{
    FSDPUnit *self = (FSDPUnit *)op;
    ct_fsdp_drop_secondary(&self->core); /* shards may have changed since */
    return fsdp_gather(self) < 0 || fsdp_await_copies(self) < 0 ? NULL
                                                                : Py_NewRef(Py_None);
}

static const char FSDPUnit_release_doc[] =
    "release($self, /)\n--\n\n"
    "Release the memory of the gathered parameters, which then read as zeros, and\n"
    "secondary shards.";

static PyObject *
FSDPUnit_release(PyObject *op, PyObject *Py_UNUSED(unused))
{
    fsdp_release((FSDPUnit *)op);
    ct_fsdp_drop_secondary(&((FSDPUnit *)op)->core);
    Py_RETURN_NONE;
}

/* ---- clipping -------------------------------------------------------------------- */

typedef struct clip_job {
    ct_span *spans;
    size_t n;
    double p, max_norm, total;
    int alone;  /* without the other ranks */
    bool ready; /* else an exception is set, and this rank only reports its failure */
    const ct_device *device;
    void *stream;
    ct_scratch *kept; /* two, on a GPU; NULL: released after the norm */
} clip_job;

/* The sum of the powers of this rank's gradients. */
static ct_status
own_sum(const clip_job *job, double *sum, ct_error *err)
{
    const ct_device *device = job->device;
    ct_scratch own[2] = {
        {NULL, 0},
        {NULL, 0}
    };
    ct_scratch *scratch = job->kept != NULL ? job->kept : own, *made = scratch + 1;
    *sum = 0.0;
    /* A rank without gradients still takes part in the collective. */
    if (job->n == 0) {
        return CT_OK;
    }
    ct_status status = device->scratch_grow(made, sizeof *sum, err);
    if (status == CT_OK) {
        status = device->norm(job->stream, scratch, job->p, job->spans, job->n,
                              made->data, err);
    }
    if (status == CT_OK) {
        status = device->read(job->stream, made->data, sum, err);
    }
    device->scratch_release(&own[0]);
    device->scratch_release(&own[1]);
    return status;
}

/* A rank that fails still takes part in the collective: the others would wait for it.
 */
static ct_status
norm_over_ranks(clip_job *job, ct_comm *comm, ct_error *err)
{
    enum {
        SUM,
        FAILED,
        WHO,
        N
    };
    double sent[N] = {0.0};
    ct_error others;
    const ct_status own = job->ready
                              ? own_sum(job, &sent[SUM], err)
                              : ct_fail(err, CT_EHOST, "no gradients to measure");
    if (own != CT_OK) {
        sent[FAILED] = 1.0;
        /* The sum of the ranks is one rank's number if a single rank failed. */
        sent[WHO] = comm->rank;
    }
    const ct_status status =
        job->alone
            ? CT_OK
            : ct_comm_reduce_numbers(comm, sent, N,
                                     isinf(job->p) ? CT_REDUCE_MAX : CT_REDUCE_SUM,
                                     own == CT_OK ? err : &others);
    job->total = isinf(job->p) ? sent[SUM] : pow(sent[SUM], 1.0 / job->p);
    if (own != CT_OK || status != CT_OK) {
        return own != CT_OK ? own : status;
    }
    return sent[FAILED] == 0.0 ? CT_OK
           : sent[FAILED] == 1.0
               ? ct_fail(err, CT_ECOMM,
                         "rank %d of %d failed to measure its gradients, so that there "
                         "is no norm; its own error says why",
                         ct_rank_called(&comm->names, (int)sent[WHO]), comm->names.of)
               : ct_fail(err, CT_ECOMM,
                         "%.0f of %d ranks failed to measure their gradients, so that "
                         "there is no norm; their own errors say why",
                         sent[FAILED], comm->names.of);
}

/* A NaN makes all gradients NaN, as the multiplication by the factor would. */
static ct_status
clip(clip_job *job, ct_comm *comm, ct_error *err)
{
    ct_status status = norm_over_ranks(job, comm, err);
    /* torch's guard against a norm of 0 (torch.nn.utils.clip_grad_norm_). */
    const double factor = job->max_norm / (job->total + 1e-6);
    if (status != CT_OK || job->n == 0 || factor >= 1.0) {
        return status;
    }
    return job->device->scale(job->stream, factor, (double)INFINITY, job->spans, job->n,
                              err);
}

/* Reads the gradients that exist; *owners owns them. */
static int
read_grads(FSDPUnit *self, PyObject *params, clip_job *job, PyObject *owners)
{
    PyObject *name = fsdp_state_borrow(self)->str_grad;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); i++) {
        PyObject *grad = PyObject_GetAttr(PyList_GET_ITEM(params, i), name);
        int result = grad == NULL ? -1 : 0;
        if (result == 0 && !Py_IsNone(grad)) {
            result =
                fsdp_span_from(self, grad, "a gradient", 1, true, &job->spans[job->n]);
            job->n += result == 0;
            result = result < 0 ? -1 : PyList_Append(owners, grad);
        }
        Py_XDECREF(grad);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

/* What is to be measured; -1 with an exception. */
static int
prepare(FSDPUnit *self, PyObject *params, clip_job *job, PyObject *owners)
{
    job->spans = PyMem_New(ct_span, (size_t)PyList_GET_SIZE(params) + 1);
    if (job->spans == NULL) {
        PyErr_NoMemory();
    }
    job->ready = job->spans != NULL && owners != NULL &&
                 read_grads(self, params, job, owners) == 0 &&
                 fsdp_use_stream(self) == 0;
    /* Offloaded shards have their gradients in host memory. */
    job->device = self->core.config.offload ? &ct_device_cpu : self->core.device;
    job->stream = self->core.stream;
    job->kept = job->device == &ct_device_cpu ? NULL : self->core.ledger->norm;
    return job->ready ? 0 : -1;
}

static int
run(PyObject *op, PyObject *params, clip_job *job)
{
    FSDPUnit *self = (FSDPUnit *)op;
    Communicator *group = (Communicator *)self->communicator;
    ct_comm *comm = ctpy_comm_borrow(fsdp_state_borrow(self), (PyObject *)group);
    PyObject *owners, *type = NULL, *value = NULL, *trace = NULL;
    ct_status status;
    ct_error err;
    if (comm == NULL) {
        return -1;
    }
    owners = PyList_New(0);
    if (prepare(self, params, job, owners) < 0) {
        /* Kept for after the collective, without which the other ranks would wait. */
        PyErr_Fetch(&type, &value, &trace);
    }
    Py_INCREF(group);
    /* close() fails meanwhile, as the communicator is in use without the GIL. */
    group->busy++;
    FSDP_BEGIN_WORK(self)
    status = clip(job, comm, &err);
    FSDP_END_WORK(self)
    group->busy--;
    Py_DECREF(group);
    Py_XDECREF(owners);
    PyMem_Free(job->spans);
    if (type != NULL) {
        PyErr_Restore(type, value, trace);
        return -1;
    }
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static const char FSDPUnit_clip_doc[] =
    "clip($self, params, max_norm, norm_type, alone=False, /)\n--\n\n"
    "Scale the gradients of a list of parameters, sharded over all ranks, so\n"
    "that their norm together is at most max_norm; return what it was. Collective.\n\n"
    "norm_type: p > 0, or inf. Powers are added in double. alone: the norm is that of\n"
    "this rank's shards, and nobody else is asked. Where one rank fails all raise,\n"
    "the others a RuntimeError that names it, and no gradient has changed.";

static PyObject *
FSDPUnit_clip(PyObject *op, PyObject *args)
{
    PyObject *params;
    clip_job job = {.n = 0};
    if (!PyArg_ParseTuple(args, "O!dd|p:clip", &PyList_Type, &params, &job.max_norm,
                          &job.p, &job.alone)) {
        return NULL;
    }
    if (!(job.p > 0.0)) {
        return PyErr_Format(PyExc_ValueError, "norm_type must be above 0 or inf");
    }
    return run(op, params, &job) < 0 ? NULL : PyFloat_FromDouble(job.total);
}

/* ---- the type -------------------------------------------------------------------- */

static PyMethodDef FSDPUnit_methods[] = {
    {"add_parameter", FSDPUnit_add_parameter, METH_VARARGS, add_parameter_doc   },
    {"clip",          FSDPUnit_clip,          METH_VARARGS, FSDPUnit_clip_doc   },
    {"gather",        FSDPUnit_gather,        METH_NOARGS,  FSDPUnit_gather_doc },
    {"release",       FSDPUnit_release,       METH_NOARGS,  FSDPUnit_release_doc},
    {NULL,            NULL,                   0,            NULL                },
};

static PyType_Slot FSDPUnit_slots[] = {
    {Py_tp_doc,      (void *)FSDPUnit_doc},
    {Py_tp_new,      FSDPUnit_new        },
    {Py_tp_init,     FSDPUnit_init       },
    {Py_tp_traverse, FSDPUnit_traverse   },
    {Py_tp_clear,    FSDPUnit_clear      },
    {Py_tp_dealloc,  FSDPUnit_dealloc    },
    {Py_tp_methods,  FSDPUnit_methods    },
    {Py_tp_members,  FSDPUnit_members    },
    {Py_tp_getset,   FSDPUnit_getset     },
    {0,              NULL                },
};

PyType_Spec FSDPUnit_spec = {
    .name = "ctrainer._C.FSDPUnit",
    .basicsize = sizeof(FSDPUnit),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = FSDPUnit_slots,
};
