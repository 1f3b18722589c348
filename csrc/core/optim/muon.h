/* Muon: hyperparameters, and the constants of a step. */
#ifndef CT_MUON_H
#define CT_MUON_H

#include "core/base/status.h"
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

#ifdef __cplusplus
}
#endif

#endif
