/* The norm of what each micro-batch adds to gradients that are summed in place. It
 * keeps a copy of all of them, in host memory, float32 or float64, and changes none. */
#ifndef CT_PROBE_H
#define CT_PROBE_H

#include "core/base/span.h"
#include "core/base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_probe ct_probe;

ct_probe *ct_probe_new(void);        /* NULL when out of memory */
void ct_probe_free(ct_probe *probe); /* NULL is fine */

/* Before the first micro-batch of an update: there are no gradients yet. */
void ct_probe_begin(ct_probe *probe);

/* After a micro-batch, for each gradient that is there: the sum as it is now. `number`
 * says whose it is, the same at every call. The span borrows its memory until
 * ct_probe_measure has returned. */
CT_NODISCARD ct_status ct_probe_set(ct_probe *probe, size_t number, const ct_span *grad,
                                    ct_error *err);

/* The sum of squares of what these gradients have grown by since the call before; Inf
 * or NaN when an element has. */
CT_NODISCARD ct_status ct_probe_measure(ct_probe *probe, double *sum_sq, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
