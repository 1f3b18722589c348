/* ctrainer._C.Trainer: the type, its private state and its method table. */
#include "binding/trainer/trainer.h"

#include "binding/engine/ranks.h"
#include "binding/runtime/ctpy.h"
#include "binding/trainer/update.h"

PyDoc_STRVAR(
    Trainer_doc,
    "Trainer(*args, **kwargs)\n--\n\n"
    "The loops of training and evaluation; ctrainer.Trainer is its public class.\n"
    "\n"
    "Every hook is called by attribute lookup on the instance, so overrides,\n"
    "mixins and functions set on an instance win.");

static PyObject *
Trainer_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kw))
{
    PyObject *none = PyTuple_New(0);
    /* object's own rejects a class with abstract methods. */
    PyObject *op = none == NULL ? NULL : PyBaseObject_Type.tp_new(type, none, NULL);
    Py_XDECREF(none);
    if (op != NULL) {
        Trainer *self = (Trainer *)op;
        self->grad_norm = Py_NAN;
        self->signatures = PyDict_New();
        if (self->signatures == NULL) {
            Py_CLEAR(op);
        }
    }
    return op;
}

/* Takes whatever a cooperative __init__ passes on: ctrainer.Trainer has used it. */
static int
Trainer_init(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(args),
             PyObject *Py_UNUSED(kw))
{
    return 0;
}

static int
Trainer_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((Trainer *)op)->signatures);
    Py_VISIT(((Trainer *)op)->device_loss);
    Py_VISIT(((Trainer *)op)->grad_metrics);
    Py_VISIT(((Trainer *)op)->writer);
    Py_VISIT(((Trainer *)op)->staged);
    Py_VISIT(((Trainer *)op)->group);
    return 0;
}

static int
Trainer_clear(PyObject *op)
{
    Py_CLEAR(((Trainer *)op)->signatures);
    Py_CLEAR(((Trainer *)op)->device_loss);
    Py_CLEAR(((Trainer *)op)->grad_metrics);
    Py_CLEAR(((Trainer *)op)->writer);
    Py_CLEAR(((Trainer *)op)->staged);
    Py_CLEAR(((Trainer *)op)->group);
    return 0;
}

static void
Trainer_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    (void)Trainer_clear(op);
    type->tp_free(op);
    Py_DECREF(type);
}

/* Trainer: copies, as hyper-parameter searches and processes that are spawned make
 * them. */

static int
reject_running(PyObject *op)
{
    ctpy_state *names = ctpy_state_borrow(op);
    Trainer *self = (Trainer *)op;
    bool training;
    if (ctpy_get_flag(op, names->str_is_in_train, &training) < 0) {
        return -1;
    }
    if (training || self->saving) {
        PyErr_SetString(PyExc_TypeError,
                        "a Trainer cannot be copied or pickled while its train() runs: "
                        "copy it before or after, or save a checkpoint and resume "
                        "another Trainer from it");
        return -1;
    }
    if (self->group == NULL) {
        return 0;
    }
    const int ranks = ctpy_trainer_world_size(op);
    if (ranks > 1) {
        PyErr_Format(PyExc_TypeError,
                     "a Trainer that has joined a group of %d ranks cannot be copied "
                     "or pickled: a process has one place in it. Copy the Trainer "
                     "before it first trains or evaluates, or save a checkpoint",
                     ranks);
    }
    return ranks == 1 ? 0 : -1;
}

/* What belongs to this process: modules go by name, and an accelerator is made anew
 * when it is asked for. */
