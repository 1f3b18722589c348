/* Averages that an update writes in its own pass. */
#include "binding/optim/weight_average.h"
#include "binding/optim/engine.h"

/* Whether the slots' places among the averaged are known is kept by place: -1 they are
 * not averaged; UNKNOWN, as a new slot has it. */

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

int
optim_plan_average(OptimEngine *self, size_t k, ct_optim_param *param,
                   const ctpy_view *view)
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
    if (ctpy_average_view(self->average, slot->average, view, &average) < 0) {
        return -1;
    }
    param->ema = average.span.data;
    param->ema_dtype = average.span.dtype;
    ctpy_average_mark(self->average, slot->average);
    return 0;
}
