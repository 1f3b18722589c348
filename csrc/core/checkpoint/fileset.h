/* The files of one save: plans that are written once, and what is on the disk then.
 *
 * Others may write into the same folder, and over files of ours once these have been
 * written: the disk has the last word on what a checkpoint holds. */
#ifndef CT_FILESET_H
#define CT_FILESET_H

#include "core/checkpoint/plan.h"
#include "core/base/status.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_fileset_file ct_fileset_file;

/* Starts as {0}. */
typedef struct ct_fileset {
    ct_fileset_file *files;
    size_t n, capacity;
} ct_fileset;

void ct_fileset_fini(ct_fileset *set);
void ct_fileset_clear(ct_fileset *set); /* forgets the files, keeps the memory */

/* Takes a named plan over, leaving *plan empty; it replaces one of the same name. */
CT_NODISCARD ct_status ct_fileset_keep(ct_fileset *set, ct_plan *plan, size_t *index,
                                       ct_error *err);

/* Writes one file, or all, into folder, but none a second time. */
CT_NODISCARD ct_status ct_fileset_write_one(ct_fileset *set, size_t index,
                                            const char *folder, ct_error *err);
CT_NODISCARD ct_status ct_fileset_write(ct_fileset *set, const char *folder,
                                        ct_error *err);

/* Puts every file in folder, ours or not, on the disk, and last the manifest of them.
 */
CT_NODISCARD ct_status ct_fileset_sync(ct_fileset *set, const char *folder,
                                       ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
