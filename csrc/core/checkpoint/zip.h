/* The ZIP archives that torch.save makes: stored records, data aligned to 64 bytes.
 *
 * Source: PKWARE APPNOTE.TXT 6.3.10, sections 4.3 to 4.5; torch reads what it holds by
 * mapping the file, hence the alignment. */
#ifndef CORE_CHECKPOINT_ZIP_H
#define CORE_CHECKPOINT_ZIP_H

#include "core/base/json.h"
#include "core/base/status.h"
#include "core/checkpoint/plan.h"
#include "core/checkpoint/source.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One record to write; everything is borrowed, data until the plan is written. */
typedef struct ct_zip_record {
    const char *name; /* "archive/data/0" */
    const void *data;
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
    uint32_t crc;           /* as the directory has it */
} ct_zip_entry;

/* What an archive holds, in the order of the data. Starts as {0}. */
typedef struct ct_zip_index {
    unsigned char *directory;
    ct_zip_entry *entries;
    size_t n;
} ct_zip_index;

void ct_zip_index_fini(ct_zip_index *index);

/* Does the source begin as an archive does? */
bool ct_zip_is(const ct_source *source);

/* Reads the directory of an archive and every record's header. CT_EINVAL names the
 * archive and what is wrong: something after its end, records that are compressed,
 * that lie over each other, have one name, or another one than the directory says. */
CT_NODISCARD ct_status ct_zip_index_read(ct_zip_index *index, const ct_source *source,
                                         ct_error *err);

/* Reads entries[i]'s data into targets[i] (NULL: it is only summed), for all n, each
 * byte of the source once. With `expected` the whole is compared with its checksum,
 * without every record with its own; CT_EINVAL names what differs. */
CT_NODISCARD ct_status ct_zip_read(const ct_zip_index *index, const ct_source *source,
                                   void *const *targets, const ct_expected *expected,
                                   ct_error *err);

/* Opens the archive at path and compares all of it, reading it nowhere. */
CT_NODISCARD ct_status ct_zip_verify(const char *path, const ct_expected *expected,
                                     ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
