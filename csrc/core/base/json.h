/* A strict JSON reader for the two small formats of a checkpoint: a safetensors header
 * and a manifest.
 *
 * The caller walks the text it expects; anything else is an error that says where.
 * Strings are decoded in place, in the caller's buffer, so nothing is allocated and
 * hostile input can cost no memory. Source: RFC 8259. */
#ifndef CT_JSON_H
#define CT_JSON_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_json {
    const char *what; /* named in errors, e.g. the file's path; borrowed */
    char *start, *at, *end;
} ct_json;

/* Valid UTF-8 inside the text that was given, not terminated. */
typedef struct ct_text {
    const char *data;
    size_t n;
} ct_text;

bool ct_text_is(ct_text text, const char *other);
int ct_text_compare(ct_text a, ct_text b); /* by bytes, as memcmp */

/* Reads text[0..n), which must outlive *json and is overwritten as strings decode. */
void ct_json_init(ct_json *json, const char *what, char *text, size_t n);

/* An object or array: enter it, then ask for more until there is none. `open` is '{' or
 * '['; *first starts as true and belongs to this object. Of an object, *key is the
 * next member's name and its value follows; of an array pass NULL. */
CT_NODISCARD ct_status ct_json_enter(ct_json *json, char open, ct_error *err);
CT_NODISCARD ct_status ct_json_more(ct_json *json, char open, bool *first, bool *more,
                                    ct_text *key, ct_error *err);

CT_NODISCARD ct_status ct_json_string(ct_json *json, ct_text *text, ct_error *err);
CT_NODISCARD ct_status ct_json_u64(ct_json *json, uint64_t *value, ct_error *err);

/* Any value, nested at most 64 deep. */
CT_NODISCARD ct_status ct_json_skip(ct_json *json, ct_error *err);

/* Only white space may follow. */
CT_NODISCARD ct_status ct_json_finish(ct_json *json, ct_error *err);

/* CT_EINVAL: "WHAT: MESSAGE at byte N". */
CT_NODISCARD ct_status ct_json_fail(const ct_json *json, const char *message,
                                    ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
