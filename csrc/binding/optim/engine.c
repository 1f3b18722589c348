/* ctrainer._C.OptimEngine: what ctrainer.optim's faces update their parameters with.
 *
 * A face is a torch.optim.Optimizer, or an object with param_groups, state and
 * _new_state(param, group); the engine belongs to it and keeps nothing that the face's
 * dicts do not hold, but for what saves time. */
#include "binding/optim/engine.h"

#include "core/base/alloc.h"

#include <string.h>

/* ---- life --------------------------------------------------------------------------
 */

static PyObject *
refuse_kind(const char *name)
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
        return refuse_kind(name);
    }
    OptimEngine *self = (OptimEngine *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->state = ctpy_state_borrow((PyObject *)self);
        self->kind = kind;
        self->core = ct_optim_new(&ct_device_cpu);
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
    return 0;
}

static void
OptimEngine_dealloc(PyObject *op)
{
    OptimEngine *self = (OptimEngine *)op;
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)OptimEngine_clear(op);
    ct_free(self->slots);
    ct_free(self->known);
    ct_optim_free(self->core);
    type->tp_free(op);
    Py_DECREF(type);
}

/* ---- one update --------------------------------------------------------------------
 */

int
optim_check_idle(const OptimEngine *self, const char *what)
{
    if (self->busy == 0) {
        return 0;
    }
    PyErr_Format(PyExc_RuntimeError,
                 "%s while another thread, or this one further up, is in step() of the "
                 "same optimizer: wait until it has returned",
                 what);
    return -1;
}

static void
end(OptimEngine *self)
{
    for (size_t k = 0; k < self->n_slots; k++) {
        Py_CLEAR(self->slots[k].grad);
    }
    self->busy--;
}

