/* Trainer: the norm of an update's gradients and their clipping.
 *
 * Our optimizers clip in their update. For any other, and where somebody looks at the
 * gradients before the update, they are clipped in place: by us in host memory, by the
 * framework on its devices. */
#include "binding/trainer/update.h"
#include "math/norm.h"

/* args.name as a double; `missing` where there is none, as in arguments of
 * transformers' own class, or None. */
static int
read_number(PyObject *args, PyObject *name, double missing, double *value)
{
    int failed;
    PyObject *found = ctpy_get_optional(args, name, &failed);
    *value = missing;
    if (found != NULL && !Py_IsNone(found)) {
        *value = PyFloat_AsDouble(found);
        failed = *value == -1.0 && PyErr_Occurred() != NULL;
        if (!failed && !(*value > 0.0)) {
            PyErr_Format(PyExc_ValueError, "%U is %R; expected a number > 0", name,
                         found);
            failed = 1;
        }
    }
    Py_XDECREF(found);
    return failed ? -1 : 0;
}

static int
read_clip(PyObject *op, ct_clip *clip)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *args = PyObject_GetAttr(op, names->str_args);
    if (args == NULL) {
        return -1;
    }
    const bool failed =
        ctpy_get_double(args, names->str_max_grad_norm, &clip->max_norm) < 0 ||
        read_number(args, names->str_grad_norm_type, 2.0, &clip->norm_type) < 0 ||
        read_number(args, names->str_max_grad_value, 0.0, &clip->value) < 0 ||
        ctpy_get_flag(args, names->str_clip_by_group, &clip->by_group) < 0;
    clip->max_norm = clip->max_norm > 0.0 ? clip->max_norm : 0.0;
    Py_DECREF(args);
    return failed ? -1 : 0;
}

int
ctpy_update_read_clip(PyObject *op, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    int clips, on_host;
    if ((clips = ctpy_is_default(op, names->str__clip_grad_norm)) < 0 ||
        ctpy_get_bool(op, names->str__inputs_stay, &on_host) < 0 ||
        read_clip(op, &u->config.clip) < 0) {
        return -1;
    }
    u->overridden = !clips && u->config.clip.max_norm > 0.0;
    u->on_host = on_host;
    return 0;
}

/* ---- gradients that are not in host memory -----------------------------------------
 */

/* Reads norms, one for each group or one of all, into the sums that they are of. */
static int
take_norms(PyObject *norms, double p, ct_grads *list, bool by_group)
{
    const ct_norm_kind kind = ct_norm_kind_of(p);
    const Py_ssize_t expected = by_group ? (Py_ssize_t)list->n_groups : 1;
    PyObject *items = PySequence_Tuple(norms);
    if (items != NULL && PyTuple_GET_SIZE(items) != expected) {
        PyErr_Format(PyExc_ValueError, "_device_grad_norms() gave %zd norms, not %zd",
                     PyTuple_GET_SIZE(items), expected);
        Py_CLEAR(items);
    }
    *ct_grads_total(list) = 0.0;
    for (Py_ssize_t i = 0; items != NULL && i < expected; i++) {
        const double norm = PyFloat_AsDouble(PyTuple_GET_ITEM(items, i));
        if (norm == -1.0 && PyErr_Occurred()) {
            Py_CLEAR(items);
            break;
        }
        const double sum = ct_norm_add(kind, p, 0.0, norm);
        *ct_grads_total(list) = ct_norm_merge(kind, *ct_grads_total(list), sum);
        if (by_group) {
            list->sums[i] = sum;
        }
    }
    Py_XDECREF(items);
    return items == NULL ? -1 : 0;
}

static int
device_measure(PyObject *op, ctpy_update *u, const ct_clip *clip, double *norm)
{
    ct_grads *list = &u->grads.list;
    const bool by_group = ct_clip_by_group(clip, list);
    PyObject *p = PyFloat_FromDouble(clip->norm_type);
    PyObject *stack[] = {op, u->optimizer, p, by_group ? Py_True : Py_False};
    PyObject *norms =
        p == NULL ? NULL
                  : PyObject_VectorcallMethod(
                        ctpy_state_borrow(op)->str__device_grad_norms, stack, 4, NULL);
    Py_XDECREF(p);
    int result =
        norms == NULL ? -1 : take_norms(norms, clip->norm_type, list, by_group);
    Py_XDECREF(norms);
    if (result == 0) { /* without groups the total is all that there is */
        double *sums = by_group ? list->sums : ct_grads_total(list);
        result = ctpy_update_share_sums(op, u, clip->norm_type, sums,
                                        by_group ? list->n_groups + 1 : 1);
    }
    if (result == 0) {
        *norm = ct_clip_decide(clip, list, u->loss_scale);
    }
    return result;
}

