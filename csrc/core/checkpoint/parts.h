/* Parts of a save, written by several processes.
 *
 * The process that began the save publishes the folder; each other process writes files
 * of its own to the same folder, in a thread. Beside the folder a part has a file,
 * named by a number and locked while the part's process lives. At the end of the part
 * the file gets a list of the written files, or the error.
 *
 * A part without an end and without a lock belonged to a process that has died. Where
 * locks of other machines cannot be seen, only a time-out ends the wait for a dead
 * process. */
#ifndef CT_PARTS_H
#define CT_PARTS_H

#include "core/base/status.h"
#include "core/base/wait.h"
#include "core/checkpoint/manifest.h"

#include <stdbool.h>
#include <stddef.h>

CT_BEGIN_DECLS

/* The path of a part's file; `folder` is the folder of the save. NULL when out of
 * memory. Release with ct_free. */
char *ct_part_path(const char *folder, int number);

/* Makes and locks the file. The descriptor, to be closed by the caller, or -1. */
int ct_part_open(const char *path, ct_error *err);

/* Ends the part: with the files `written`, on the disk by now, or with `failure`,
 * unless NULL. */
CT_NODISCARD ct_status ct_part_end(int fd, const char *path, ct_manifest *written,
                                   const ct_error *failure, ct_error *err);

/* Does this process see the lock of the part of another process? Not of a part that has
 * ended, nor where the file system has no locks. */
CT_NODISCARD ct_status ct_part_is_locked(const char *folder, int number, bool *locked,
                                         ct_error *err);

/* Waits for the end of a part, and adds the part's files to *found, except files
 * changed since. CT_EIO with the error of a part that has failed; CT_ECOMM for a
 * process that has died (if `locked`) or has not finished at the deadline. */
CT_NODISCARD ct_status ct_part_await(const char *folder, int number, bool locked,
                                     ct_deadline deadline, ct_manifest *found,
                                     ct_error *err);

CT_END_DECLS

#endif
