#include "cpu/tile.h"

#define CT_BODY "cpu/tile_body.h"
#include "cpu/expand.h"

typedef void
widen_body(const void *data, size_t from, size_t n, ct_tile *to, bool wide);
typedef void
narrow_body(const ct_tile *from, bool wide, void *data, size_t to, size_t n);

static widen_body *const wideners[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(widen);
static narrow_body *const narrowers[CT_ISA_COUNT][CT_FLOAT_DTYPES] = CT_BODIES(narrow);

void
ct_tile_load(ct_isa isa, ct_tile *tile, bool wide, ct_dtype dtype, const void *data,
             size_t from, size_t n)
{
    wideners[isa][dtype](data, from, n, tile, wide);
}

void
ct_tile_store(ct_isa isa, const ct_tile *tile, bool wide, ct_dtype dtype, void *data,
              size_t to, size_t n)
{
    narrowers[isa][dtype](tile, wide, data, to, n);
}
