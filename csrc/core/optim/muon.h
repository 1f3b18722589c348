/* Muon: hyperparameters, and the constants of a step. */
#ifndef CORE_OPTIM_MUON_H
#define CORE_OPTIM_MUON_H

#include "core/base/status.h"
#include "core/device/device.h"

#include "math/muon.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How the rate depends on the shape. */
typedef enum ct_muon_adjust {
    CT_MUON_ORIGINAL,        /* sqrt(max(1, rows / cols)) */
    CT_MUON_MATCH_RMS_ADAMW, /* 0.2 * sqrt(max(rows, cols)) */
    CT_MUON_ADJUST_COUNT
} ct_muon_adjust;

typedef struct ct_muon_config {
    double lr;              /* >= 0 */
    double weight_decay;    /* >= 0, decoupled, of the rate before it is adjusted */
    double momentum;        /* in [0, 1] */
    double coefficients[3]; /* of the quintic, finite */
    double eps;             /* > 0, the least norm that is divided by */
    double steps;           /* of Newton-Schulz, a whole number in [0, 100) */
    bool nesterov;
    ct_muon_adjust adjust;
} ct_muon_config;

/* Works out the constants of a step. CT_EINVAL names the hyperparameter at fault. */
CT_NODISCARD ct_status ct_muon_coef_init(ct_muon_coef *coef,
                                         const ct_muon_config *config,
                                         double grad_scale, ct_error *err);

/* What the rate of a matrix is multiplied by. */
double ct_muon_rate_factor(ct_muon_adjust adjust, size_t rows, size_t cols);

/* Newton-Schulz: the orthogonal matrix next to a given one, or near it, by the device's
 * matrix product.
 *
 * Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
 * 2024: X becomes a X + (b A + c A A) X with A = X X', as often as asked; in bfloat16,
 * as there, each product added in float32 and rounded once, or in a wider dtype. */

typedef struct ct_orthogonal {
    size_t rows, cols;
    ct_dtype dtype; /* CT_BF16, CT_F32 or CT_F64 */
    double a, b, c;
    int n_steps;
} ct_orthogonal;

/* Bytes of device memory that it takes, the matrix included, which comes first. */
size_t ct_orthogonal_bytes(const ct_orthogonal *o);

/* Works on a matrix of norm <= 1, row major, at the beginning of memory. *result is
 * where the outcome lies: there, or elsewhere in memory. */
CT_NODISCARD ct_status ct_orthogonal_run(const ct_device *device, void *stream,
                                         ct_scratch *scratch, const ct_orthogonal *o,
                                         void *memory, void **result, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
