/* The tiles of Intel's AMX, which multiply bfloat16, behind one small product.
 *
 * A block of the result is CT_BLOCK x CT_BLOCK floats. Its factors are packed in panels
 * of CT_BLOCK k at a time, zeros where a matrix ends:
 *
 *     a[panel][row][k]
 *     b[panel][half][k / 2][column][k % 2]     two halves of CT_BLOCK / 2 columns
 */
#ifndef CT_CPU_AMX_H
#define CT_CPU_AMX_H

#include "cpu/isa.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(CT_HAVE_X86_LEVELS) && defined(__linux__) && __GNUC__ >= 11
#define CT_HAVE_AMX 1
#endif

enum {
    CT_BLOCK = 32,
    CT_PANEL = CT_BLOCK * CT_BLOCK /* elements of a panel of either factor */
};

/* Whether this processor has the tiles, the system lets us use them, and the
 * instruction set in use is the best one. */
bool ct_amx_usable(ct_isa isa);

/* Around the products of one thread; for usable tiles alone, as the next. */
void ct_amx_begin(void);
void ct_amx_end(void);

/* sums[row][column] += the sum over the panels' k of a[row][k] * b[k][column], in fp32,
 * k rising. All aligned to 64 bytes. */
void
ct_amx_multiply(const uint16_t *a, const uint16_t *b, size_t n_panels, float *sums);

#endif
