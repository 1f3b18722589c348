/* Stochastic rounding on the CPU: random bits and rounding, per instruction set. */
#include "cpu/dither.h"

#include "math/philox.h"

enum {
    BLOCKS = CT_TILE / 8 /* of Philox, of eight elements each */
};

#define CT_ONLY_F32_F64
#define CT_BODY "cpu/body/dither.h"
#include "cpu/expand.h"

typedef void dither_body(const void *from, uint16_t *restrict to,
                         const ct_rounding *rounding, uint64_t number, size_t n);

static dither_body *const bodies[CT_ISA_COUNT][CT_F64 + 1] = CT_REAL_BODIES(dither);

void
ct_dither(ct_isa isa, ct_dtype real, const ct_tile *from, uint16_t *to,
          const ct_rounding *rounding, uint64_t number, size_t n)
{
    bodies[isa][real](from, to, rounding, number, n);
}
