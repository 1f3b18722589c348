/* The list of a checkpoint's files with sizes and checksums.
 *
 * {"version":1,"files":{"model.safetensors":{"bytes":N,"crc32c":"8 digits"},...}}
 *
 * The manifest is written last: its presence proves that all files are complete. */
#ifndef CT_MANIFEST_H
#define CT_MANIFEST_H

#include "core/base/buf.h"
#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

CT_BEGIN_DECLS

#define CT_MANIFEST_NAME "ctrainer_manifest.json"

typedef struct ct_manifest_file {
    char *name; /* relative to the checkpoint's folder; owned */
    uint64_t bytes;
    uint32_t crc32c;
} ct_manifest_file;

/* Starts as {0}. */
typedef struct ct_manifest {
    ct_manifest_file *files;
    size_t n, capacity;
} ct_manifest;

void ct_manifest_fini(ct_manifest *manifest);
CT_NODISCARD ct_status ct_manifest_add(ct_manifest *manifest, const char *name,
                                       size_t name_n, uint64_t bytes, uint32_t crc32c,
                                       ct_error *err);

/* Appends the manifest's text to buf, files sorted by name. */
CT_NODISCARD ct_status ct_manifest_format(ct_manifest *manifest, ct_buf *buf,
                                          ct_error *err);

/* Adds the files of such a text, which is changed; `what` names it in errors. */
CT_NODISCARD ct_status ct_manifest_parse(ct_manifest *manifest, char *text, size_t n,
                                         const char *what, ct_error *err);

/* Writes the manifest to folder, and syncs it to the disk. */
CT_NODISCARD ct_status ct_manifest_write(ct_manifest *manifest, const char *folder,
                                         ct_error *err);

/* Reads the folder's manifest; CT_EIO with ENOENT without a manifest. CT_EINVAL for
 * an empty list, a file listed twice, or a file outside of the folder, also by a
 * linked folder. */
CT_NODISCARD ct_status ct_manifest_read(ct_manifest *manifest, const char *folder,
                                        ct_error *err);

/* Compares every listed file with the disk, and reports files that are missing,
 * damaged or of another size. Other files are ignored. Fails only for an unreadable
 * manifest or for lack of memory. */
typedef ct_status ct_problem_fn(void *arg, const char *problem, ct_error *err);
CT_NODISCARD ct_status ct_manifest_verify(const char *folder, ct_problem_fn *report,
                                          void *arg, ct_error *err);

CT_END_DECLS

#endif
