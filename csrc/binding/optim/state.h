/* Which values of state[param] a parameter has, and their memory. */
#ifndef CTPY_OPTIMIZER_VALUES_H
#define CTPY_OPTIMIZER_VALUES_H

#include "binding/optim/engine.h"

/* What the slot's kind keeps in state[param], and which of it: bit i says values[i]. */
typedef struct optim_value_list {
    const optim_spec *spec;
    unsigned kept;
    bool counts; /* values[0] is the count of steps */
} optim_value_list;

static inline bool
optim_keeps(const optim_value_list *list, size_t i)
{
    return i < list->spec->n_values && (list->kept >> i & 1) != 0;
}

static inline bool
optim_is_half(ct_dtype dtype)
{
    return dtype == CT_BF16 || dtype == CT_F16;
}

/* state[param][name of values[i]] as slot->values[i]. */
int optim_read_value(const ctpy_state *state, optim_slot *slot,
                     const optim_value_list *list, size_t i);

/* The count of steps in slot->values[0]: a tensor or array of one number, or an int. */
int optim_read_step(OptimEngine *self, optim_slot *slot, uint64_t *count);

/* Views one array that belongs to a parameter: of its shape and order, and of its dtype
 * or, beside a 16-bit one, of fp32. */
int optim_view_like(OptimEngine *self, const optim_slot *slot, const ctpy_view *param,
                    PyObject *op, const char *what, bool fp32, ctpy_view *view);

/* Views state that may be codes. */
int
optim_view_coded(OptimEngine *self, const optim_slot *slot, const optim_value *value,
                 const ctpy_view *param, PyObject *op, ctpy_view *view);

/* The maps and the scales of state that is codes. */
int optim_view_scales(OptimEngine *self, optim_slot *slot, const optim_value_list *list,
                      ct_optim_param *to);

/* Every array of slot->values that the list keeps, as the core's state. */
int optim_view_values(OptimEngine *self, optim_slot *slot, const ctpy_view *param,
                      const optim_value_list *list, ct_optim_param *to);

#endif
