/* ctrainer._C.GradHook: what autograd calls during a backward pass. */
#include "binding/ddp/reducer.h"

PyObject *
grad_hook_add(GradReducer *self, Py_ssize_t index)
{
    PyTypeObject *type = ctpy_state_borrow((PyObject *)self)->GradHook;
    GradHook *made = (GradHook *)type->tp_alloc(type, 0);
    if (made == NULL) {
        return NULL;
    }
    made->index = index;
    const int failed = PyList_Append(self->hooks, (PyObject *)made);
    made->reducer = failed ? NULL : self;
    Py_DECREF(made);
    return failed ? NULL : (PyObject *)made;
}

static int
tell(GradReducer *reducer, Py_ssize_t index)
{
    switch (index) {
    case GRAD_HOOK_OUTPUT:
        return grad_reducer_on_output(reducer);
    case GRAD_HOOK_END:
        return grad_reducer_on_end(reducer);
    default:
        return grad_reducer_on_gradient(reducer, index);
    }
}

/* None leaves the gradient as it is. */
static PyObject *
GradHook_call(PyObject *op, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    GradReducer *reducer = ((GradHook *)op)->reducer;
    const Py_ssize_t index = ((GradHook *)op)->index;
    if (reducer == NULL) {
        Py_RETURN_NONE;
    }
    Py_INCREF(reducer);
    const int result = tell(reducer, index);
    Py_DECREF(reducer);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(GradHook_doc, "What autograd calls for a GradReducer, which makes them.");

static PyType_Slot GradHook_slots[] = {
    {Py_tp_doc,      (void *)GradHook_doc},
    {Py_tp_call,     GradHook_call       },
    {Py_tp_traverse, ctpy_leaf_traverse  },
    {Py_tp_dealloc,  ctpy_leaf_dealloc   },
    {0,              NULL                },
};

PyType_Spec GradHook_spec = {
    .name = "ctrainer._C.GradHook",
    .basicsize = sizeof(GradHook),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = GradHook_slots,
};
