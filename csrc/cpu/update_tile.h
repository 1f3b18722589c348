/* A few elements of one span, with its arrays as a rule wants them.
 *
 * Arrays of the type that the rule computes in are handed to it where they are; others
 * pass through tiles, so that a rule is compiled for float and double alone and every
 * mixture of dtypes costs little more than its traffic. */
#ifndef CT_CPU_UPDATE_TILE_H
#define CT_CPU_UPDATE_TILE_H

#include "cpu/quant.h"

typedef struct ct_update_tile {
    const ct_update_span *span;
    size_t at, n; /* n elements from `at` on */
    size_t n_states;
    ct_dtype real; /* what the rule is handed */
    ct_isa isa;
    const ct_quant_searches *searches; /* for state that is U8 */
} ct_update_tile;

/* Elements to work on, of the type that the rule computes in. */
typedef struct ct_operands {
    void *grad, *param;
    void *state[CT_RULE_MAX_STATES];
} ct_operands;

typedef struct ct_operand_tiles {
    ct_tile grad, param, state[CT_RULE_MAX_STATES];
} ct_operand_tiles;

static inline void *
ct_update_tile_element(const ct_update_tile *s, void *data, ct_dtype dtype)
{
    return (char *)data + s->at * ct_dtype_size(dtype);
}

/* Every array of the rule; the states written back. */
ct_operands ct_update_tile_operands(const ct_update_tile *s, ct_operand_tiles *tiles);
void ct_update_tile_write_states(const ct_update_tile *s, const ct_operands *at);

/* How many elements to take at a time: a tile where one is needed, else what stays in
 * the first-level cache where the caller passes over them `again` or they are copied or
 * averaged, else all. */
size_t ct_update_tile_length(const ct_update_span *span, ct_dtype real, size_t n_states,
                             bool again);

#endif
