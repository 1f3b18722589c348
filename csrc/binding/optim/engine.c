/* ctrainer._C.OptimEngine: the update behind the wrappers of ctrainer.optim.
 *
 * A wrapper is a torch.optim.Optimizer, or an object with param_groups, state and
 * _new_state(param, group). The engine belongs to one wrapper and keeps nothing that is
 * not in the wrapper's dicts, but for caches: users, schedulers and load_state_dict()
 * may change the dicts between two updates, and the next update sees the change. */
#include "binding/optim/engine.h"

#include "binding/optim/disk_memory.h"

#include "core/base/alloc.h"

/* ---- life ------------------------------------------------------------------------ */

static PyObject *
reject_kind(const char *name)
{
    PyObject *kinds = PyUnicode_FromString("");
    for (int k = 0; kinds != NULL && k < CT_OPTIM_KIND_COUNT; k++) {
        PyObject *more = PyUnicode_FromFormat("%U%s'%s'", kinds, k == 0 ? "" : ", ",
                                              ct_optim_kind_name((ct_optim_kind)k));
        Py_SETREF(kinds, more);
    }
    if (kinds != NULL) {
        PyErr_Format(PyExc_ValueError, "kind is '%.100s'; expected one of %U", name,
                     kinds);
    }
    Py_XDECREF(kinds);
    return NULL;
}

PyDoc_STRVAR(
    OptimEngine_doc,
    "OptimEngine(kind)\n--\n\n"
    "Updates the parameters of an optimizer wrapper. kind is that of the groups\n"
    "that have no 'kind' of their own: 'adamw', 'sgd', ...");

static PyObject *
OptimEngine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"kind", NULL};
    const char *name;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:OptimEngine", names, &name)) {
        return NULL;
    }
    const ct_optim_kind kind = ct_optim_kind_from_name(name);
    if (kind == CT_OPTIM_KIND_COUNT) {
        return reject_kind(name);
    }
    OptimEngine *self = (OptimEngine *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->state = ctpy_state_borrow((PyObject *)self);
        self->kind = kind;
        self->core = ct_optim_new(&ct_device_cpu);
        self->target = (ctpy_target){&ct_device_cpu, CTPY_DL_CPU, 0, NULL};
        self->result = (ct_step_result){.clip_coef = 1.0, .finite = true};
        if (self->core == NULL) {
            Py_DECREF(self);
            return PyErr_NoMemory();
        }
    }
    return (PyObject *)self;
}

static int
OptimEngine_traverse(PyObject *op, visitproc visit, void *arg)
{
    OptimEngine *self = (OptimEngine *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->average);
    Py_VISIT(self->disk);
    Py_VISIT(self->shards);
    Py_VISIT(self->groups);
    for (size_t k = 0; k < self->n_slots; k++) {
        const optim_slot *slot = &self->slots[k];
        Py_VISIT(slot->param);
        Py_VISIT(slot->data);
        Py_VISIT(slot->grad);
        Py_VISIT(slot->state);
        Py_VISIT(slot->master);
        Py_VISIT(slot->part.communicator);
        for (int i = 0; i < OPTIM_MAX_VALUES; i++) {
            Py_VISIT(slot->values[i]);
        }
    }
    return 0;
}

static int
OptimEngine_clear(PyObject *op)
{
    optim_drop_slots((OptimEngine *)op, 0);
    Py_CLEAR(((OptimEngine *)op)->average);
    ct_optim_set_disk(((OptimEngine *)op)->core, NULL, 0);
    Py_CLEAR(((OptimEngine *)op)->disk);
    Py_CLEAR(((OptimEngine *)op)->shards);
    Py_CLEAR(((OptimEngine *)op)->groups);
    return 0;
}

static void
OptimEngine_dealloc(PyObject *op)
{
    OptimEngine *self = (OptimEngine *)op;
    PyObject_GC_UnTrack(op);
    (void)OptimEngine_clear(op);
    ct_free(self->slots);
    ct_free(self->known);
    ct_free(self->viewed);
    Py_BEGIN_ALLOW_THREADS /* waits for the device */
    ct_optim_free(self->core);
    Py_END_ALLOW_THREADS
    ctpy_leaf_dealloc(op);
}

