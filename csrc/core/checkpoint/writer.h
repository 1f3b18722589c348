/* Saves folders of files in the background, each complete or not at all.
 *
 * begin -> add ... -> commit: adding copies the data (a snapshot) and returns; after
 * commit a thread seals, writes, syncs and renames. There is one save at a time:
 * begin waits for the last. An error of the thread is kept and returned once, by the
 * next begin or wait; the failed folder is removed, earlier folders are untouched.
 *
 * Calls must not overlap. In a forked child the writer is idle, and the parent's
 * folders are left alone. */
#ifndef CT_WRITER_H
#define CT_WRITER_H

#include "core/checkpoint/plan.h"
#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>

CT_BEGIN_DECLS

typedef struct ct_writer ct_writer;

ct_writer *ct_writer_new(void); /* NULL when out of memory */

/* Waits for a committed save and drops an open save. NULL is fine. */
void ct_writer_free(ct_writer *writer);

/* Maps memory for a snapshot of so many bytes at `place` in the background, so that the
 * first save takes no page faults, and pins no memory. Without that much memory nothing
 * happens. CT_EINVAL while a save is open. */
CT_NODISCARD ct_status ct_writer_reserve(ct_writer *writer, size_t bytes,
                                         ct_place place, ct_error *err);

/* Starts a save of final_folder. CT_EINVAL while a save is open. */
CT_NODISCARD ct_status ct_writer_begin(ct_writer *writer, const char *final_folder,
                                       ct_error *err);

/* Takes part in the open save of another process: files are added to the same `folder`,
 * and commit reports them to that process. `number` is the number of this process.
 * CT_EINVAL while a save is open. */
CT_NODISCARD ct_status ct_writer_join(ct_writer *writer, const char *folder, int number,
                                      ct_error *err);

/* Adds the parts of other, living processes, by number, to the open save: after commit
 * the thread waits for the parts, up to `seconds`, and then publishes. The save fails
 * with any of the parts, and if one of the processes dies. */
CT_NODISCARD ct_status ct_writer_expect(ct_writer *writer, const int *numbers, size_t n,
                                        double seconds, ct_error *err);

/* The folder for the files of the open save; NULL without an open save. Other files
 * written there before commit become part of the save. */
const char *ct_writer_folder_borrow(const ct_writer *writer);

/* Adds a file, in place of an earlier file of the same name. The plan is taken over,
 * also on failure, and left empty. With `copy` the data is copied to the snapshot, that
 * of a device behind the work on its place's stream, while nobody waits; without, or
 * without memory for a copy, the file is written at once. */
CT_NODISCARD ct_status ct_writer_add(ct_writer *writer, ct_plan *plan, bool copy,
                                     ct_error *err);

/* As ct_snapshot_share(), for the open save; nobody changes the data until the save is
 * done. CT_EINVAL without an open save. */
CT_NODISCARD ct_status ct_writer_share(ct_writer *writer, int fd, const void *theirs,
                                       size_t n, ct_error *err);

/* Writes all files added so far, to be read in the folder. */
CT_NODISCARD ct_status ct_writer_flush(ct_writer *writer, ct_error *err);

/* The same, and links the folder to its final name until commit, if the save was begun
 * here. */
CT_NODISCARD ct_status ct_writer_show(ct_writer *writer, ct_error *err);

/* After the open save is in place, removes the folder at path; the folder vanishes
 * as a whole. A missing folder is skipped. CT_EINVAL in a save of another process. */
CT_NODISCARD ct_status ct_writer_remove_after(ct_writer *writer, const char *path,
                                              ct_error *err);

/* Ends the open save: the rest happens in the background. */
CT_NODISCARD ct_status ct_writer_commit(ct_writer *writer, ct_error *err);

/* Waits for the thread; returns the kept error, if there is one. */
CT_NODISCARD ct_status ct_writer_wait(ct_writer *writer, ct_error *err);

bool ct_writer_pending(const ct_writer *writer); /* is the thread at work? */

/* Drops the open save, if there is one, and removes its folder. */
void ct_writer_abort(ct_writer *writer);

/* Frees the memory of the snapshots, after waiting; a kept error stays kept. */
void ct_writer_release(ct_writer *writer);
size_t ct_writer_snapshot_bytes(const ct_writer *writer);

CT_END_DECLS

#endif