static int
leave_out(PyObject *own, const ctpy_state *names)
{
    PyObject *const made_anew[] = {names->str__accelerator,
                                   names->str__syncs_gradients};
    PyObject *adapter = PyDict_GetItemWithError(own, names->str__adapter);
    if (adapter == NULL && PyErr_Occurred()) {
        return -1;
    }
    if (adapter != NULL && PyModule_Check(adapter)) {
        PyObject *name = PyModule_GetNameObject(adapter);
        const int failed =
            name == NULL || PyDict_SetItem(own, names->str__adapter, name) < 0;
        Py_XDECREF(name);
        if (failed) {
            return -1;
        }
    }
    for (size_t i = 0; i < sizeof made_anew / sizeof made_anew[0]; i++) {
        const int found = PyDict_Contains(own, made_anew[i]);
        if (found < 0 || (found && PyDict_DelItem(own, made_anew[i]) < 0)) {
            return -1;
        }
    }
    return 0;
}

static const char Trainer___getstate___doc[] =
    "__getstate__($self, /)\n--\n\n"
    "Return what copy and pickle take: the attributes, and the sums of losses.\n\n"
    "Raises TypeError while train() runs, and in a group of several ranks.";

static PyObject *
Trainer___getstate__(PyObject *op, PyObject *Py_UNUSED(unused))
{
    if (reject_running(op) < 0) {
        return NULL;
    }
    PyObject *state =
        ctpy_copy_state_steal(op, PyObject_CallMethod(op, "_loss_state", NULL));
    if (state != NULL &&
        leave_out(PyTuple_GET_ITEM(state, 0), ctpy_state_borrow(op)) < 0) {
        Py_CLEAR(state);
    }
    return state;
}

/* The adapter's module, by the name in its place. */
static int
import_adapter(PyObject *op)
{
    PyObject *name = PyObject_GetAttrString(op, "_adapter"), *found = NULL;
    int result = name == NULL ? -1 : 0;
    if (name != NULL && PyUnicode_Check(name)) {
        PyObject *adapters = PyImport_ImportModule("ctrainer.adapters");
        found = adapters == NULL ? NULL
                                 : PyObject_CallMethod(adapters, "by_name", "O", name);
        result = found == NULL ? -1 : PyObject_SetAttrString(op, "_adapter", found);
        Py_XDECREF(adapters);
    }
    Py_XDECREF(found);
    Py_XDECREF(name);
    return result;
}

static const char Trainer___setstate___doc[] =
    "__setstate__($self, state, /)\n--\n\n"
    "Take over what __getstate__() of another Trainer returned.";

static PyObject *
Trainer___setstate__(PyObject *op, PyObject *state)
{
    PyObject *sums = ctpy_take_copy_state_borrow(op, state), *answer = NULL;
    PyObject *method = NULL, *none = NULL;
    if (sums != NULL && import_adapter(op) == 0 &&
        (method = PyObject_GetAttrString(op, "_set_loss_state")) != NULL &&
        (none = PyTuple_New(0)) != NULL) {
        answer = PyObject_Call(method, none, sums);
    }
    Py_XDECREF(none);
    Py_XDECREF(method);
    return answer;
}

static PyMethodDef Trainer_methods[] = {
    {"__getstate__", Trainer___getstate__, METH_NOARGS, Trainer___getstate___doc},
    {"__setstate__", Trainer___setstate__, METH_O,      Trainer___setstate___doc},
    {NULL,           NULL,                 0,           NULL                    },
};

static PyGetSetDef Trainer_getset[] = {
    {"_communicator", ctpy_trainer_get_communicator, NULL,
     "The Communicator of the run's ranks, joined when it is first asked for.", NULL},
    {NULL,            NULL,                          NULL, NULL,                NULL},
};

static PyType_Slot Trainer_slots[] = {
    {Py_tp_doc,      (void *)Trainer_doc},
    {Py_tp_new,      Trainer_new        },
    {Py_tp_init,     Trainer_init       },
    {Py_tp_traverse, Trainer_traverse   },
    {Py_tp_clear,    Trainer_clear      },
    {Py_tp_dealloc,  Trainer_dealloc    },
    {Py_tp_methods,  Trainer_methods    },
    {Py_tp_getset,   Trainer_getset     },
    {0,              NULL               },
};

PyType_Spec Trainer_spec = {
    .name = "ctrainer._C.Trainer",
    .basicsize = sizeof(Trainer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = Trainer_slots,
};
