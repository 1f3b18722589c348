/* Whole reads and writes of files, with errors that name the path and the reason.
 *
 * Every function that fails does so with CT_EIO and errno in err->os_error unless it
 * says otherwise. Interrupted and short transfers are carried on. */
#ifndef CORE_BASE_IO_H
#define CORE_BASE_IO_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_piece {
    const void *data;
    size_t n; /* bytes */
} ct_piece;

/* CT_EIO: "cannot DOING PATH: REASON", os_error kept. */
CT_NODISCARD ct_status ct_fail_io(ct_error *err, int os_error, const char *doing,
                                  const char *path);

/* "folder/name", or "name" below no folder (""); NULL when out of memory. Release with
 * ct_free. */
char *ct_path_join(const char *folder, const char *name);

/* Where the last component of path starts; trailing slashes are not expected. */
const char *ct_path_name(const char *path);

/* Is name[0..n) the path of a file below a folder: "name", "sub/name", never absolute,
 * never with "..", an empty part or a NUL? */
bool ct_path_is_inside(const char *name, size_t n);

/* Makes path, which must not exist, and writes the pieces to it in order. */
CT_NODISCARD ct_status ct_write_file(const char *path, const ct_piece *pieces, size_t n,
                                     ct_error *err);

/* Puts what was written to path, a file, on the disk. */
CT_NODISCARD ct_status ct_sync_file(const char *path, ct_error *err);
CT_NODISCARD ct_status ct_sync_folder(const char *path, ct_error *err);

/* An open regular file and its size, or -1 with *err, which must be given: CT_EINVAL
 * where path is a pipe, a socket or a device, which is not waited for. */
int ct_open_read(const char *path, uint64_t *bytes, ct_error *err);

/* n bytes at offset; CT_EINVAL where the file ends sooner. path is for errors. */
CT_NODISCARD ct_status ct_read_at(int fd, void *data, size_t n, uint64_t offset,
                                  const char *path, ct_error *err);

/* Writes data[0..n) at offset. */
CT_NODISCARD ct_status ct_write_at(int fd, const void *data, size_t n, uint64_t offset,
                                   const char *path, ct_error *err);

/* Makes path and what is missing above it, and puts each new folder's name on the disk;
 * a path that is there is no error. */
CT_NODISCARD ct_status ct_make_folders(const char *path, ct_error *err);

/* Calls visit for each regular file below folder, subfolders included, with its path
 * relative to it ("sub/name"), and for each folder itself, after its content, with
 * is_folder set ("" for the outermost). Stops at the first status that is not CT_OK.
 * A symbolic link to a file counts as one, a link to a folder is passed over. */
typedef ct_status
ct_visit_fn(void *arg, const char *relative, int is_folder, ct_error *err);
CT_NODISCARD ct_status ct_walk(const char *folder, ct_visit_fn *visit, void *arg,
                               ct_error *err);

/* Removes folder and all that is below; one that is not there is no error. */
CT_NODISCARD ct_status ct_remove_tree(const char *folder, ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
