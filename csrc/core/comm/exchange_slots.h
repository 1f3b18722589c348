/* An exchange's slots, and what moves data through them. */
#ifndef CT_EXCHANGE_SLOTS_H
#define CT_EXCHANGE_SLOTS_H

#include "core/comm/exchange.h"

enum {
    CT_SLOTS = 8 /* of a rank */
};

/* What a rank was asked to do, and where its data is unless it is in the slots. Only
 * lengths, dtypes and the like mean something to others, not the request's pointers. */
typedef struct ct_note {
    ct_request request;
    ct_lane_place place;
} ct_note;

/* Bytes of all slots, which lie behind the crew. */
size_t ct_slots_bytes(int world_size);

/* The note in the slot of that piece. */
ct_note *ct_slot_note(const ct_exchange *exchange, int rank, uint32_t piece);

/* Elements of each part that a slot holds. */
size_t ct_slot_length(const ct_exchange *exchange, const ct_transfer *t);

/* Copies into this rank's slot of `piece` what it gives of each part's elements from
 * `at` on. */
void ct_slot_fill(const ct_exchange *exchange, const ct_transfer *t, uint32_t piece,
                  size_t at);

/* Takes from all what this rank needs of the elements from `at` on, up to a piece of
 * the transfer: from exchange->direct, or from slots of `piece` where that is NULL. */
void ct_slots_take(const ct_exchange *exchange, const ct_transfer *t, uint32_t piece,
                   size_t at);

/* Of an all_reduce of which exchange->direct has all: reduces this rank's share of the
 * elements and writes it to all. */
void ct_lanes_reduce(const ct_exchange *exchange, const ct_request *request);

#endif
