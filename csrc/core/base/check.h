/* Ranges of options, written so that NaN is out of range. */
#ifndef CT_CHECK_H
#define CT_CHECK_H

#include "core/base/status.h"

CT_NODISCARD static inline ct_status
ct_check_least(const char *name, double value, double least, ct_error *err)
{
    return value >= least ? CT_OK
                          : ct_fail(err, CT_EINVAL, "%s must be >= %g, got %g", name,
                                    least, value);
}

#endif
