/* One update of OptimEngine: parameters, gradients and state of the wrapper's live
 * dicts become the core's, then a pass or two run without the GIL. */
#include "binding/optim/engine.h"

#include "binding/comm/communicator.h"
#include "binding/optim/weight_average.h"

/* ---- shape, and parts of sharded parameters -------------------------------------- */

/* Fills in the dimensions of a parameter, for the kinds that look at them. */
static int
plan_shape(OptimEngine *self, const optim_slot *slot, ct_optim_param *param,
           const ctpy_view *view)
{
    const ct_optim_kind kind = ct_optim_groups_borrow(self->core)[slot->group].kind;
    const int ndim = view->ndim;
    param->ndim = param->rows = param->cols = 1;
    if ((optim_specs[kind].traits & CT_TRAIT_SHAPED) == 0) {
        return 0;
    }
    if (view->strides != NULL) {
        return optim_fail(PyExc_ValueError, slot, "",
                          "is transposed or channels-last in memory, and %s looks at "
                          "rows and columns: make it contiguous, or use another "
                          "optimizer",
                          ct_optim_kind_name(kind));
    }
    if (view->shape == NULL) {
        return optim_ask_for_shape(self, slot, param);
    }
    param->ndim = (size_t)ndim;
    param->cols = ndim > 0 ? optim_side(view->shape[ndim - 1]) : 1;
    param->rows = ndim > 1 ? optim_side(view->shape[ndim - 2]) : 1;
    return 0;
}

/* Fills in the part of a parameter whose memory and shape are known. Elements behind
 * the end of the parameter are padding. */
static int
plan_part(OptimEngine *self, const optim_slot *slot, ct_optim_param *param)
{
    const optim_part *part = &slot->part;
    if (part->whole == 0) {
        return 0;
    }
    const size_t left = part->whole - part->begin;
    param->n = param->n < left ? param->n : left;
    param->ndim = part->ndim;
    param->rows = part->rows;
    param->cols = part->cols;
    if (part->communicator == NULL) {
        return 0;
    }
    ct_comm *comm = ctpy_comm_borrow(self->state, part->communicator);
    if (comm == NULL) {
        return -1;
    }
    const PyObject *hosts = ctpy_comm_of_hosts(part->communicator);
    param->part =
        (ct_part){comm, part->begin, part->whole, ((const Communicator *)hosts)->comm};
    return 0;
}

/* Keeps the communicators of all parts from being closed, or no longer. */
static void
hold_groups(OptimEngine *self, bool held)
{
    for (size_t k = 0; k < self->n_slots; k++) {
        PyObject *communicator = self->slots[k].part.communicator;
        if (communicator != NULL) {
            ((Communicator *)communicator)->busy += held ? 1 : -1;
            ((Communicator *)ctpy_comm_of_hosts(communicator))->busy += held ? 1 : -1;
        }
    }
}

/* ---- which parameters have a gradient on any rank -------------------------------- */

/* Sets an empty gradient for parts without elements on this rank where another rank has
 * a gradient: all ranks update the same parameters. Collective where there are parts.
 */
