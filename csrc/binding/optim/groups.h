/* How each kind of optimizer appears in Python: the keys of its param_groups and of
 * state[param], from the lists of core/optim/kinds.h. */
#ifndef BINDING_OPTIM_GROUPS_H
#define BINDING_OPTIM_GROUPS_H

#include "binding/runtime/ctpy.h"

#include "core/optim/optim.h"

/* A key of a param_group: the offsets of a name in ctpy_state and of a member of
 * ct_optim_group. */
typedef struct optim_field {
    size_t name, member;
    ct_option_type type;
} optim_field;

/* A key of state[param]. */
typedef struct optim_value {
    size_t name;
    const char *place; /* for messages */
    int array;         /* the core's state[array]; -1: no array */
    ct_state_shape shape;
    int n_arrays; /* state[array] and the following, one behind the other */
} optim_value;

enum {
    OPTIM_MAX_VALUES = 1 + CT_OPTIM_MAX_STATES
};

typedef struct optim_spec {
    const optim_field *fields;
    size_t n_fields;
    const optim_value *values; /* the count first, if any */
    size_t n_values;           /* <= OPTIM_MAX_VALUES */
    int traits;                /* of ct_optim_trait */
} optim_spec;

extern const optim_spec optim_specs[CT_OPTIM_KIND_COUNT];

/* The interned string at that offset; borrowed. */
static inline PyObject *
optim_name_borrow(const ctpy_state *state, size_t offset)
{
    return *(PyObject *const *)((const char *)state + offset);
}

#endif
