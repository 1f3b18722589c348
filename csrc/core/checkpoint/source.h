/* A file that is read once, with its bytes checked on the way.
 *
 * Files of a checkpoint may be damaged, cut short, or no regular files. Only checked
 * bytes are parsed: both steps use the same bytes from one descriptor. */
#ifndef CT_SOURCE_H
#define CT_SOURCE_H

#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

CT_BEGIN_DECLS

/* A file's size and checksum in a manifest. */
typedef struct ct_expected {
    uint64_t bytes;
    uint32_t crc32c;
} ct_expected;

/* An open regular file, or memory that is borrowed. */
typedef struct ct_source {
    const char *path; /* named in errors; borrowed */
    const unsigned char *memory;
    int fd; /* -1: memory */
    uint64_t bytes;
} ct_source;

/* Opens path. CT_EIO for an unreadable file; CT_EINVAL for no regular file, or with
 * `expected` (may be NULL) for another size. */
CT_NODISCARD ct_status ct_source_open(ct_source *source, const char *path,
                                      const ct_expected *expected, ct_error *err);
void ct_source_close(ct_source *source);

/* n bytes at offset; CT_EINVAL past the end. */
CT_NODISCARD ct_status ct_source_read(const ct_source *source, void *data, size_t n,
                                      uint64_t offset, ct_error *err);

typedef enum ct_sum {
    CT_SUM_NONE,
    CT_SUM_CRC32,
    CT_SUM_CRC32C
} ct_sum;

/* Bytes of a source. */
typedef struct ct_extent {
    uint64_t offset, n;
    void *target; /* n bytes; NULL: only summed */
    uint32_t crc; /* of the bytes, after a read with a sum */
} ct_extent;

/* Reads extents[0..n) on the pool's threads, summing each with `sum`. */
CT_NODISCARD ct_status ct_source_read_extents(const ct_source *source,
                                              ct_extent *extents, size_t n, ct_sum sum,
                                              ct_error *err);

/* CT_EINVAL unless crc32c, of the whole source, is as expected. */
CT_NODISCARD ct_status ct_source_judge(const ct_source *source,
                                       const ct_expected *expected, uint32_t crc32c,
                                       ct_error *err);

/* The size and checksum of a whole file; with `expected` (may be NULL) CT_EINVAL unless
 * both agree with that. */
CT_NODISCARD ct_status ct_checksum_file(const char *path, const ct_expected *expected,
                                        ct_expected *found, ct_error *err);

CT_END_DECLS

#endif
