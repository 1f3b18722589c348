/* One update of any optimizer: its gradients measured over the ranks and clipped, and
 * the update made, or skipped where they are not finite.
 *
 * Our optimizers clip in the update. The gradients of any other optimizer, and
 * gradients that somebody sees before the update, are clipped in place: by our kernels,
 * or in memory without kernels by the framework's adapter. */
#include "binding/comm/communicator.h"
#include "binding/optim/optim.h"
#include "binding/runtime/buffer.h"

#include "math/norm.h"

int
ctpy_step_shard(ctpy_state *state, ctpy_step *step, PyObject *shards)
{
    step->shards = Py_NewRef(shards);
    step->config.comm = ctpy_comm_borrow(state, shards);
    step->config.global_norm = true;
    return step->config.comm == NULL ? -1 : 0;
}

/* ---- the norm and clipping, in place --------------------------------------------- */

/* Reads the adapter's norms, one for each group or one of all, into the list's sums and
 * their total. */
static int
take_norms(PyObject *norms, double p, ct_grads *list, bool by_group)
{
    const ct_norm_kind kind = ct_norm_kind_of(p);
    const Py_ssize_t n = by_group ? (Py_ssize_t)list->n_groups : 1;
    double total = 0.0, *sums = by_group ? list->sums : ct_grads_total(list);
    PyObject *items = PySequence_Tuple(norms);
    if (items != NULL && PyTuple_GET_SIZE(items) != n) {
        PyErr_Format(PyExc_ValueError, "the adapter gave %zd norms, not %zd",
                     PyTuple_GET_SIZE(items), n);
    }
    for (Py_ssize_t i = 0; items != NULL && !PyErr_Occurred() && i < n; i++) {
        const double norm = PyFloat_AsDouble(PyTuple_GET_ITEM(items, i));
        sums[i] = ct_norm_add(kind, p, 0.0, norm);
        total = ct_norm_merge(kind, total, sums[i]);
    }
    *ct_grads_total(list) = total;
    Py_XDECREF(items);
    return PyErr_Occurred() ? -1 : 0;
}

static int
sum_by_adapter(ctpy_state *state, ctpy_step *step, const ct_clip *clip, bool by_group)
{
    PyObject *p = PyFloat_FromDouble(clip->norm_type), *norms = NULL;
    if (p != NULL) {
        PyObject *stack[] = {step->optimizer, p, by_group ? Py_True : Py_False};
        norms = ctpy_call_hook(step->adapter, state->str_grad_norms, stack, 3);
        Py_DECREF(p);
    }
    const int result =
        norms == NULL ? -1
                      : take_norms(norms, clip->norm_type, step->grads.list, by_group);
    Py_XDECREF(norms);
    return result;
}

/* Adds the sums up over the ranks with shards. Without groups there is the total alone.
 */
static int
reduce_sums(ctpy_state *state, ctpy_step *step, const ct_clip *clip, bool by_group)
{
    const ct_grads *list = step->grads.list;
    const bool largest = ct_norm_kind_of(clip->norm_type) == CT_NORM_MAX;
    return step->shards == NULL
               ? 0
               : ctpy_comm_reduce_numbers(state, step->shards, NULL,
                                          by_group ? list->sums : ct_grads_total(list),
                                          by_group ? list->n_groups + 1 : 1,
                                          largest ? CT_REDUCE_MAX : CT_REDUCE_SUM);
}

int
ctpy_step_measure_in_place(ctpy_state *state, ctpy_step *step, const ct_clip *clip)
{
    ctpy_grads_close(&step->grads);
    if (ctpy_grads_open(state, step->optimizer, &step->grads) < 0) {
        return -1;
    }
    ct_grads *list = step->grads.list;
    for (size_t g = 0; step->overridden && g < list->n_groups; g++) {
        list->groups[g].max_norm = 0.0; /* clipping by norm is not ours */
    }
    const bool by_group = ct_clip_by_group(clip, list);
    if ((step->grads.elsewhere ? sum_by_adapter(state, step, clip, by_group)
                               : ctpy_grads_sum(&step->grads, clip)) < 0 ||
        reduce_sums(state, step, clip, by_group) < 0) {
        return -1;
    }
    step->result.grad_norm = ct_clip_decide(clip, list, step->loss_scale);
    step->result.finite = isfinite(step->result.grad_norm);
    step->result.clip_coef = ct_clip_least(list);
    return 0;
}

