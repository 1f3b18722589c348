/* Gradients of any optimizer's parameters, and whether an optimizer is ours. */
#include "binding/buffer.h"
#include "binding/ctpy_optim.h"
#include "binding/optimizer.h"

#include "core/ct_alloc.h"

#include <math.h>

/* ---- is it ours? -------------------------------------------------------------------
 */

/* 1 when op.name is a dict with entries; a missing attribute is none. */
static int
has_entries(PyObject *op, PyObject *name)
{
    PyObject *hooks;
    int found = ctpy_lookup(op, name, &hooks);
    if (found == 1) {
        found = PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) > 0;
        Py_DECREF(hooks);
    }
    return found;
}

/* 1 when the instance has a `step` of its own that is not a scheduler's wrapper. */
static int
step_replaced(ctpy_state *state, PyObject *op)
{
    PyObject *own, *wrapped;
    PyObject *dict = PyObject_GenericGetDict(op, NULL);
    if (dict == NULL) {
        return -1;
    }
    own = PyDict_GetItemWithError(dict, state->str_step);
    Py_XINCREF(own);
    Py_DECREF(dict);
    if (own == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    int found = ctpy_lookup(own, state->str__wrapped_by_lr_sched, &wrapped);
    if (found == 1) {
        Py_DECREF(wrapped);
    }
    Py_DECREF(own);
    return found < 0 ? -1 : !found;
}

/* 1 when driving the engine does all that op.step() would. */
static int
can_drive(ctpy_state *state, PyObject *op)
{
    PyObject *native;
    int found = ctpy_lookup(op, state->str__native_step, &native);
    if (found < 1) {
        return found;
    }
    int answer = PyObject_IsTrue(native);
    Py_DECREF(native);
    int extra = answer < 1 ? 0 : step_replaced(state, op);
    extra = extra != 0 ? extra : has_entries(op, state->str__optimizer_step_pre_hooks);
    extra = extra != 0 ? extra : has_entries(op, state->str__optimizer_step_post_hooks);
    return answer < 0 || extra < 0 ? -1 : answer && !extra;
}

int
ctpy_optimizer_engine(ctpy_state *state, PyObject *op, PyObject **engine)
{
    PyObject *found;
    int ours = ctpy_lookup(op, state->str__engine, &found);
    if (ours < 1) {
        return ours;
    }
    ours = Py_IS_TYPE(found, state->OptimEngine) ? can_drive(state, op) : 0;
    if (ours == 1) {
        *engine = Py_NewRef(found);
    }
    Py_DECREF(found);
    return ours;
}

/* ---- gradients of a foreign optimizer ----------------------------------------------
 */

/* Spans of gradients and the tensors that own them. */
typedef struct grad_list {
    ct_span *spans;
    PyObject *owners; /* a list */
    size_t n, capacity;
} grad_list;

static void
grad_list_fini(grad_list *list)
{
    ct_free(list->spans);
    Py_CLEAR(list->owners);
}

static int
grad_list_add(ctpy_state *state, grad_list *list, PyObject *grad,
              const ctpy_place *place)
{
    ctpy_view view;
    ct_error err;
    void *block = list->spans;
    if (ctpy_view_of(state, grad, place, &view) < 0) {
        return -1;
    }
    if (!ct_dtype_is_float(view.span.dtype)) {
        PyErr_Format(PyExc_TypeError,
                     "param_groups[%zd]['params'][%zd].grad has dtype %s; expected a "
                     "floating point dtype",
                     place->group, place->index, ct_dtype_name(view.span.dtype));
        return -1;
    }
    if (ct_grow(&block, &list->capacity, list->n + 1, sizeof *list->spans, &err) !=
        CT_OK) {
        return ctpy_raise_int(&err);
    }
    list->spans = block;
    list->spans[list->n++] = view.span;
    return PyList_Append(list->owners, grad);
}

/* Calls visit(state, param, place, arg) for every parameter of every group. */
typedef int
visit_fn(ctpy_state *state, PyObject *param, const ctpy_place *place, void *arg);

static int
visit_group(ctpy_state *state, PyObject *group, Py_ssize_t g, visit_fn *visit,
            void *arg)
{
    int result = 0;
    PyObject *found = PyObject_GetItem(group, state->str_params);
    PyObject *params = found == NULL
                           ? NULL
                           : PySequence_Fast(found, "the 'params' of an optimizer's "
                                                    "group are not a sequence");
    Py_XDECREF(found);
    if (params == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; result == 0 && i < PySequence_Fast_GET_SIZE(params); i++) {
        const ctpy_place place = {".grad", g, i};
        PyObject *param = Py_NewRef(PySequence_Fast_GET_ITEM(params, i));
        result = visit(state, param, &place, arg);
        Py_DECREF(param);
    }
    Py_DECREF(params);
    return result;
}

static int
visit_params(ctpy_state *state, PyObject *optimizer, visit_fn *visit, void *arg)
{
    PyObject *found = PyObject_GetAttr(optimizer, state->str_param_groups);
    PyObject *groups =
        found == NULL ? NULL : PySequence_Fast(found, "param_groups is not a sequence");
    Py_XDECREF(found);
    if (groups == NULL) {
        return -1;
    }
    int result = 0;
    for (Py_ssize_t g = 0; result == 0 && g < PySequence_Fast_GET_SIZE(groups); g++) {
        PyObject *group = Py_NewRef(PySequence_Fast_GET_ITEM(groups, g));
        result = visit_group(state, group, g, visit, arg);
        Py_DECREF(group);
    }
    Py_DECREF(groups);
    return result;
}

static int
collect_grad(ctpy_state *state, PyObject *param, const ctpy_place *place, void *arg)
{
    PyObject *grad = PyObject_GetAttr(param, state->str_grad);
    if (grad == NULL) {
        return -1;
    }
    int result = Py_IsNone(grad) ? 0 : grad_list_add(state, arg, grad, place);
    Py_DECREF(grad);
    return result;
}

static int
collect_grads(ctpy_state *state, PyObject *optimizer, grad_list *list)
{
    *list = (grad_list){.owners = PyList_New(0)};
    if (list->owners == NULL ||
        visit_params(state, optimizer, collect_grad, list) < 0) {
        grad_list_fini(list);
        return -1;
    }
    return 0;
}

int
ctpy_grads_norm(ctpy_state *state, PyObject *optimizer, double *norm)
{
    grad_list list;
    ct_scratch scratch = {0};
    ct_status status;
    ct_error err;
    double sum_sq = 0.0;
    if (collect_grads(state, optimizer, &list) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_device_cpu.norm(NULL, &scratch, list.spans, list.n, &sum_sq, &err);
    ct_device_cpu.scratch_release(&scratch);
    Py_END_ALLOW_THREADS
    grad_list_fini(&list);
    *norm = sqrt(sum_sq);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

int
ctpy_grads_scale(ctpy_state *state, PyObject *optimizer, double factor)
{
    grad_list list;
    ct_status status;
    ct_error err;
    if (collect_grads(state, optimizer, &list) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_device_cpu.scale(NULL, factor, list.spans, list.n, &err);
    Py_END_ALLOW_THREADS
    grad_list_fini(&list);
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
drop_grad(ctpy_state *state, PyObject *param, const ctpy_place *place, void *arg)
{
    (void)place;
    (void)arg;
    return PyObject_SetAttr(param, state->str_grad, Py_None);
}

int
ctpy_grads_drop(ctpy_state *state, PyObject *optimizer)
{
    return visit_params(state, optimizer, drop_grad, NULL);
}
