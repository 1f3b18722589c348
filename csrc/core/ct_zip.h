/* The ZIP archives that torch.save makes: stored records, data aligned to 64 bytes.
 *
 * Source: PKWARE APPNOTE.TXT 6.3.10, sections 4.3 to 4.5; torch reads what it holds by
 * mapping the file, hence the alignment. */
#ifndef CT_ZIP_H
#define CT_ZIP_H

#include "core/ct_plan.h"
#include "core/ct_status.h"

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

/* Reads the archive at path and compares every record with its checksum. CT_EINVAL
 * names the file, the record and what is wrong. */
CT_NODISCARD ct_status ct_zip_verify(const char *path, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
