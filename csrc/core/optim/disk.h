/* The update of parameters in a file, or with state in a file, for
 * core/optim/optim.c alone. */
#ifndef CORE_OPTIM_DISK_H
#define CORE_OPTIM_DISK_H

#include "core/base/disk_memory.h"
#include "core/base/pages.h"
#include "core/optim/run.h"

/* Starts as {0}: nothing is in a file. */
typedef struct ct_disk_state {
    const ct_disk_memory *memory;  /* of state, each array with pages of its own;
                                      borrowed, or NULL */
    const ct_disk_memory **shards; /* of parameters, which share pages; borrowed each */
    size_t n_shards, shards_capacity;
    size_t n_buffers;  /* > 0 with a file */
    ct_pages *buffers; /* n_buffers, of buffer_bytes each, and a page */
    size_t buffer_bytes;
    void *pieces;
    size_t n_pieces, pieces_capacity;
} ct_disk_state;

void ct_disk_state_fini(ct_disk_state *disk);

/* Borrows the files. CT_ENOMEM, with nothing changed. */
CT_NODISCARD ct_status ct_disk_state_set_shards(ct_disk_state *disk,
                                                const ct_disk_memory *const *files,
                                                size_t n, ct_error *err);

/* Whether an array of these spans is in a file. */
bool ct_disk_state_has(const ct_disk_state *disk, const ct_rule_run *run);

/* Reserves the memory of the update, and checks the files, so that the update need not
 * fail but by the drive. CT_EINVAL for a rule that looks at whole parameters. */
CT_NODISCARD ct_status ct_disk_state_prepare(ct_disk_state *disk,
                                             const ct_rule_run *run, ct_error *err);

/* ct_rule_run_update() of such spans. After an error of the drive the message says that
 * part of the elements are updated. */
CT_NODISCARD ct_status ct_disk_state_update(ct_disk_state *disk, const ct_rule_run *run,
                                            void *stream, ct_error *err);

#endif
