/* The ZIP archives of torch.save: stored records, data aligned to 64 bytes.
 *
 * Source: PKWARE APPNOTE.TXT 6.3.10, sections 4.3 to 4.5; torch maps such files to
 * read them, hence the alignment. */
#ifndef CORE_CHECKPOINT_ZIP_H
#define CORE_CHECKPOINT_ZIP_H

#include "core/base/json.h"
#include "core/base/status.h"
#include "core/checkpoint/plan.h"
#include "core/checkpoint/source.h"

#include <stdbool.h>
#include <stddef.h>

CT_BEGIN_DECLS

/* A record to write; borrowed, the data until the plan is written. */
typedef struct ct_zip_record {
    const char *name; /* "archive/data/0" */
    const void *data;
    ct_place place;             /* of the data */
    const ct_excerpt *excerpts; /* or n_excerpts of other files make up the data */
    size_t n_excerpts;
    size_t bytes;
} ct_zip_record;

/* Makes the plan of an archive of records[0..n). */
CT_NODISCARD ct_status ct_zip_plan(ct_plan *plan, const ct_zip_record *records,
                                   size_t n, ct_error *err);

typedef struct ct_zip_entry {
    ct_text name;           /* in the directory; UTF-8 is not promised */
    uint64_t offset, bytes; /* of the data, in the file */
    uint32_t crc;           /* from the directory */
} ct_zip_entry;

/* The records of an archive, in the order of the data. Starts as {0}. */
typedef struct ct_zip_index {
    unsigned char *directory;
    ct_zip_entry *entries;
    size_t n;
} ct_zip_index;

void ct_zip_index_fini(ct_zip_index *index);

/* Does the source begin as an archive does? */
bool ct_zip_is(const ct_source *source);

/* Reads the directory of an archive and every record's header. CT_EINVAL names the
 * archive and the reason: bytes after the end, records that are compressed or
 * overlap, equal names, or names that differ between directory and header. */
CT_NODISCARD ct_status ct_zip_index_read(ct_zip_index *index, const ct_source *source,
                                         ct_error *err);

/* Reads entries[i] to targets[i], for all records and each byte of the source once;
 * a target may be NULL, and targets too. With `expected` the file is compared with
 * that checksum, without every record with its own; CT_EINVAL names the damaged file
 * or record. */
CT_NODISCARD ct_status ct_zip_read(const ct_zip_index *index, const ct_source *source,
                                   void *const *targets, const ct_expected *expected,
                                   ct_error *err);

CT_END_DECLS

#endif