static int
clip_by_adapter(ctpy_state *state, ctpy_step *step, const ct_clip *clip)
{
    const ct_grads *list = step->grads.list;
    PyObject *limit =
        ct_clip_by_value(clip) ? PyFloat_FromDouble(clip->value) : Py_NewRef(Py_None);
    PyObject *factors = PyList_New((Py_ssize_t)list->n_groups);
    for (size_t g = 0; factors != NULL && g < list->n_groups; g++) {
        PyObject *factor = PyFloat_FromDouble(list->groups[g].coef / step->loss_scale);
        if (factor == NULL) {
            Py_CLEAR(factors);
        }
        else {
            PyList_SET_ITEM(factors, (Py_ssize_t)g, factor);
        }
    }
    PyObject *stack[] = {step->optimizer, factors, limit};
    PyObject *answer =
        factors == NULL || limit == NULL
            ? NULL
            : ctpy_call_hook(step->adapter, state->str_clip_grads, stack, 3);
    Py_XDECREF(factors);
    Py_XDECREF(limit);
    return ctpy_drop_steal(answer);
}

int
ctpy_step_clip_in_place(ctpy_state *state, ctpy_step *step, const ct_clip *clip)
{
    return step->grads.elsewhere
               ? clip_by_adapter(state, step, clip)
               : ctpy_grads_clip(&step->grads, clip, step->loss_scale);
}

/* ---- an update by itself --------------------------------------------------------- */

static int
measure(ctpy_state *state, ctpy_step *step)
{
    return step->engine != NULL
               ? ctpy_engine_measure(step->engine, step->optimizer, &step->config,
                                     step->loss_scale, &step->result)
               : ctpy_step_measure_in_place(state, step, &step->config.clip);
}

static int
apply(ctpy_state *state, ctpy_step *step)
{
    if (step->engine != NULL) {
        return ctpy_engine_apply(step->engine, step->optimizer, &step->config,
                                 step->loss_scale, &step->result);
    }
    step->result.updated =
        step->result.finite || step->config.nonfinite == CT_NONFINITE_KEEP;
    if (!step->result.updated) {
        return 0;
    }
    return ctpy_step_clip_in_place(state, step, &step->config.clip) < 0
               ? -1
               : ctpy_drop_steal(
                     PyObject_CallMethodNoArgs(step->optimizer, state->str_step));
}

/* An update that the host does not wait for. */
typedef struct ahead {
    int wanted;
    PyObject *group;      /* of the ranks that all have to want it, or None */
    PyObject *next_scale; /* a tensor for the loss scale behind the update, or NULL */
    ct_step_scale scale;
} ahead;

/* Leaves norm and update to the device, if every rank of the group can. 1; 0: the host
 * has to measure first; or -1. */
static int
enqueue(ctpy_state *state, ctpy_step *step, ahead *how)
{
    double all = how->wanted && step->engine != NULL &&
                 ctpy_engine_can_enqueue(step->engine, &step->config);
    how->scale.now = step->loss_scale;
    if (how->group != Py_None &&
        ctpy_comm_reduce_numbers(state, how->group, NULL, &all, 1, CT_REDUCE_MIN) < 0) {
        return -1;
    }
    return all > 0.0 ? ctpy_engine_enqueue(step->engine, step->optimizer, &step->config,
                                           &how->scale, how->next_scale)
                     : 0;
}

