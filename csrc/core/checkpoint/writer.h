/* Saves folders of files in the background, each whole or not at all.
 *
 * begin -> add ... -> commit: adding copies the data (a snapshot) and returns; after
 * commit a thread of its own seals, writes, synchronises and renames. One save is in
 * the making at a time: begin waits for the one before. An error of the thread is kept
 * and returned once, by the next begin or wait; the folder that failed is gone by then
 * and earlier ones are untouched.
 *
 * For one user at a time: calls must not overlap. In a forked child the writer is idle
 * and the parent's folders are left alone. */
#ifndef CT_WRITER_H
#define CT_WRITER_H

#include "core/checkpoint/plan.h"
#include "core/base/status.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ct_writer ct_writer;

ct_writer *ct_writer_new(void); /* NULL when out of memory */

/* Waits for a committed save and drops one that was not committed. NULL is fine. */
void ct_writer_free(ct_writer *writer);

/* Readies memory for a snapshot of so many bytes in the background, so that the first
 * save need not fault it in. Where it cannot be had nothing happens. CT_EINVAL while a
 * save is open. */
CT_NODISCARD ct_status ct_writer_reserve(ct_writer *writer, size_t bytes,
                                         ct_error *err);

/* Starts a save that is to appear as final_folder. CT_EINVAL when one is open. */
CT_NODISCARD ct_status ct_writer_begin(ct_writer *writer, const char *final_folder,
                                       ct_error *err);

/* Where the files of the open save go until it is committed; NULL when none is open.
 * Whatever else is written there by then becomes part of it. */
const char *ct_writer_folder_borrow(const ct_writer *writer);

/* Adds a file; the plan is taken over, also on failure, and left empty. With `copy` its
 * data is snapshotted, or, where there is no memory for that, written at once. Without
 * it is written at once. A name that was added before is replaced. */
CT_NODISCARD ct_status ct_writer_add(ct_writer *writer, ct_plan *plan, bool copy,
                                     ct_error *err);

/* Writes every file added so far, so that it can be read in the folder. */
CT_NODISCARD ct_status ct_writer_flush(ct_writer *writer, ct_error *err);

/* The same, and shows the folder under its final name until the save is committed, as a
 * link. */
CT_NODISCARD ct_status ct_writer_show(ct_writer *writer, ct_error *err);

/* Once the open save is in place, removes the folder at path, which vanishes as a
 * whole before it is taken apart; one that is not there is passed over. */
CT_NODISCARD ct_status ct_writer_remove_after(ct_writer *writer, const char *path,
                                              ct_error *err);

/* Ends the open save: the rest happens in the background. */
CT_NODISCARD ct_status ct_writer_commit(ct_writer *writer, ct_error *err);

/* Returns when nothing is under way, with the kept error if there is one. */
CT_NODISCARD ct_status ct_writer_wait(ct_writer *writer, ct_error *err);

bool ct_writer_pending(const ct_writer *writer); /* is the thread at work? */

/* Drops the open save and removes its folder; without one, does nothing. */
void ct_writer_abort(ct_writer *writer);

/* Gives the memory of the snapshots back, after waiting; a kept error stays kept. */
void ct_writer_release(ct_writer *writer);
size_t ct_writer_snapshot_bytes(const ct_writer *writer);

#ifdef __cplusplus
}
#endif

#endif