static int
agree_on_grads(OptimEngine *self)
{
    double *has = NULL;
    int result = 0;
    for (size_t k = 0; result == 0 && k < self->n_slots; k++) {
        const PyObject *communicator = self->slots[k].part.communicator;
        bool seen = communicator == NULL;
        for (size_t i = 0; !seen && i < k; i++) {
            seen = self->slots[i].part.communicator == communicator;
        }
        if (!seen && has == NULL && (has = PyMem_New(double, self->n_slots)) == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        result = seen ? 0 : optim_reduce_presence(self, k, has);
    }
    PyMem_Free(has);
    return result;
}

/* ---- parameters of the live param_groups ----------------------------------------- */

/* Makes slots agree with the wrapper's live param_groups. */
static int
plan_params(OptimEngine *self, PyObject *wrapper)
{
    ctpy_state *state = self->state;
    PyObject *groups = PyObject_GetAttr(wrapper, state->str_param_groups);
    int result = -1;
    if (groups != NULL && !PyList_Check(groups)) {
        PyErr_Format(PyExc_TypeError, "param_groups is a %.200s; expected a list",
                     Py_TYPE(groups)->tp_name);
    }
    else if (groups != NULL) {
        result =
            optim_plan_slots(self, groups) < 0 ? -1 : optim_read_groups(self, groups);
    }
    Py_XDECREF(groups);
    if (result == 0 && !self->parts_asked) {
        result = optim_read_parts(self) < 0 ? -1 : optim_read_files(self);
        self->parts_asked = result == 0;
    }
    if (result < 0) {
        optim_drop_slots(self, 0);
    }
    return result;
}

/* ---- the device ------------------------------------------------------------------ */

/* The first gradient's memory says where the update runs. */
static int
choose_device(OptimEngine *self)
{
    size_t k = 0;
    while (k < self->n_slots && self->slots[k].grad == NULL) {
        k++;
    }
    if (k == self->n_slots) {
        return 0;
    }
    const optim_slot *slot = &self->slots[k];
    const ctpy_place place = {".grad", slot->group, slot->index};
    ctpy_view view;
    if (ctpy_view_anywhere(self->state, slot->grad, &place, &view) < 0) {
        return -1;
    }
    ctpy_target target;
    if (ctpy_target_of(self->state, slot->grad, &place, &view, &target) < 0) {
        return -1;
    }
    if (target.device != self->target.device ||
        target.ordinal != self->target.ordinal) {
        ct_optim_move(self->core, target.device);
    }
    self->target = target;
    return 0;
}

/* ---- gradients ------------------------------------------------------------------- */

/* Views slot->grad and copies its address into the core's parameter. */
static int
view_grad(OptimEngine *self, optim_slot *slot, ct_optim_param *param)
{
    const ct_span *span = &slot->grad_view.span;
    if (optim_view(self, slot, ".grad", slot->grad, &slot->grad_view) < 0) {
        return -1;
    }
    if (!ct_dtype_is_float(span->dtype)) {
        return optim_fail(
            PyExc_TypeError, slot, ".grad",
            "has dtype %s; expected float32, float64, bfloat16 or float16",
            ct_dtype_name(span->dtype));
    }
    /* The gradient of an empty part has no address, and is a gradient all the same. */
    param->grad = slot->part.whole != 0 && span->n == 0 ? (void *)slot : span->data;
    param->n = span->n;
    param->grad_dtype = span->dtype;
    return 0;
}

enum {
    AHEAD = 4 /* slots, for prefetching */
};

/* Takes every parameter's .grad into its slot. */
static int
take_grads(OptimEngine *self)
{
    for (size_t k = 0; k < self->n_slots; k++) {
        optim_slot *slot = &self->slots[k];
        if (k + AHEAD < self->n_slots) {
            ctpy_prefetch_tensor(slot[AHEAD].param, slot[AHEAD].shape);
            ctpy_prefetch_tensor(NULL, slot[AHEAD].grad_view.shape);
        }
        Py_XSETREF(slot->grad, PyObject_GetAttr(slot->param, self->state->str_grad));
        if (slot->grad == NULL) {
            return -1;
        }
        if (Py_IsNone(slot->grad)) {
            Py_CLEAR(slot->grad);
        }
    }
    return 0;
}

/* Reads every parameter's .grad into its slot and the core. */
static int
plan_grads(OptimEngine *self)
{
    ct_optim_param *params = ct_optim_params_borrow(self->core);
    if (agree_on_grads(self) < 0 || take_grads(self) < 0 || choose_device(self) < 0) {
        return -1;
    }
    for (size_t k = 0; k < self->n_slots; k++) {
        optim_slot *slot = &self->slots[k];
        params[k] = (ct_optim_param){
            .group = slot->group, .number = slot->number, .numbered = slot->numbered};
        if (slot->grad != NULL && view_grad(self, slot, &params[k]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- parameters and state of every slot with a gradient -------------------------- */

/* A torch parameter is its own data; a NumPy parameter has an array in .data. */
static int
find_data(ctpy_state *state, optim_slot *slot)
{
    PyTypeObject *type = Py_TYPE(slot->param);
    PyObject *data;
    if ((PyObject *)type == state->torch_parameter ||
        (PyObject *)type == state->torch_tensor ||
        (state->torch_tensor != NULL &&
         PyType_IsSubtype(type, (PyTypeObject *)state->torch_tensor))) {
        data = Py_NewRef(slot->param);
    }
    else {
        data = PyObject_GetAttr(slot->param, state->str_data);
    }
    Py_XSETREF(slot->data, data);
    return data == NULL ? -1 : 0;
}

static int
view_param(OptimEngine *self, optim_slot *slot, ctpy_view *view)
{
    if (find_data(self->state, slot) < 0 ||
        optim_view(self, slot, "", slot->data, view) < 0 ||
        optim_check_like(slot, view, &slot->grad_view, ".grad") < 0) {
        return -1;
    }
    slot->shape = view->shape;
    if (view->readonly) {
        return optim_fail(PyExc_ValueError, slot, "",
                          "is a read-only array; expected one that can be written");
    }
    return 0;
}

/* Has the update of slots[k] write the average too, where the slot is averaged. */
static int
plan_average(OptimEngine *self, size_t k, ct_optim_param *param, const ctpy_view *view)
{
    optim_slot *slot = &self->slots[k];
    ctpy_view average;
    if (!slot->average_known) {
        const Py_ssize_t hint = k == 0 ? 0 : self->slots[k - 1].average + 1;
        slot->average = ctpy_average_find(self->average, slot->data, hint);
        slot->average_known = true;
    }
    if (slot->average < 0) {
        return 0;
    }
    if (ctpy_average_take(self->average, slot->average, view, &average) < 0) {
        return -1;
    }
    param->ema = average.span.data;
    param->ema_dtype = average.span.dtype;
    return 0;
}

/* The dict of a slot's state comes from three places, one after the other. */
static void
prefetch_state(const optim_slot *slot, const optim_slot *end)
{
    if (end - slot > AHEAD) {
        ctpy_prefetch(slot[AHEAD].state, 0);
        ctpy_prefetch(slot[AHEAD / 2].step, 0);
        const PyDictObject *dict = (const PyDictObject *)slot[AHEAD / 2].state;
        const void *keys = dict == NULL ? NULL : (const void *)dict->ma_keys;
        ctpy_prefetch(keys, 0);
        ctpy_prefetch(keys, 64);
        ctpy_prefetch(keys, 128);
    }
}

/* Reads parameters and state of every slot with a gradient; missing state is made by
 * wrapper._new_state(param, group). */
static int
plan_operands(OptimEngine *self, PyObject *wrapper)
{
    ct_optim_param *params = ct_optim_params_borrow(self->core);
    if (optim_sync_state(self, wrapper) < 0) {
        return -1;
    }
    for (size_t k = 0; k < self->n_slots; k++) {
        optim_slot *slot = &self->slots[k];
        ctpy_view view;
        prefetch_state(slot, self->slots + self->n_slots);
        if (slot->grad == NULL) {
            continue;
        }
        if (view_param(self, slot, &view) < 0) {
            return -1;
        }
        params[k].param = view.span.data;
        params[k].dtype = view.span.dtype;
        if (plan_shape(self, slot, &params[k], &view) < 0 ||
            plan_part(self, slot, &params[k]) < 0) {
            return -1;
        }
        if (optim_plan_state(self, wrapper, slot, &params[k], &view) < 0 ||
            (self->averages && plan_average(self, k, &params[k], &view) < 0)) {
            return -1;
        }
    }
    return optim_remember_state(self, wrapper);
}

/* ---- one update, in two phases --------------------------------------------------- */

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
    self->capturing = false;
    self->busy--;
}

typedef enum phase {
    MEASURE,
    APPLY,
    ENQUEUE,
    AWAIT,
    PREPARE
} phase;

static ct_status
core_run(const OptimEngine *self, phase what, const ct_step_config *config,
         const ct_step_scale *scale, ct_step_result *result, ct_error *err)
{
    void *const stream = self->target.stream;
    switch (what) {
    case MEASURE:
        return ct_step_measure(self->core, stream, config, scale->now, result, err);
    case APPLY:
        return ct_step_apply(self->core, stream, config, scale->now, result, err);
    case ENQUEUE:
        return ct_step_enqueue(self->core, stream, config, scale, err);
    case PREPARE:
        return ct_step_prepare_replay(self->core, stream, config, scale->now, err);
    default:
        return ct_step_await(self->core, result, err);
    }
}

/* Runs a phase with the device current and without the GIL. */
static int
run(OptimEngine *self, phase what, const ct_step_config *config,
    const ct_step_scale *scale, ct_step_result *result)
{
    ct_error err, unused;
    const ct_device *device = self->target.device;
    int ordinal = self->target.ordinal;
    ct_status status = ct_device_switch(device, &ordinal, &err);
    if (status == CT_OK) {
        hold_groups(self, true);
        Py_BEGIN_ALLOW_THREADS
        status = core_run(self, what, config, scale, result, &err);
        Py_END_ALLOW_THREADS
        hold_groups(self, false);
        (void)ct_device_switch(device, &ordinal, &unused);
    }
    return status == CT_OK ? 0 : ctpy_raise_int(&err);
}

static int
measure(OptimEngine *self, const ct_step_config *config, double loss_scale)
{
    self->measured = false;
    const int failed =
        run(self, MEASURE, config, &(ct_step_scale){.now = loss_scale}, &self->result);
    self->measured = failed == 0;
    return failed;
}

/* Keeps the wrapper's param_groups until the update's changes there are final. */
static int
take_groups(OptimEngine *self, PyObject *wrapper)
{
    PyObject *groups = PyObject_GetAttr(wrapper, self->state->str_param_groups);
    if (groups == NULL) {
        return -1;
    }
    Py_XSETREF(self->groups, groups);
    return 0;
}

/* After an update was made, or taken back. */
static int
write_counts(OptimEngine *self)
{
    return optim_count_steps(self) < 0 ? -1 : optim_write_groups(self, self->groups);
}

static int
apply(OptimEngine *self, PyObject *wrapper, const ct_step_config *config,
      double loss_scale)
{
    const ct_step_scale scale = {.now = loss_scale};
    return take_groups(self, wrapper) < 0 ||
                   run(self, APPLY, config, &scale, &self->result) < 0
               ? -1
           : self->result.updated ? write_counts(self)
                                  : 0;
}

static int
enqueue(OptimEngine *self, PyObject *wrapper, const ct_step_config *config,
        const ct_step_scale *scale)
{
    if (take_groups(self, wrapper) < 0 || run(self, ENQUEUE, config, scale, NULL) < 0) {
        return -1;
    }
    self->enqueued = self->measured = true;
    self->result = (ct_step_result){
        .grad_norm = Py_NAN, .clip_coef = 1.0, .finite = true, .updated = true};
    return write_counts(self);
}

int
optim_await(OptimEngine *self)
{
    if (!self->enqueued) {
        return 0;
    }
    self->enqueued = false;
    self->busy++;
    const int failed = run(self, AWAIT, NULL, NULL, &self->result);
    self->busy--;
    return failed ? -1 : self->result.updated ? 0 : write_counts(self);
}

/* Reads parameters and gradients and marks the engine busy; -1 leaves it idle. */
static int
begin(OptimEngine *self, PyObject *wrapper)
{
    if (optim_check_idle(self, "a second step began") < 0 || optim_await(self) < 0) {
        return -1;
    }
    self->busy++;
    self->views = 0;
    if (plan_params(self, wrapper) < 0 || plan_grads(self) < 0) {
        end(self);
        return -1;
    }
    return 0;
}

/* torch's schedulers warn when they are stepped before their optimizer; this attribute,
 * which their wrapper of step() sets, marks the optimizer's step. */
static int
note_step(OptimEngine *self, PyObject *wrapper)
{
    return PyObject_SetAttr(wrapper, self->state->str__opt_called, Py_True);
}

/* The second phase, with the gradients in their slots. */
static int
finish(OptimEngine *self, PyObject *wrapper, const ct_step_config *config,
       double loss_scale)
{
    const ct_step_result *result = &self->result;
    int skip =
        result->spike || (!result->finite && config->nonfinite != CT_NONFINITE_KEEP);
    return (!skip && plan_operands(self, wrapper) < 0) ||
                   apply(self, wrapper, config, loss_scale) < 0 ||
                   note_step(self, wrapper) < 0
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

/* Before the first update the device is not known. */
static bool
can_enqueue(const OptimEngine *self, const ct_step_config *config)
{
    const ct_comm *comm = config->comm;
    return self->target.device != NULL && self->target.device != &ct_device_cpu &&
           (comm == NULL || comm->gpu == self->target.ordinal) &&
           ct_step_can_enqueue(self->core, config);
}

bool
ctpy_engine_can_enqueue(PyObject *engine, const ct_step_config *config)
{
    return can_enqueue((OptimEngine *)engine, config);
}

int
ctpy_engine_enqueue(PyObject *engine, PyObject *op, const ct_step_config *config,
                    ct_step_scale *scale, PyObject *next_scale)
{
    OptimEngine *self = (OptimEngine *)engine;
    ctpy_view view = {0};
    if (begin(self, op) < 0) {
        return -1;
    }
    int result = can_enqueue(self, config);
    if (result > 0 && next_scale != NULL) {
        const int failed = ctpy_view_at(self->state, next_scale, "the loss scale",
                                        &self->target, &view);
        result = failed ? -1 : result;
        scale->next = view.span.data;
    }
    if (result > 0 &&
        (plan_operands(self, op) < 0 || enqueue(self, op, config, scale) < 0 ||
         note_step(self, op) < 0)) {
        result = -1;
    }
    end(self);
    return result;
}

int
ctpy_engine_await(PyObject *engine, ct_step_result *result)
{
    OptimEngine *self = (OptimEngine *)engine;
    const int failed = optim_await(self);
    *result = self->result;
    return failed;
}

int
ctpy_engine_attach(PyObject *engine, PyObject *average)
{
    OptimEngine *self = (OptimEngine *)engine;
    if (optim_check_idle(self, "an average was attached") < 0) {
        return -1;
    }
    self->averages = average != NULL;
    if (average == NULL || average == self->average) {
        return 0;
    }
    Py_XSETREF(self->average, Py_NewRef(average));
    for (size_t k = 0; k < self->n_slots; k++) {
        self->slots[k].average_known = false;
    }
    return 0;
}

/* ---- step() ---------------------------------------------------------------------- */

/* Does an option need the norm? */
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

/* ---- updates that a graph of the device may have --------------------------------- */

static bool
is_capturable(const OptimEngine *self)
{
    const ct_optim_group *groups = ct_optim_groups_borrow(self->core);
    bool capturable = false;
    for (size_t g = 0; g < ct_optim_n_groups(self->core); g++) {
        capturable = capturable || groups[g].capturable;
    }
    return capturable;
}

static int
check_capturable(const OptimEngine *self, const ct_step_config *config, bool norm)
{
    if (self->target.device == &ct_device_cpu) {
        PyErr_SetString(PyExc_ValueError,
                        "capturable=True is for parameters on a GPU, whose updates a "
                        "graph can have; these are on the CPU: leave the option out");
        return -1;
    }
    if (!ct_optim_can_capture(self->core)) {
        PyErr_SetString(
            PyExc_ValueError,
            "capturable=True: a graph cannot have the updates of optimizers "
            "that look at whole parameters or keep numbers on the host, nor "
            "stochastic_rounding or a group's max_grad_norm");
        return -1;
    }
    if (ct_clip_by_value(&config->clip) ||
        (norm && !ct_step_can_enqueue(self->core, config))) {
        PyErr_SetString(PyExc_ValueError,
                        "capturable=True: a graph cannot have clip_value, "
                        "clip_by_group, nonfinite='stop', zero_grads beside "
                        "nonfinite='skip', or a norm_type other than 1, 2 and inf");
        return -1;
    }
    return 0;
}

static int
update_capturable(OptimEngine *self, PyObject *wrapper, ct_step_config *config,
                  double loss_scale)
{
    const ct_step_scale scale = {.now = loss_scale};
    const bool norm = norm_wanted(self, config);
    ct_error err;
    if (check_capturable(self, config, norm) < 0) {
        return -1;
    }
    if (self->target.device->capturing(self->target.stream, &self->capturing, &err) !=
        CT_OK) {
        return ctpy_raise_int(&err);
    }
    config->capture = self->capturing ? CT_CAPTURE_NOW : CT_CAPTURE_LATER;
    if (!self->capturing) {
        return norm ? (plan_operands(self, wrapper) < 0 ||
                               enqueue(self, wrapper, config, &scale) < 0 ||
                               note_step(self, wrapper) < 0
                           ? -1
                           : 0)
                    : finish(self, wrapper, config, loss_scale);
    }
    ct_step_result unused = {.clip_coef = 1.0, .finite = true};
    if (plan_operands(self, wrapper) < 0 ||
        run(self, norm ? ENQUEUE : APPLY, config, &scale, &unused) < 0) {
        return -1;
    }
    self->captured = *config;
    self->captured_scale = loss_scale;
    self->captured_norm = norm;
    return 0;
}

int
optim_prepare_replay(OptimEngine *self, PyObject *wrapper)
{
    const ct_step_scale scale = {.now = self->captured_scale};
    if (scale.now == 0.0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "no update has been captured: make the optimizer with "
                        "capturable=True, call step() once, then once more while the "
                        "stream is captured");
        return -1;
    }
    if (begin(self, wrapper) < 0) {
        return -1;
    }
    self->capturing = true;
    const int failed = plan_operands(self, wrapper) < 0 ||
                       run(self, PREPARE, &self->captured, &scale, &self->result) < 0 ||
                       optim_count_steps(self) < 0 || note_step(self, wrapper) < 0;
    if (!failed) {
        self->measured = self->enqueued = self->captured_norm;
        self->result =
            (ct_step_result){.clip_coef = 1.0, .finite = true, .updated = true};
    }
    end(self);
    return failed ? -1 : 0;
}

int
optim_update(OptimEngine *self, PyObject *wrapper, ct_step_config *config,
             double loss_scale)
{
    if (begin(self, wrapper) < 0) {
        return -1;
    }
    self->measured = false;
    self->result = (ct_step_result){.clip_coef = 1.0, .finite = true};
    int failed =
        is_capturable(self)
            ? update_capturable(self, wrapper, config, loss_scale) < 0
            : (norm_wanted(self, config) && measure(self, config, loss_scale) < 0) ||
                  finish(self, wrapper, config, loss_scale) < 0;
    end(self);
    return failed ? -1 : 0;
}
