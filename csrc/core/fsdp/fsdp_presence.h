/* Which parameters of a group have a gradient on any rank, told without a message of
 * its own; for core/fsdp/unit.c and core/fsdp/fsdp_codes.c alone.
 *
 * It travels in the signs of zeros: a sum of -0 alone is -0. A parameter without a
 * gradient is -0 throughout, and one that has a gradient begins with something else in
 * every rank's part. A sum can only be mistaken where all that is looked at of it
 * underflows to -0. Codes have no -0: their senders add a bit for each parameter. */
#ifndef CT_FSDP_PRESENCE_H
#define CT_FSDP_PRESENCE_H

#include "core/fsdp/unit.h"

/* Whether nothing is missing on this rank; also of NULL, where nothing is told. */
bool ct_fsdp_is_complete(const ct_fsdp_presence *presence);

/* What elements [from, from + n) have of a parameter: how many, and *at, where in
 * them they begin. */
size_t ct_fsdp_overlap(const ct_fsdp_param *param, size_t from, size_t n, size_t *at);

/* Marks `row`, elements from `from` on of a group in parts of `part` elements. What is
 * missing is overwritten. CT_ENOMEM and what the device says. */
CT_NODISCARD ct_status ct_fsdp_mark(ct_fsdp *unit, const ct_fsdp_presence *presence,
                                    const ct_span *row, size_t from, size_t part,
                                    ct_error *err);

/* Of what is missing on this rank and has elements in `shard`, reduced, from `from` on:
 * whether any rank has it. */
CT_NODISCARD ct_status ct_fsdp_read_marks(ct_fsdp *unit, ct_fsdp_presence *presence,
                                          const ct_span *shard, size_t from,
                                          ct_error *err);

/* A bit for each parameter, set where it is missing: n_params of them take so many
 * bytes. */
size_t ct_fsdp_bits_bytes(const ct_fsdp_presence *presence);
void ct_fsdp_put_bits(const ct_fsdp_presence *presence, unsigned char *bits);
/* What such bits of some rank have is there. */
void ct_fsdp_take_bits(ct_fsdp_presence *presence, const unsigned char *bits);

#endif
