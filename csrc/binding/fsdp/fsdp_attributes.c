/* What can be read and set of an FSDPUnit. */
#include "binding/fsdp/unit.h"

#include <math.h>
#include <string.h>

static PyObject *
FSDPUnit_get_shards(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *shards = ((FSDPUnit *)op)->shards;
    return shards == NULL ? PyTuple_New(0) : Py_NewRef(shards);
}

/* A tuple of something for each group; NULL with an exception. */
static PyObject *
one_a_group(FSDPUnit *self, PyObject *value, const char *what)
{
    PyObject *each = value == NULL ? NULL : PySequence_Tuple(value);
    if (value == NULL) {
        PyErr_Format(PyExc_TypeError, "%s cannot be deleted", what);
    }
    if (each != NULL && (size_t)PyTuple_GET_SIZE(each) != self->core.n_groups) {
        PyErr_Format(PyExc_ValueError, "expected %zu %s, one a group, got %zd",
                     self->core.n_groups, what, PyTuple_GET_SIZE(each));
        Py_CLEAR(each);
    }
    return each;
}

static int
FSDPUnit_set_shards(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    PyObject *shards = one_a_group((FSDPUnit *)op, value, "shards");
    if (shards == NULL) {
        return -1;
    }
    Py_XSETREF(((FSDPUnit *)op)->shards, shards);
    return 0;
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
    PyObject *owners = one_a_group((FSDPUnit *)op, value, "grad_owners");
    if (owners == NULL) {
        return -1;
    }
    Py_XSETREF(((FSDPUnit *)op)->grad_owners, owners);
    return 0;
}

static PyObject *
FSDPUnit_get_label(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_DecodeUTF8(((FSDPUnit *)op)->core.label.name,
                                (Py_ssize_t)strlen(((FSDPUnit *)op)->core.label.name),
                                "replace");
}

/* The unit's lengths are part of it: another model may have a module of this name. */
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
    for (size_t i = 0; i < core->n_groups; i++) {
        shape = shape * 0x100000001b3u ^ core->groups[i].n;
    }
    ct_label_set(&core->label, name, shape);
    core->label.call = calls;
    return 0;
}

static PyObject *
FSDPUnit_get_gathered(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((FSDPUnit *)op)->core.gathered);
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
    ledger->peak = peak < ledger->live ? ledger->live : peak;
    return 0;
}

static PyObject *
FSDPUnit_get_live(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((FSDPUnit *)op)->ledger.live);
}

PyGetSetDef fsdp_getset[] = {
    {"divide_factors", FSDPUnit_get_factors,     FSDPUnit_set_factors,
     "What gradients are divided by, before and after their sum; both above 0.",                                NULL},
    {"gathered",       FSDPUnit_get_gathered,    NULL,                     "Whether the parameters are there.",
     NULL                                                                                                           },
    {"grad_owners",    FSDPUnit_get_grad_owners, FSDPUnit_set_grad_owners,
     "An object for each group whose grad is that of the shard; by default the shards.",                        NULL},
    {"label",          FSDPUnit_get_label,       FSDPUnit_set_label,
     "The unit's name in the model, by which ranks compare whose collective it is.",                            NULL},
    {"live_bytes",     FSDPUnit_get_live,        NULL,
     "Of a root: bytes of gathered parameters and of gradients not yet reduced.",                               NULL},
    {"offsets",        FSDPUnit_get_offsets,     NULL,
     "Where each group begins in full, in elements.",                                                           NULL},
    {"peak_bytes",     FSDPUnit_get_peak,        FSDPUnit_set_peak,
     "Of a root: the most that live_bytes has been; set it to 0 to count anew.",                                NULL},
    {"shards",         FSDPUnit_get_shards,      FSDPUnit_set_shards,
     "A parameter for each group: this rank's part of it.",                                                     NULL},
    {NULL,             NULL,                     NULL,                     NULL,                                NULL},
};

PyMemberDef fsdp_members[] = {
    {"communicator", T_OBJECT, offsetof(FSDPUnit, communicator), READONLY,
     "The group of ranks that share."},
    {"residual", T_OBJECT, offsetof(FSDPUnit, residual), READONLY,
     "What codes have missed of the gradients, float32 in a MappedMemory, or None."},
    {"replicas", T_OBJECT, offsetof(FSDPUnit, replicas), READONLY,
     "The group of ranks that have the same shards, or None."},
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
