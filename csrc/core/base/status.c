/* Formats error messages into the caller's ct_error. */
#include "core/base/status.h"

#include <stdarg.h>
#include <stdio.h>

ct_status
ct_fail(ct_error *err, ct_status code, const char *format, ...)
{
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        err->code = code;
        err->os_error = 0;
        (void)vsnprintf(err->message, sizeof err->message, format, args);
        va_end(args);
    }
    return code;
}
