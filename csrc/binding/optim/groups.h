/* How each kind of optimizer appears in Python: the keys of its param_groups and of
 * state[param]. A new kind is an entry in binding/optim/groups.c. */
#ifndef BINDING_OPTIM_GROUPS_H
#define BINDING_OPTIM_GROUPS_H

#include "binding/runtime/ctpy.h"

#include "core/optim/optim.h"

typedef enum optim_field_type {
    OPTIM_NUMBER,   /* a double; required */
    OPTIM_PAIR,     /* two doubles, one behind the other; required */
    OPTIM_TRIPLE,   /* three of them */
    OPTIM_OPTIONAL, /* a double; NaN where the key is missing or None */
    OPTIM_CHOICE,   /* an int: which of the field's choices, 0 for None; required */
    OPTIM_FLAG,     /* a bool; false where the key is missing */
    OPTIM_FLAG_ON,  /* a bool; true where the key is missing */
    OPTIM_COUNT,    /* a whole number from 0 to 2^64 - 1; 0 where the key is missing */
    OPTIM_LIMIT,    /* a max_norm, see ctpy_group_max_norm; none where it is missing */
    OPTIM_NEVER     /* an option that we lack: it must be false or missing */
} optim_field_type;

/* A key of a param_group: a name in ctpy_state and a member of ct_optim_group, both by
 * their offset. */
typedef struct optim_field {
    size_t name, member;
    optim_field_type type;
    bool live; /* an update changes it: a number or count that is written back */
    const char *const *choices; /* ends with NULL */
} optim_field;

typedef enum optim_shape {
    OPTIM_LIKE,    /* as the parameter */
    OPTIM_ROWS,    /* an element for each row of its last two dimensions */
    OPTIM_COLS,    /* for each column of each matrix */
    OPTIM_ONE,     /* one element */
    OPTIM_PRODUCT, /* one of float32 or float64: the core\'s product */
    OPTIM_CODED,   /* as the parameter, of a float dtype or quantized to 8 bits */
    OPTIM_SCALES,  /* of codes: a float32 for each block */
    OPTIM_MAP      /* of codes: what they mean */
} optim_shape;

/* A key of state[param]. */
typedef struct optim_value {
    size_t name;
    const char *place; /* how messages speak of it */
    int array;         /* the core's state[array]; -1: no array */
    optim_shape shape;
    int n_arrays; /* of the core's in this one, one behind the other */
} optim_value;

enum {
    OPTIM_MAX_VALUES = 1 + CT_OPTIM_MAX_STATES
};

typedef struct optim_spec {
    const optim_field *fields;
    size_t n_fields;
    const optim_value *values; /* the count first, where there is one */
    size_t n_values;           /* <= OPTIM_MAX_VALUES */
    bool shaped;               /* rows and columns matter: C order is needed */
    bool clips; /* max_grad_norm is an option of its own, not the group's limit */
} optim_spec;

extern const optim_spec optim_specs[CT_OPTIM_KIND_COUNT];

/* The options that every kind has. */
extern const optim_field optim_common_fields[];
extern const size_t optim_n_common_fields;

/* The interned string at that offset; borrowed. */
static inline PyObject *
optim_name_borrow(const ctpy_state *state, size_t offset)
{
    return *(PyObject *const *)((const char *)state + offset);
}

#endif
