/* A few elements of a span, converted for a rule.
 *
 * A rule works in place on arrays of the type of its computation; others pass through
 * tiles, so that rules are compiled for float and double alone and every mixture of
 * dtypes costs little more than the traffic. */
#ifndef CT_CPU_UPDATE_TILE_H
#define CT_CPU_UPDATE_TILE_H

#include "cpu/quant.h"

typedef struct ct_update_tile {
    const ct_update_span *span;
    size_t at, n; /* n elements from `at` on */
    size_t n_states;
    ct_dtype real; /* the rule's arguments */
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

/* Number of elements to process at a time: a tile if the span needs conversion, else a
 * part of the first-level cache if the elements are used `again`, copied or averaged,
 * else all. */
size_t ct_update_tile_length(const ct_update_span *span, ct_dtype real, size_t n_states,
                             bool again);

#endif
