/* The safetensors format: named tensors behind a JSON header.
 *
 * Written as the safetensors library writes it (tensors by falling dtype, then name;
 * data aligned to 8 bytes) plus a CRC-32C of the data among the metadata, under
 * CT_ST_CRC_KEY, and one of the header. Read with every promise of the header checked
 * against the file.
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

#ifdef __cplusplus
extern "C" {
#endif

#define CT_ST_CRC_KEY "ctrainer.crc32c"

/* The checksum of the header with zeros for the digits of both checksums. */
#define CT_ST_HEADER_KEY "ctrainer.header_crc32c"

enum {
    CT_ST_CRC_DIGITS = 8
};

/* One tensor to write; everything is borrowed, data until the plan is written. */
typedef struct ct_st_entry {
    ct_text name;    /* UTF-8 */
    const char *tag; /* "F32", ... */
    const uint64_t *shape;
    size_t ndim;
    const void *data;
    const ct_excerpt *excerpts; /* or n_excerpts of other files make up the data */
    size_t n_excerpts;
    size_t bytes; /* the product of shape times the element's size */
} ct_st_entry;

typedef struct ct_st_pair {
    ct_text key, value;
} ct_st_pair;

/* Makes the plan of a file of entries[0..n), which are sorted in place. CT_EINVAL names
 * a tensor whose tag is unknown or whose bytes do not fit its shape. */
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

/* Opens and checks path. CT_EIO when it cannot be read; CT_EINVAL when it is not whole
 * or not safetensors, naming the file and what is wrong with it. expected: may be NULL.
 */
CT_NODISCARD ct_status ct_st_open(ct_st_file **file, const char *path,
                                  const ct_expected *expected, ct_error *err);
void ct_st_close(ct_st_file *file); /* NULL is fine */

/* Tensors in the order of their data. */
const ct_st_tensor *ct_st_tensors_borrow(const ct_st_file *file, size_t *n);
const ct_st_pair *ct_st_metadata_borrow(const ct_st_file *file, size_t *n);
const ct_st_tensor *ct_st_find_borrow(const ct_st_file *file, ct_text name);

/* Reads tensors[i]'s bytes into targets[i] (NULL: left out), for all n of the file, on
 * the pool's threads. With `check` and a checksum in the file, or an expected one (may
 * be NULL), all data is summed, also what is left out; CT_EINVAL when it differs, with
 * the targets overwritten by then. */
CT_NODISCARD ct_status ct_st_read(const ct_st_file *file, void *const *targets,
                                  bool check, const ct_expected *expected,
                                  ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
