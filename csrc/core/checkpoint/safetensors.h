/* The safetensors format: named tensors behind a JSON header.
 *
 * Files are written as by the safetensors library (tensors by falling dtype, then
 * name; data aligned to 8 bytes), plus two CRC-32C in the metadata: of the data
 * under CT_ST_CRC_KEY, and of the header. Reading checks every statement of the
 * header against the file.
 *
 * Source: github.com/huggingface/safetensors, README, "Format". */
#ifndef CORE_CHECKPOINT_SAFETENSORS_H
#define CORE_CHECKPOINT_SAFETENSORS_H

#include "core/base/json.h"
#include "core/base/status.h"
#include "core/checkpoint/plan.h"
#include "core/checkpoint/source.h"

#include <stddef.h>
#include <stdint.h>

CT_BEGIN_DECLS

#define CT_ST_CRC_KEY "ctrainer.crc32c"

/* The checksum of the header with zeros for the digits of both checksums. */
#define CT_ST_HEADER_KEY "ctrainer.header_crc32c"

enum {
    CT_ST_CRC_DIGITS = 8
};

/* A tensor to write; borrowed, the data until the plan is written. */
typedef struct ct_st_entry {
    ct_text name;    /* UTF-8 */
    const char *tag; /* "F32", ... */
    const uint64_t *shape;
    size_t ndim;
    const void *data;
    ct_place place;             /* of the data */
    const ct_excerpt *excerpts; /* or n_excerpts of other files make up the data */
    size_t n_excerpts;
    size_t bytes; /* the product of shape times the element's size */
} ct_st_entry;

typedef struct ct_st_pair {
    ct_text key, value;
} ct_st_pair;

/* Makes the plan of a file of entries[0..n), and sorts the entries in place.
 * CT_EINVAL names a tensor with an unknown tag, or with bytes that do not fit the
 * shape. */
CT_NODISCARD ct_status ct_st_plan(ct_plan *plan, ct_st_entry *entries, size_t n,
                                  const ct_st_pair *metadata, size_t n_metadata,
                                  ct_error *err);

typedef struct ct_st_tensor {
    ct_text name, tag; /* inside the file's header */
    uint64_t *shape;   /* ndim extents */
    size_t ndim;
    uint64_t begin, end; /* in the file */
} ct_st_tensor;

typedef struct ct_st_file ct_st_file;

/* Opens and checks path. CT_EIO for an unreadable file; CT_EINVAL, with the file and
 * the reason, for a file that is damaged or not safetensors. expected: may be NULL. */
CT_NODISCARD ct_status ct_st_open(ct_st_file **file, const char *path,
                                  const ct_expected *expected, ct_error *err);
void ct_st_close(ct_st_file *file); /* NULL is fine */

/* Tensors in the order of their data. */
const ct_st_tensor *ct_st_tensors_borrow(const ct_st_file *file, size_t *n);
const ct_st_pair *ct_st_metadata_borrow(const ct_st_file *file, size_t *n);
const ct_st_tensor *ct_st_find_borrow(const ct_st_file *file, ct_text name);

/* Reads tensors[i] to targets[i], for all tensors of the file, on the pool's
 * threads; a target may be NULL, and targets too. With `check` and a checksum in the
 * file, or with `expected` (may be NULL), all data is summed, skipped tensors
 * included. CT_EINVAL for another checksum; targets are overwritten by then. */
CT_NODISCARD ct_status ct_st_read(const ct_st_file *file, void *const *targets,
                                  bool check, const ct_expected *expected,
                                  ct_error *err);

CT_END_DECLS

#endif