static int
measure(OptimEngine *self, const ct_step_config *config, double loss_scale)
{
    ct_status status;
    ct_error err;
    Py_BEGIN_ALLOW_THREADS
    status = ct_step_measure(self->core, NULL, config, loss_scale, &self->result, &err);
    Py_END_ALLOW_THREADS
    self->measured = status == CT_OK;
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
apply(OptimEngine *self, const ct_step_config *config, double loss_scale)
{
    ct_status status;
    ct_error err;
    optim_hold_groups(self, true);
    Py_BEGIN_ALLOW_THREADS
    status = ct_step_apply(self->core, NULL, config, loss_scale, &self->result, &err);
    Py_END_ALLOW_THREADS
    optim_hold_groups(self, false);
    if (status != CT_OK) {
        return ctpy_raise_int(&err);
    }
    if (self->result.updated) {
        return optim_count_steps(self);
    }
    return 0;
}

/* torch's schedulers warn when they are stepped before their optimizer; they learn of
 * a step from this attribute, which their wrapper of step() sets. */
static int
note_step(OptimEngine *self, PyObject *face)
{
    return PyObject_SetAttr(face, self->state->str__opt_called, Py_True);
}

/* Reads what both phases need and marks the engine busy; -1 leaves it idle. */
static int
begin(OptimEngine *self, PyObject *face)
{
    if (optim_check_idle(self, "a second step began") < 0) {
        return -1;
    }
    self->busy++;
    if (optim_plan_params(self, face) < 0 || optim_plan_grads(self) < 0) {
        end(self);
        return -1;
    }
    return 0;
}

/* The second phase, with the gradients in their slots. */
static int
finish(OptimEngine *self, PyObject *face, const ct_step_config *config,
       double loss_scale)
{
    int skip = !self->result.finite && config->nonfinite != CT_NONFINITE_KEEP;
    return (!skip && optim_plan_operands(self, face) < 0) ||
                   apply(self, config, loss_scale) < 0 ||
                   (self->result.updated && optim_write_groups(self, face) < 0) ||
                   note_step(self, face) < 0
               ? -1
               : 0;
}

int
ctpy_engine_measure(PyObject *engine, PyObject *op, const ct_step_config *config,
                    double loss_scale, ct_step_result *result)
{
    OptimEngine *self = (OptimEngine *)engine;
    if (begin(self, op) < 0) {
        return -1;
    }
    int failed = measure(self, config, loss_scale);
    end(self);
    *result = self->result;
    return failed;
}

int
ctpy_engine_apply(PyObject *engine, PyObject *op, const ct_step_config *config,
                  double loss_scale, ct_step_result *result)
{
    OptimEngine *self = (OptimEngine *)engine;
    if (begin(self, op) < 0) {
        return -1;
    }
    self->result = *result;
    self->measured = true;
    int failed = finish(self, op, config, loss_scale);
    end(self);
    *result = self->result;
    return failed;
}

/* Does anything ask for the norm? */
static bool
norm_wanted(const OptimEngine *self, const ct_step_config *config)
{
    const ct_optim_group *groups = ct_optim_groups_borrow(self->core);
    bool wanted = config->clip.max_norm > 0.0 || config->nonfinite != CT_NONFINITE_KEEP;
    for (size_t g = 0; !wanted && g < ct_optim_n_groups(self->core); g++) {
        wanted = groups[g].max_norm != 0.0;
    }
    return wanted;
}

/* Both phases at once: nothing is read twice. */
static int
update(OptimEngine *self, PyObject *face, const ct_step_config *config,
       double loss_scale)
{
    if (begin(self, face) < 0) {
        return -1;
    }
    self->measured = false;
    self->result = (ct_step_result){.clip_coef = 1.0, .finite = true};
    int failed = (norm_wanted(self, config) && measure(self, config, loss_scale) < 0) ||
                 finish(self, face, config, loss_scale) < 0;
    end(self);
    return failed ? -1 : 0;
}

PyDoc_STRVAR(
    step_doc,
    "step($self, face, max_norm, loss_scale, nonfinite, zero_grads, norm_type,\n"
    "     clip_value, clip_by_group, /)\n--\n\n"
    "Unscale, clip, update and zero the gradients of face.\n\n"
    "max_norm clips to that norm, None does not; norm_type is its p, > 0 or\n"
    "inf; clip_by_group clips each group by its own norm, as groups with a\n"
    "'max_grad_norm' are in any case; clip_value then clips each element,\n"
    "None does not. loss_scale is what the loss was multiplied by; nonfinite\n"
    "('skip', 'stop' or 'keep') says what to do when a gradient is Inf or\n"
    "NaN. The norm is worked out only if one of them asks for it. Raises\n"
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
        update((OptimEngine *)op, args[0], &config, loss_scale) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(check_idle_doc, "check_idle($self, what, /)\n--\n\n"
                             "Raise RuntimeError if a step is under way. what says "
                             "what cannot be done meanwhile.");

static PyObject *
OptimEngine_check_idle(PyObject *op, PyObject *arg)
{
    const char *what = PyUnicode_AsUTF8(arg);
    if (what == NULL || optim_check_idle((OptimEngine *)op, what) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- what the last update found ----------------------------------------------------
 */

static PyObject *
OptimEngine_get_grad_norm(PyObject *op, void *Py_UNUSED(closure))
{
    OptimEngine *self = (OptimEngine *)op;
    if (!self->measured) {
        Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(self->result.grad_norm);
}

static PyGetSetDef OptimEngine_getset[] = {
    {"grad_norm", OptimEngine_get_grad_norm, NULL,
     "Norm of all gradients at the last step, unscaled and before clipping; None "
     "where nothing asked for it.",                      NULL},
    {NULL,        NULL,                      NULL, NULL, NULL},
};

static PyMemberDef OptimEngine_members[] = {
    {"clip_coef", T_DOUBLE, offsetof(OptimEngine, result.clip_coef), READONLY,
     "What clipping by norm multiplied the gradients by, the least of all groups; 1 "
     "where it did nothing."},
    {"finite", T_BOOL, offsetof(OptimEngine, result.finite), READONLY,
     "False when the last step met a gradient that was Inf or NaN."},
    {"updated", T_BOOL, offsetof(OptimEngine, result.updated), READONLY,
     "False when the last step was skipped."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef OptimEngine_methods[] = {
    {"step",       (PyCFunction)(void (*)(void))OptimEngine_step, METH_FASTCALL, step_doc      },
    {"check_idle", OptimEngine_check_idle,                        METH_O,        check_idle_doc},
    {NULL,         NULL,                                          0,             NULL          },
};

PyDoc_STRVAR(OptimEngine_doc,
             "OptimEngine(kind)\n--\n\n"
             "Updates the parameters of an optimizer face. kind is that of the groups\n"
             "that have no 'kind' of their own: 'adamw', 'sgd', ...");

static PyType_Slot OptimEngine_slots[] = {
    {Py_tp_doc,      (void *)OptimEngine_doc},
    {Py_tp_new,      OptimEngine_new        },
    {Py_tp_traverse, OptimEngine_traverse   },
    {Py_tp_clear,    OptimEngine_clear      },
    {Py_tp_dealloc,  OptimEngine_dealloc    },
    {Py_tp_methods,  OptimEngine_methods    },
    {Py_tp_members,  OptimEngine_members    },
    {Py_tp_getset,   OptimEngine_getset     },
    {0,              NULL                   },
};

PyType_Spec OptimEngine_spec = {
    .name = "ctrainer._C.OptimEngine",
    .basicsize = sizeof(OptimEngine),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = OptimEngine_slots,
};