/* ---- step() ---------------------------------------------------------------------- */

PyDoc_STRVAR(
    step_doc,
    "step($self, wrapper, max_norm, loss_scale, nonfinite, zero_grads, norm_type,\n"
    "     clip_value, clip_by_group, /)\n--\n\n"
    "Unscale, clip, update and zero the gradients of wrapper.\n\n"
    "max_norm clips to that norm, None does not; norm_type is its p, > 0 or\n"
    "inf; clip_by_group clips each group by its own norm, as groups with a\n"
    "'max_grad_norm' are in any case; clip_value then clips each element,\n"
    "None does not. loss_scale is the factor of the loss; nonfinite ('skip',\n"
    "'stop' or 'keep') is the policy for a gradient that is Inf or NaN. The\n"
    "norm is worked out only if an option needs it. Raises\n"
    "FloatingPointError for 'stop', nothing changed; ValueError and\n"
    "TypeError name the parameter at fault.");

static PyObject *
OptimEngine_step(PyObject *op, PyObject *const *args, Py_ssize_t nargs)
{
    ct_step_config config;
    double loss_scale;
    if (nargs != 8) {
        return PyErr_Format(PyExc_TypeError, "step() takes 8 arguments, got %zd",
                            nargs);
    }
    if (optim_parse_options(args + 1, &config, &loss_scale) < 0 ||
        optim_update((OptimEngine *)op, args[0], &config, loss_scale) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(check_idle_doc, "check_idle($self, what, /)\n--\n\n"
                             "Raise RuntimeError if a step is under way; what is the\n"
                             "subject of the message.");

static PyObject *
OptimEngine_check_idle(PyObject *op, PyObject *arg)
{
    const char *what = PyUnicode_AsUTF8(arg);
    if (what == NULL || optim_check_idle((OptimEngine *)op, what) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    use_disk_doc,
    "use_disk($self, memory, buffers, kinds, /)\n--\n\n"
    "Update state that lies in memory, a DiskMemory, piece by piece, so many being\n"
    "in memory at once. None: no state does. Raises ValueError for a kind among the\n"
    "groups' that does not work element by element.");

static int
check_elementwise(PyObject *kinds)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); i++) {
        const char *name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(kinds, i));
        const ct_optim_group group = {
            .kind = name == NULL ? CT_OPTIM_KIND_COUNT : ct_optim_kind_from_name(name)};
        if (group.kind == CT_OPTIM_KIND_COUNT) {
            (void)(name == NULL ? NULL : reject_kind(name));
            return -1;
        }
        if (ct_optim_group_is_whole(&group)) {
            PyErr_Format(PyExc_ValueError,
                         "%s looks at whole parameters, and state can be in a file for "
                         "optimizers that work element by element, such as AdamW",
                         name);
            return -1;
        }
    }
    return 0;
}

static PyObject *
OptimEngine_use_disk(PyObject *op, PyObject *args)
{
    OptimEngine *self = (OptimEngine *)op;
    PyObject *memory, *kinds;
    Py_ssize_t buffers;
    if (!PyArg_ParseTuple(args, "OnO!:use_disk", &memory, &buffers, &PyTuple_Type,
                          &kinds)) {
        return NULL;
    }
    const bool none = Py_IsNone(memory);
    if (!none && !PyObject_TypeCheck(memory, self->state->DiskMemory)) {
        return PyErr_Format(PyExc_TypeError,
                            "memory is a %.200s; expected a DiskMemory or None",
                            Py_TYPE(memory)->tp_name);
    }
    if (buffers < 1) {
        return PyErr_Format(PyExc_ValueError, "buffers must be at least 1, got %zd",
                            buffers);
    }
    if (optim_check_idle(self, "use_disk()") < 0 || optim_await(self) < 0 ||
        check_elementwise(kinds) < 0) {
        return NULL;
    }
    ct_optim_set_disk(self->core, none ? NULL : &((DiskMemory *)memory)->core,
                      (size_t)buffers);
    Py_XSETREF(self->disk, none ? NULL : Py_NewRef(memory));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    await_update_doc,
    "await_update($self, /)\n--\n\n"
    "Wait for the result of an update that the trainer has enqueued on a GPU,\n"
    "and take its step counts back if it was skipped there. The properties\n"
    "of the result and the next step do the same.");