static int
device_clip(PyObject *op, ctpy_update *u, const ct_clip *clip)
{
    const ct_grads *list = &u->grads.list;
    PyObject *limit =
        ct_clip_by_value(clip) ? PyFloat_FromDouble(clip->value) : Py_NewRef(Py_None);
    PyObject *factors = PyList_New((Py_ssize_t)list->n_groups);
    for (size_t g = 0; factors != NULL && g < list->n_groups; g++) {
        PyObject *factor = PyFloat_FromDouble(list->groups[g].coef / u->loss_scale);
        if (factor == NULL) {
            Py_CLEAR(factors);
        }
        else {
            PyList_SET_ITEM(factors, (Py_ssize_t)g, factor);
        }
    }
    PyObject *stack[] = {op, u->optimizer, factors, limit};
    PyObject *answer =
        factors == NULL || limit == NULL
            ? NULL
            : PyObject_VectorcallMethod(ctpy_state_borrow(op)->str__device_grad_clip,
                                        stack, 4, NULL);
    Py_XDECREF(factors);
    Py_XDECREF(limit);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* ---- one update --------------------------------------------------------------------
 */

static int
host_measure(PyObject *op, ctpy_update *u, const ct_clip *clip, double *norm)
{
    ct_grads *list = &u->grads.list;
    if (ctpy_grads_sum(&u->grads, clip) < 0 ||
        ctpy_update_share_sums(op, u, clip->norm_type, list->sums, list->n_groups + 1) <
            0) {
        return -1;
    }
    *norm = ct_clip_decide(clip, list, u->loss_scale);
    return 0;
}

static int
open_and_measure(PyObject *op, ctpy_update *u, const ct_clip *clip, double *norm)
{
    ctpy_state *names = ctpy_state_borrow(op);
    ctpy_grads_close(&u->grads);
    if (ctpy_grads_open(names, u->optimizer, u->on_host, &u->grads) < 0) {
        return -1;
    }
    for (size_t g = 0; u->overridden && g < u->grads.list.n_groups; g++) {
        u->grads.list.groups[g].max_norm = 0.0; /* clipping by norm is not ours */
    }
    return (u->on_host ? host_measure : device_measure)(op, u, clip, norm);
}

static int
clip_in_place(PyObject *op, ctpy_update *u, const ct_clip *clip)
{
    return u->on_host ? ctpy_grads_clip(&u->grads, clip, u->loss_scale)
                      : device_clip(op, u, clip);
}

/* What we clip before an override of _clip_grad_norm does: nothing. */
static ct_clip
clip_before(const ctpy_update *u)
{
    return u->overridden ? (ct_clip){.norm_type = u->config.clip.norm_type}
                         : u->config.clip;
}

int
ctpy_update_measure(PyObject *op, ctpy_update *u)
{
    const ct_clip clip = clip_before(u);
    double norm;
    if (u->engine != NULL && !u->clip_first) {
        return ctpy_engine_measure(u->engine, u->optimizer, &u->config, u->loss_scale,
                                   &u->result);
    }
    if (open_and_measure(op, u, &clip, &norm) < 0) {
        return -1;
    }
    u->result.grad_norm = norm;
    u->result.finite = isfinite(norm);
    u->result.clip_coef = ct_clip_least(&u->grads.list);
    return 0;
}

int
ctpy_update_norm(PyObject *op, const ctpy_update *u, double *norm)
{
    ctpy_update only = {
        .optimizer = u->optimizer, .loss_scale = u->loss_scale, .on_host = u->on_host};
    int result = open_and_measure(op, &only, &(ct_clip){.norm_type = 2.0}, norm);
    ctpy_grads_close(&only.grads);
    return result;
}

/* An override of _clip_grad_norm(model) clips by itself and returns the norm. */
static int
clip_by_override(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    ctpy_state *names = ctpy_state_borrow(op);
    PyObject *norm =
        PyObject_CallMethodOneArg(op, names->str__clip_grad_norm, run->model);
    if (norm == NULL) {
        return -1;
    }
    const double value = Py_IsNone(norm) ? 0.0 : PyFloat_AsDouble(norm);
    if (!Py_IsNone(norm)) {
        u->result.grad_norm = value;
    }
    Py_DECREF(norm);
    return value == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* After an override, which may have put other tensors in place of the gradients. */
static int
clip_by_value(PyObject *op, ctpy_update *u)
{
    const ct_clip clip = {.value = u->config.clip.value};
    ctpy_grads_close(&u->grads);
    if (!ct_clip_by_value(&clip)) {
        return 0;
    }
    return ctpy_grads_open(ctpy_state_borrow(op), u->optimizer, u->on_host, &u->grads) <
                   0
               ? -1
               : clip_in_place(op, u, &clip);
}

int
ctpy_update_clip(PyObject *op, ctpy_run *run, ctpy_update *u)
{
    const ct_clip clip = clip_before(u);
    if (u->engine != NULL && !u->clip_first) {
        return 0;
    }
    if (clip_in_place(op, u, &clip) < 0) {
        return -1;
    }
    u->loss_scale = 1.0;
    if (u->overridden &&
        (clip_by_override(op, run, u) < 0 || clip_by_value(op, u) < 0)) {
        return -1;
    }
    u->result.clip_coef = 1.0;
    u->config.clip = (ct_clip){0};
    return 0;
}

const char Trainer__clip_grad_norm_doc[] =
    "_clip_grad_norm($self, model, /)\n--\n\n"
    "Clip the optimizer's gradients by norm, in place, as args.max_grad_norm,\n"
    "grad_norm_type and clip_by_group say; return the norm of all before.\n"
    "\n"
    "The loop clips inside the update and calls this only where it is overridden.";

PyObject *
Trainer__clip_grad_norm(PyObject *op, PyObject *Py_UNUSED(model))
{
    ctpy_state *names = ctpy_state_borrow(op);
    ctpy_update u = {.loss_scale = 1.0};
    double norm = 0.0;
    u.optimizer = PyObject_GetAttr(op, names->str_optimizer);
    bool failed = u.optimizer == NULL || ctpy_update_read_clip(op, &u) < 0 ||
                  ctpy_update_open_shards(op, &u) < 0;
    u.overridden = false; /* an override may call this one */
    u.config.clip.value = 0.0;
    failed = failed || open_and_measure(op, &u, &u.config.clip, &norm) < 0 ||
             clip_in_place(op, &u, &u.config.clip) < 0;
    ctpy_grads_close(&u.grads);
    Py_XDECREF(u.shards);
    Py_XDECREF(u.optimizer);
    return failed ? NULL : PyFloat_FromDouble(norm);
}
