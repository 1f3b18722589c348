/* Shards in the host's memory of a unit that works on a device; for core/fsdp/unit.c alone.
 *
 * They pass through one block of the device's memory, a shard at a time: all units of a
 * ledger have it together. */
#ifndef CT_FSDP_OFFLOAD_H
#define CT_FSDP_OFFLOAD_H

#include "core/fsdp/unit.h"

/* *here becomes where `shard` is on the device: itself, or where it is offloaded the
 * block, which holds nothing of it yet, or all of it. The next call overwrites it.
 * CT_EDEVICE and what the device says of memory. */
CT_NODISCARD ct_status ct_fsdp_place(ct_fsdp *unit, const ct_span *shard, ct_span *here,
                                     ct_error *err);
CT_NODISCARD ct_status ct_fsdp_bring_up(ct_fsdp *unit, const ct_span *shard,
                                        ct_span *here, ct_error *err);

/* Writes what is in the block into a shard that is offloaded, or adds it. CT_ENOMEM
 * too. */
CT_NODISCARD ct_status ct_fsdp_bring_down(ct_fsdp *unit, const ct_span *shard,
                                          const ct_span *here, bool add, ct_error *err);

#endif
