/* The folder of a save.
 *
 * Files go to PARENT/.ctrainer-saving-XXXXXX/NAME; publishing renames that folder to
 * PARENT/NAME. The outer folder is locked while its process lives: the next process
 * that saves there recognises and removes the folders of killed processes.
 *
 * At every moment each folder exists under its final name, or below an outer folder in
 * a place that recovery searches. An outer folder is removed only after all names are
 * restored, and only by the process that has locked it. */
#ifndef CT_STAGING_H
#define CT_STAGING_H

#include "core/base/status.h"

#include <stdbool.h>

CT_BEGIN_DECLS

/* Starts as {0}; all strings owned. */
typedef struct ct_staging {
    char *final;    /* PARENT/NAME */
    char *parent;   /* PARENT */
    char *outer;    /* PARENT/.ctrainer-saving-XXXXXX */
    char *folder;   /* outer/NAME, for the files */
    int lock;       /* descriptor of outer, locked; -1 on a file system without locks */
    bool had_final; /* final was there already */
    bool shown;     /* final is a link to folder */
    int buried;     /* folders moved to outer so far */
    char *part;     /* this process's part of another process's save; or NULL */
} ct_staging;

/* Makes the folders, PARENT too, and removes the folders of killed processes. CT_EIO
 * leaves *staging empty. */
CT_NODISCARD ct_status ct_staging_open(ct_staging *staging, const char *final_folder,
                                       ct_error *err);

/* Takes part in the save of another process, whose folder for files is `folder`, as
 * process `number`. `lock` is the part's file; the folders belong to the other process.
 * CT_EIO leaves *staging empty. */
CT_NODISCARD ct_status ct_staging_join(ct_staging *staging, const char *folder,
                                       int number, ct_error *err);

/* Makes final a link to folder, so that files can be read and written under their
 * final names; an old folder of that name waits in outer. No change on a file system
 * without links. */
CT_NODISCARD ct_status ct_staging_show(ct_staging *staging, ct_error *err);

/* Removes the link of ct_staging_show. Without a link, and if final was not there at
 * the start, files that others wrote to final become files of folder, too: after a
 * failure from here on, or a kill, final still has the files. */
CT_NODISCARD ct_status ct_staging_adopt(ct_staging *staging, ct_error *err);

/* Renames folder to final, in place of an old folder, and syncs PARENT. If the file
 * system can exchange names, final exists at every moment. Otherwise it is missing
 * between two renames: after a failure of the second the old folder is restored,
 * after a kill by ct_staging_recover. */
CT_NODISCARD ct_status ct_staging_publish(ct_staging *staging, ct_error *err);

/* Moves another folder of PARENT to outer, to be removed by ct_staging_close. */
CT_NODISCARD ct_status ct_staging_bury(ct_staging *staging, const char *folder,
                                       ct_error *err);

/* Removes the folders (except in a part), as far as possible, and frees *staging. */
void ct_staging_close(ct_staging *staging);

/* Frees *staging and leaves the disk alone, as a forked child must. */
void ct_staging_forget(ct_staging *staging);

/* Restores folders of parent that a killed process was replacing, as far as
 * possible, and removes other folders of killed processes. */
void ct_staging_recover(const char *parent);

CT_END_DECLS

#endif
