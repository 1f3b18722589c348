/* Gradients of any optimizer's parameters, torch's or another package's, and whether an
 * optimizer is one of ctrainer.optim. A list of owners keeps each gradient alive while
 * a pass without the GIL works on its memory. */
#include "binding/runtime/buffer.h"
#include "binding/optim/grads.h"
#include "binding/optim/engine.h"

#include "core/base/alloc.h"

#include <math.h>

/* ---- is it ours? ----------------------------------------------------------------- */

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

/* ---- gradients of a foreign optimizer -------------------------------------------- */

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

/* optimizer.param_groups as a new list or tuple that nobody else changes. */
static PyObject *
get_groups(ctpy_state *state, PyObject *optimizer)
{
    PyObject *found = PyObject_GetAttr(optimizer, state->str_param_groups);
    PyObject *groups = found == NULL ? NULL : PySequence_Tuple(found);
    Py_XDECREF(found);
    return groups;
}

static int
visit_groups(ctpy_state *state, PyObject *groups, visit_fn *visit, void *arg)
{
    int result = 0;
    for (Py_ssize_t g = 0; result == 0 && g < PySequence_Fast_GET_SIZE(groups); g++) {
        PyObject *group = Py_NewRef(PySequence_Fast_GET_ITEM(groups, g));
        result = visit_group(state, group, g, visit, arg);
        Py_DECREF(group);
    }
    return result;
}

/* What is called for a parameter and its .grad, which may be None. */
typedef int grad_function(ctpy_state *state, PyObject *param, PyObject *grad,
                          const ctpy_place *place, void *arg);

typedef struct grad_visit {
    grad_function *visit;
    void *arg;
    PyObject *owners;
} grad_visit;

static int
visit_grad(ctpy_state *state, PyObject *param, const ctpy_place *place, void *arg)
{
    const grad_visit *v = arg;
    PyObject *grad = PyObject_GetAttr(param, state->str_grad);
    int result = grad == NULL ? -1 : 0;
    if (result == 0 && !Py_IsNone(grad)) {
        result = PyList_Append(v->owners, grad);
    }
    if (result == 0) {
        result = v->visit(state, param, grad, place, v->arg);
    }
    Py_XDECREF(grad);
    return result;
}

/* Returns a list that keeps the gradients alive; NULL when a visit fails. */
static PyObject *
visit_grads(ctpy_state *state, PyObject *groups, grad_function *visit, void *arg)
{
    grad_visit v = {visit, arg, PyList_New(0)};
    if (v.owners != NULL && visit_groups(state, groups, visit_grad, &v) < 0) {
        Py_CLEAR(v.owners);
    }
    return v.owners;
}

static PyObject *
visit_all(ctpy_state *state, PyObject *optimizer, grad_function *visit, void *arg)
{
    PyObject *groups = get_groups(state, optimizer);
    PyObject *owners = groups == NULL ? NULL : visit_grads(state, groups, visit, arg);
    Py_XDECREF(groups);
    return owners;
}

static int
add_grad(ctpy_state *state, PyObject *Py_UNUSED(param), PyObject *grad,
         const ctpy_place *place, void *arg)
{
    ct_grads *list = arg;
    ctpy_view view;
    ct_error err;
    if (Py_IsNone(grad)) {
        return 0;
    }
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
    if (ct_grads_reserve(list, list->n + 1, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    ct_grads_add(list, &view.span, (uint32_t)place->group);
    return 0;
}

int
ctpy_group_max_norm(const ctpy_state *state, PyObject *group, Py_ssize_t g,
                    double *max_norm)
{
    PyObject *found = PyDict_Check(group)
                          ? PyDict_GetItemWithError(group, state->str_max_grad_norm)
                          : NULL;
    *max_norm = 0.0;
    if (found == NULL || Py_IsNone(found)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(found);
    const double value = PyFloat_AsDouble(found);
    const bool bad = !(value >= 0.0);
    if (bad && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError,
                     "param_groups[%zd]['max_grad_norm'] is %R; expected None or a "
                     "number >= 0",
                     g, found);
    }
    Py_DECREF(found);
    *max_norm = value == 0.0 ? (double)INFINITY : value;
    return bad ? -1 : 0;
}

static int
read_groups(ctpy_state *state, PyObject *groups, ct_grads *list)
{
    ct_error err;
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(groups);
    if (ct_grads_set_groups(list, (size_t)n, &err) != CT_OK) {
        return ctpy_raise_int(&err);
    }
    for (Py_ssize_t g = 0; g < n; g++) {
        PyObject *group = PySequence_Fast_GET_ITEM(groups, g);
        if (ctpy_group_max_norm(state, group, g, &list->groups[g].max_norm) < 0) {
            return -1;
        }
    }
    return 0;
}

void
ctpy_grads_close(ctpy_grads *grads)
{
    if (grads->list.device != NULL) {
        ct_grads_fini(&grads->list);
    }
    Py_CLEAR(grads->owners);
}

int
ctpy_grads_open(ctpy_state *state, PyObject *optimizer, bool on_host, ctpy_grads *grads)
{
    PyObject *groups = get_groups(state, optimizer);
    *grads = (ctpy_grads){.owners = NULL};
    ct_grads_init(&grads->list, &ct_device_cpu);
    bool failed = groups == NULL || read_groups(state, groups, &grads->list) < 0;
    if (!failed && on_host) {
        grads->owners = visit_grads(state, groups, add_grad, &grads->list);
        failed = grads->owners == NULL;
    }
    Py_XDECREF(groups);
    if (failed) {
        ctpy_grads_close(grads);
    }
    return failed ? -1 : 0;
}

int
ctpy_grads_sum(ctpy_grads *grads, const ct_clip *clip)
{
    ct_status status;
    ct_error err;
    Py_BEGIN_ALLOW_THREADS
    status = ct_clip_measure(clip, &grads->list, NULL, &err);
    Py_END_ALLOW_THREADS
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

int
ctpy_grads_measure(ctpy_grads *grads, const ct_clip *clip, double loss_scale,
                   double *norm)
{
    if (ctpy_grads_sum(grads, clip) < 0) {
        return -1;
    }
    *norm = ct_clip_decide(clip, &grads->list, loss_scale);
    return 0;
}

int
ctpy_grads_clip(ctpy_grads *grads, const ct_clip *clip, double loss_scale)
{
    ct_status status;
    ct_error err;
    Py_BEGIN_ALLOW_THREADS
    status = ct_clip_apply(clip, &grads->list, NULL, loss_scale, &err);
    Py_END_ALLOW_THREADS
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
collect_param(ctpy_state *Py_UNUSED(state), PyObject *param, PyObject *grad,
              const ctpy_place *Py_UNUSED(place), void *arg)
{
    return Py_IsNone(grad) ? 0 : PyList_Append(arg, param);
}

PyObject *
ctpy_grads_params(ctpy_state *state, PyObject *optimizer)
{
    PyObject *params = PyList_New(0);
    PyObject *owners =
        params == NULL ? NULL : visit_all(state, optimizer, collect_param, params);
    if (owners == NULL) {
        Py_CLEAR(params);
    }
    Py_XDECREF(owners);
    return params;
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
    PyObject *groups = get_groups(state, optimizer);
    int result = groups == NULL ? -1 : visit_groups(state, groups, drop_grad, NULL);
    Py_XDECREF(groups);
    return result;
}
