/* Ranges of hyperparameters. Each test is written so that NaN fails it. */
#ifndef CT_CHECK_H
#define CT_CHECK_H

#include "core/base/status.h"

/* value >= least */
CT_NODISCARD static inline ct_status
ct_check_least(const char *name, double value, double least, ct_error *err)
{
    return value >= least ? CT_OK
                          : ct_fail(err, CT_EINVAL, "%s must be >= %g, got %g", name,
                                    least, value);
}

/* value > 0 */
CT_NODISCARD static inline ct_status
ct_check_positive(const char *name, double value, ct_error *err)
{
    return value > 0.0 ? CT_OK
                       : ct_fail(err, CT_EINVAL, "%s must be > 0, got %g", name, value);
}

/* value in [0, 1) */
CT_NODISCARD static inline ct_status
ct_check_beta(const char *name, double value, ct_error *err)
{
    return value >= 0.0 && value < 1.0
               ? CT_OK
               : ct_fail(err, CT_EINVAL, "%s must be in [0, 1), got %g", name, value);
}

#endif
