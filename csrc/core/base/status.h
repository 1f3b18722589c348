/* Status codes and error messages of the core.
 *
 * A function that can fail returns ct_status and takes `ct_error *err` last. The
 * frame that detects the failure knows most, so this frame alone writes *err; every
 * caller above passes the status up untouched. A failed call leaves its object
 * unchanged. err may be NULL. */
#ifndef CT_STATUS_H
#define CT_STATUS_H

#include "core/base/decls.h"

CT_BEGIN_DECLS

#ifdef __GNUC__
#define CT_NODISCARD __attribute__((warn_unused_result))
#define CT_PRINTF(pattern, first) __attribute__((format(printf, pattern, first)))
#else
#define CT_NODISCARD
#define CT_PRINTF(pattern, first)
#endif

typedef enum ct_status {
    CT_OK = 0,
    CT_EINVAL,  /* the caller broke the contract */
    CT_ENOMEM,  /* an allocation failed */
    CT_EFLOAT,  /* the numbers went bad: NaN, Inf or underflow */
    CT_EDEVICE, /* the device or its driver failed */
    CT_EIO,     /* the file system failed; err->os_error says why */
    CT_ECOMM,   /* a collective failed or a peer is gone */
    CT_EHOST,   /* a host callback failed and has reported it already */
} ct_status;

typedef struct ct_error {
    ct_status code;
    int os_error; /* errno of a CT_EIO, else 0 */
    char message[400];
} ct_error;

/* Fills *err and returns code, so that a failing branch is one statement. */
CT_NODISCARD CT_PRINTF(3, 4) ct_status
    ct_fail(ct_error *err, ct_status code, const char *format, ...);

CT_END_DECLS

#endif
