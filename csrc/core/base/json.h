/* A strict JSON reader for the two small formats of a checkpoint: a safetensors header
 * and a manifest.
 *
 * The caller walks the expected text; anything else is an error with the position.
 * Strings are decoded in place, in the caller's buffer, so nothing is allocated and
 * hostile input can cost no memory. Source: RFC 8259. */
#ifndef CT_JSON_H
#define CT_JSON_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

CT_BEGIN_DECLS

typedef struct ct_json {
    const char *what; /* named in errors, e.g. the file's path; borrowed */
    char *start, *at, *end;
} ct_json;

/* Valid UTF-8 inside the given text, not terminated. */
typedef struct ct_text {
    const char *data;
    size_t n;
} ct_text;

bool ct_text_is(ct_text text, const char *other);
int ct_text_compare(ct_text a, ct_text b); /* by bytes, as memcmp */

/* Reads text[0..n), which must outlive *json and is overwritten as strings decode. */
void ct_json_init(ct_json *json, const char *what, char *text, size_t n);

/* Reads an object ('{') or array ('['): calls item for each member, which reads the
 * value; `key` is empty in an array. Stops at the first failure. */
typedef ct_status ct_json_item_fn(void *arg, ct_json *json, ct_text key, ct_error *err);
CT_NODISCARD ct_status ct_json_each(ct_json *json, char open, ct_json_item_fn *item,
                                    void *arg, ct_error *err);

CT_NODISCARD ct_status ct_json_string(ct_json *json, ct_text *text, ct_error *err);
CT_NODISCARD ct_status ct_json_u64(ct_json *json, uint64_t *value, ct_error *err);

/* Any value, nested at most 64 deep. */
CT_NODISCARD ct_status ct_json_skip(ct_json *json, ct_error *err);

/* Only white space may follow. */
CT_NODISCARD ct_status ct_json_finish(ct_json *json, ct_error *err);

/* CT_EINVAL: "WHAT: MESSAGE at byte N". */
CT_NODISCARD ct_status ct_json_fail(const ct_json *json, const char *message,
                                    ct_error *err);

CT_END_DECLS

#endif
