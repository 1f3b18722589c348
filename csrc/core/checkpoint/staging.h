/* A folder that appears under its final name whole or not at all.
 *
 * Files go to PARENT/.ctrainer-saving-XXXXXX/NAME; publishing renames that to
 * PARENT/NAME. The outer folder is locked while its maker lives, so that what a killed
 * process left is recognised and removed by the next one that saves there. */
#ifndef CT_STAGING_H
#define CT_STAGING_H

#include "core/base/status.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Starts as {0}; all strings owned. */
typedef struct ct_staging {
    char *final;    /* PARENT/NAME */
    char *parent;   /* PARENT */
    char *outer;    /* PARENT/.ctrainer-saving-XXXXXX */
    char *folder;   /* outer/NAME, where files go */
    int lock;       /* descriptor of outer, locked; -1 where locks are not to be had */
    bool had_final; /* final was there already */
    bool shown;     /* final is a link to folder */
    int buried;     /* folders moved to outer so far */
} ct_staging;

/* Makes the folders, PARENT too, after removing what killed processes left there.
 * CT_EIO leaves *staging empty. */
CT_NODISCARD ct_status ct_staging_open(ct_staging *staging, const char *final_folder,
                                       ct_error *err);

/* Puts back what a process that was killed while it replaced a folder of parent left
 * without its name, as far as it can, and removes what else dead processes left. */
void ct_staging_recover(const char *parent);

/* Makes final a link to folder, so that files can be read and written there under their
 * final names; a folder of that name waits in outer. Where the file system has no links
 * nothing changes. */
CT_NODISCARD ct_status ct_staging_show(ct_staging *staging, ct_error *err);

/* Takes the link of ct_staging_show away. Without it, moves into folder what somebody
 * wrote to final meanwhile, if final was not there at the start. */
CT_NODISCARD ct_status ct_staging_adopt(ct_staging *staging, ct_error *err);

/* Renames folder to final, replacing a folder of that name, and puts the change on the
 * disk. Where the file system can exchange names, final is there at every moment;
 * elsewhere it is away between two renames: the second one's failure brings the old
 * folder back, and ct_staging_recover what a killed process left. */
CT_NODISCARD ct_status ct_staging_publish(ct_staging *staging, ct_error *err);

/* Moves another folder of PARENT out of sight; closing removes it. */
CT_NODISCARD ct_status ct_staging_bury(ct_staging *staging, const char *folder,
                                       ct_error *err);

/* Removes whatever is left of it, as far as it can, and frees it. */
void ct_staging_close(ct_staging *staging);

/* Frees it without touching the disk: what a forked child must do. */
void ct_staging_forget(ct_staging *staging);

#ifdef __cplusplus
}
#endif

#endif