PyDoc_STRVAR(
    prepare_replay_doc,
    "prepare_replay($self, wrapper, /)\n--\n\n"
    "Before a graph with an update of wrapper is replayed: send the constants\n"
    "of the next update to the GPU, on the current stream, and count the\n"
    "update.");

static PyObject *
OptimEngine_prepare_replay(PyObject *op, PyObject *wrapper)
{
    return optim_prepare_replay((OptimEngine *)op, wrapper) < 0 ? NULL
                                                                : Py_NewRef(Py_None);
}

static PyObject *
OptimEngine_await_update(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return optim_await((OptimEngine *)op) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- the last result ------------------------------------------------------------- */

enum {
    GRAD_NORM,
    CLIP_COEF,
    FINITE,
    UPDATED
};

static PyMemberDef results[] = {
    [GRAD_NORM] = {"grad_norm", T_DOUBLE, offsetof(OptimEngine, result.grad_norm), 0,
                   NULL                                                                   },
    [CLIP_COEF] = {"clip_coef", T_DOUBLE, offsetof(OptimEngine, result.clip_coef), 0,
                   NULL                                                                   },
    [FINITE] = {"finite",    T_BOOL,   offsetof(OptimEngine, result.finite),    0, NULL},
    [UPDATED] = {"updated",   T_BOOL,   offsetof(OptimEngine, result.updated),   0, NULL},
};

/* An entry of `results`, awaited. */
static PyObject *
OptimEngine_get_result(PyObject *op, void *member)
{
    OptimEngine *self = (OptimEngine *)op;
    if (optim_await(self) < 0) {
        return NULL;
    }
    return member == &results[GRAD_NORM] && !self->measured
               ? Py_NewRef(Py_None)
               : PyMember_GetOne((const char *)op, member);
}

static PyGetSetDef OptimEngine_getset[] = {
    {"grad_norm", OptimEngine_get_result, NULL,
     "Norm of all gradients at the last step, unscaled and before clipping; None "
     "where nothing asked for it.",                                                      &results[GRAD_NORM]},
    {"clip_coef", OptimEngine_get_result, NULL,
     "What clipping by norm multiplied the gradients by, the least of all groups; 1 "
     "where it did nothing.",                                                            &results[CLIP_COEF]},
    {"finite",    OptimEngine_get_result, NULL,
     "False when the last step met a gradient that was Inf or NaN.",                     &results[FINITE]   },
    {"updated",   OptimEngine_get_result, NULL, "False when the last step was skipped.",
     &results[UPDATED]                                                                                      },
    {NULL,        NULL,                   NULL, NULL,                                    NULL               },
};

static PyMethodDef OptimEngine_methods[] = {
    {"step",           (PyCFunction)(void (*)(void))OptimEngine_step, METH_FASTCALL, step_doc          },
    {"check_idle",     OptimEngine_check_idle,                        METH_O,        check_idle_doc    },
    {"await_update",   OptimEngine_await_update,                      METH_NOARGS,   await_update_doc  },
    {"use_disk",       OptimEngine_use_disk,                          METH_VARARGS,  use_disk_doc      },
    {"prepare_replay", OptimEngine_prepare_replay,                    METH_O,        prepare_replay_doc},
    {NULL,             NULL,                                          0,             NULL              },
};

static PyType_Slot OptimEngine_slots[] = {
    {Py_tp_doc,      (void *)OptimEngine_doc},
    {Py_tp_new,      OptimEngine_new        },
    {Py_tp_traverse, OptimEngine_traverse   },
    {Py_tp_clear,    OptimEngine_clear      },
    {Py_tp_dealloc,  OptimEngine_dealloc    },
    {Py_tp_methods,  OptimEngine_methods    },
    {Py_tp_getset,   OptimEngine_getset     },
    {0,              NULL                   },
};

PyType_Spec OptimEngine_spec = {
    .name = "ctrainer._C.OptimEngine",
    .basicsize = sizeof(OptimEngine),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = OptimEngine_slots,
};
