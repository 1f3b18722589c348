/* Cutting an ordered list of samples into batches by size.
 *
 * A batch is padded to its longest sample, so it costs (samples in it) x (tokens of the
 * longest). Samples are taken in order for as long as the batch stays within the rule;
 * where that leaves more than `multiple` of them, the batch is cut back to a multiple.
 * Source of the rule: fairseq, data/data_utils_fast.pyx, whose batches these are. */
#ifndef CT_BATCHES_H
#define CT_BATCHES_H

#include "core/base/status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A batch that a model is compiled for: that many samples of up to that many tokens. */
typedef struct ct_batch_shape {
    int64_t sentences, tokens;
} ct_batch_shape;

typedef struct ct_batch_rule {
    int64_t max_tokens;    /* of a padded batch; <= 0: no limit */
    int64_t max_sentences; /* in a batch; <= 0: no limit */
    int64_t multiple;      /* >= 1 */
    /* With n_shapes > 0 a batch has to fit one of these, in any order, and the limits
     * above do not count. Kept alive by the owner of the rule. */
    const ct_batch_shape *shapes;
    size_t n_shapes;
} ct_batch_rule;

/* CT_EINVAL for a multiple below 1. */
CT_NODISCARD ct_status ct_batch_rule_check(const ct_batch_rule *rule, ct_error *err);

/* Finds where the batch ends that begins with sample `start` < n; tokens[0..n) are the
 * samples' lengths, those below 0 counting as 0. CT_EINVAL, *end untouched, where that
 * sample is too long for a batch of its own. No product is formed, so that no lengths
 * or limits overflow. */
CT_NODISCARD ct_status ct_batch_next(const ct_batch_rule *rule, const int64_t *tokens,
                                     size_t n, size_t start, size_t *end,
                                     ct_error *err);

#ifdef __cplusplus
}
#endif

#endif
