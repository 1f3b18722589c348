/* Whole reads and writes of files, with errors that name the path and the reason.
 *
 * Every function fails with CT_EIO and errno in err->os_error unless documented
 * otherwise. Interrupted and short transfers continue. */
#ifndef CORE_BASE_IO_H
#define CORE_BASE_IO_H

#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

CT_BEGIN_DECLS

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

/* Creates path (it must not exist) with n bytes of data. */
CT_NODISCARD ct_status ct_write_file(const char *path, const void *data, size_t n,
                                     ct_error *err);

/* Flush the file's data or the folder's names to the disk. */
CT_NODISCARD ct_status ct_sync_file(const char *path, ct_error *err);
CT_NODISCARD ct_status ct_sync_folder(const char *path, ct_error *err);

/* Opens a regular file for reading. -1 with *err (not NULL) on failure: CT_EINVAL for a
 * pipe, a socket or a device, without waiting. */
int ct_open_read(const char *path, uint64_t *bytes, ct_error *err);

/* Opens a new file without a name in `folder`, for reading and writing; it ends with
 * the last descriptor. -1 with errno set. */
int ct_open_unnamed(const char *folder);

/* Reads n bytes at offset; CT_EINVAL if the file ends sooner. path is for errors. */
CT_NODISCARD ct_status ct_read_at(int fd, void *data, size_t n, uint64_t offset,
                                  const char *path, ct_error *err);

/* Writes data[0..n) at offset. */
CT_NODISCARD ct_status ct_write_at(int fd, const void *data, size_t n, uint64_t offset,
                                   const char *path, ct_error *err);

/* Makes path and its missing parents, and flushes each new folder's name to the disk;
 * an existing path is no error. */
CT_NODISCARD ct_status ct_make_folders(const char *path, ct_error *err);

/* Calls visit for each regular file below folder, subfolders included, with the path
 * relative to folder ("sub/name"), and for each folder after its content, with
 * is_folder set ("" for the outermost). Stops at the first status other than CT_OK. A
 * symbolic link to a file counts as a file, a link to a folder is skipped. */
typedef ct_status
ct_visit_fn(void *arg, const char *relative, int is_folder, ct_error *err);
CT_NODISCARD ct_status ct_walk(const char *folder, ct_visit_fn *visit, void *arg,
                               ct_error *err);

/* Removes folder with its content; a missing folder is no error. */
CT_NODISCARD ct_status ct_remove_tree(const char *folder, ct_error *err);

CT_END_DECLS

#endif