static int
update_scale(ctpy_state *state, const ctpy_step *step, PyObject *scaler)
{
    return scaler == Py_None ? 0
                             : ctpy_drop_steal(PyObject_CallMethodOneArg(
                                   scaler, state->str_update,
                                   step->result.finite ? Py_False : Py_True));
}

static const char ctpy_update_parameters_doc[] =
    "update_parameters($module, optimizer, adapter, max_norm, skips, *, scaler=None,\n"
    "                  shards=None, enqueue=False, group=None, next_scale=None)\n--\n\n"
    "Divide the gradients by the loss scale, clip, update, and set them to None.\n\n"
    "Returns the norm of all gradients before clipping, and whether the update was "
    "made;\n"
    "or where a GPU is still busy with it the OptimEngine, whose grad_norm and "
    "updated\n"
    "wait for it.\n"
    "optimizer: of ctrainer.optim, or any. adapter: of ctrainer.adapters, for "
    "gradients\n"
    "where no kernels of ctrainer work. max_norm, >= 0: 0 does not clip. skips: leave\n"
    "out an update whose gradients are not finite. scaler: a LossScaler, which then\n"
    "updates its scale. shards: the Communicator of ranks that each have a part of\n"
    "every parameter, with which the call is collective. enqueue: let no host wait "
    "for\n"
    "the GPU. group: the Communicator of ranks that all have to want and to be able\n"
    "to; None: this one alone. next_scale: with enqueue and a scaler a tensor of one\n"
    "float32 on the GPU, and what LossScaler._foresee() returns: the update puts the\n"
    "next loss scale there, and the caller updates the scaler when the result is "
    "known.";

static PyObject *
ctpy_update_parameters(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"optimizer", "adapter", "max_norm", "skips",      "scaler",
                            "shards",    "enqueue", "group",    "next_scale", NULL};
    ctpy_state *state = PyModule_GetState(module);
    ctpy_step step = {.loss_scale = 1.0};
    PyObject *optimizer, *adapter, *result = NULL;
    PyObject *scaler = Py_None, *shards = Py_None, *next_scale = Py_None;
    ahead how = {.group = Py_None};
    int skips, enqueued = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOdp|$OOpOO:update_parameters",
                                     names, &optimizer, &adapter,
                                     &step.config.clip.max_norm, &skips, &scaler,
                                     &shards, &how.wanted, &how.group, &next_scale) ||
        (next_scale != Py_None &&
         !PyArg_Parse(next_scale, "(Odd)", &how.next_scale, &how.scale.clean,
                      &how.scale.overflow))) {
        return NULL;
    }
    step.optimizer = Py_NewRef(optimizer);
    step.adapter = Py_NewRef(adapter);
    step.config.clip.norm_type = 2.0;
    step.config.nonfinite = skips ? CT_NONFINITE_SKIP : CT_NONFINITE_KEEP;
    if ((scaler == Py_None ||
         ctpy_get_double(scaler, state->str_scale, &step.loss_scale) == 0) &&
        (shards == Py_None || ctpy_step_shard(state, &step, shards) == 0) &&
        ctpy_optimizer_engine(state, optimizer, &step.engine) >= 0 &&
        (enqueued = enqueue(state, &step, &how)) >= 0 &&
        (enqueued || (measure(state, &step) == 0 && apply(state, &step) == 0)) &&
        ctpy_grads_drop(state, optimizer) == 0 &&
        (enqueued || update_scale(state, &step, scaler) == 0)) {
        result = enqueued ? Py_NewRef(step.engine)
                          : Py_BuildValue("dO", step.result.grad_norm,
                                          step.result.updated ? Py_True : Py_False);
    }
    ctpy_step_release(&step);
    return result;
}

PyMethodDef ctpy_optim_step_functions[] = {
    {"update_parameters", (PyCFunction)(void (*)(void))ctpy_update_parameters,
     METH_VARARGS | METH_KEYWORDS,                                                ctpy_update_parameters_doc},
    {NULL,                NULL,                                                0, NULL                      },
};
