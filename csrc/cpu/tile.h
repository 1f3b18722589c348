/* A few elements in the first-level cache, for kernels that convert or average them in
 * a pass of their own; in cpu/elementwise.c. */
#ifndef CT_CPU_TILE_H
#define CT_CPU_TILE_H

#include "cpu/kernels.h"

enum {
    CT_TILE = 512
};

typedef union ct_tile {
    float f32[CT_TILE];
    double f64[CT_TILE];
} ct_tile;

/* Loads elements [from, from + n) of an array of a float dtype into the tile, as
 * doubles if the tile is wide, else as floats; n <= CT_TILE. */
void ct_tile_load(ct_isa isa, ct_tile *tile, bool wide, ct_dtype dtype,
                  const void *data, size_t from, size_t n);

/* And back, rounded to nearest, ties to even. */
void ct_tile_store(ct_isa isa, const ct_tile *tile, bool wide, ct_dtype dtype,
                   void *data, size_t to, size_t n);

/* Adds elements [at, at + n) of value to the moving average, for any two dtypes:
 * computed in `real`, F32 or F64; n <= CT_TILE unless both dtypes are `real`. */
void ct_average_elements(ct_isa isa, ct_dtype real, void *average,
                         ct_dtype average_dtype, const void *value,
                         ct_dtype value_dtype, size_t at, size_t n, double decay);

#endif
