/* The list of a checkpoint's files with their sizes and checksums.
 *
 * {"version":1,"files":{"model.safetensors":{"bytes":N,"crc32c":"8 digits"},...}}
 * It is written last, so its presence says that everything before it was. */
#ifndef CT_MANIFEST_H
#define CT_MANIFEST_H

#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

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

/* Writes it into folder, files in the order of their names, and onto the disk. */
CT_NODISCARD ct_status ct_manifest_write(ct_manifest *manifest, const char *folder,
                                         ct_error *err);

/* Reads folder's; CT_EIO with ENOENT where there is none. CT_EINVAL where it lists no
 * file, one twice, or one outside of folder, also by a link in the place of a folder.
 */
CT_NODISCARD ct_status ct_manifest_read(ct_manifest *manifest, const char *folder,
                                        ct_error *err);

/* Compares every file that folder's manifest lists with the disk and tells of each
 * that is missing, of another size or damaged. Files that it does not list are no
 * problem. Fails only where the manifest cannot be read or memory is short. */
typedef ct_status ct_problem_fn(void *arg, const char *problem, ct_error *err);
CT_NODISCARD ct_status ct_manifest_verify(const char *folder, ct_problem_fn *tell,
                                          void *arg, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
