/* A few elements between the stored dtype and the type of the computation, in the
 * first-level cache. */
#ifndef CT_CPU_TILE_H
#define CT_CPU_TILE_H

#include "cpu/isa.h"

#include <stdbool.h>
#include <stddef.h>

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

#endif
