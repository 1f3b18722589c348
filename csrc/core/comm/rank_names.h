/* What messages call the ranks of a group. */
#ifndef CT_RANK_NAMES_H
#define CT_RANK_NAMES_H

#ifdef __cplusplus
extern "C" {
#endif

/* Rank r is rank `first + r * step` of `of`: a group that is a part of a larger one
 * tells of its ranks by their numbers there. */
typedef struct ct_rank_names {
    int first, step, of;
} ct_rank_names;

static inline int
ct_rank_called(const ct_rank_names *names, int rank)
{
    return names->first + rank * names->step;
}

#ifdef __cplusplus
}
#endif

#endif
