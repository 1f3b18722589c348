/* Parameters that are gathered and gradients that are reduced as codes of few bits, a
 * scale for each block of them.
 *
 * Each element is rounded once: gradients go straight to the rank that owns them, which
 * adds them up in rank order. All ranks decode the same codes, their own too, so that
 * all have the same parameters.
 *
 * Source: Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant
 * Model Training", 2023; Karimireddy et al., "Error Feedback Fixes SignSGD and other
 * Gradient Compression Schemes", 2019 (what is remembered). */
#ifndef CT_FSDP_CODES_H
#define CT_FSDP_CODES_H

#include "core/comm/comm.h"
#include "core/device/device.h"
#include "core/fsdp/unit.h"

typedef struct ct_fsdp_coder {
    const ct_device *device;
    void *stream; /* where its work is enqueued */
    ct_comm *comm;
    int bits; /* of a code: 8 or 4 */
} ct_fsdp_coder;

/* Whether codes of so many bits are known: 8 and 4. */
bool ct_fsdp_codes_known(int bits);

/* An all_gather of every rank's shard into `full`, of any float dtypes. CT_ENOMEM and
 * what the communicator says; then full is in part written. */
CT_NODISCARD ct_status ct_fsdp_gather_codes(const ct_fsdp_coder *coder,
                                            const ct_span *full, const ct_span *shard,
                                            ct_error *err);

/* A reduce_scatter of `whole` into `part`, which may lie in it: the sum over the ranks
 * times factor. residual: of as many elements as whole, what rounding has left of
 * earlier sums, and then of this one; NULL: it is forgotten. presence: as
 * ct_fsdp_reduce() has it, but for all parameters; one that is missing on this rank
 * keeps its residual. Errors as above. */
CT_NODISCARD ct_status ct_fsdp_reduce_codes(const ct_fsdp_coder *coder,
                                            const ct_span *part, const ct_span *whole,
                                            float *residual, ct_fsdp_presence *presence,
                                            float factor, ct_error *err);

#endif
