#include "core/fsdp/fsdp_presence.h"

#include <math.h>
#include <string.h>

enum {
    AT_ONCE = 32,  /* spans that the device is given together, from the stack */
    LOOKED_AT = 64 /* elements of a parameter */
};

bool
ct_fsdp_is_complete(const ct_fsdp_presence *presence)
{
    bool all = true;
    for (size_t i = 0; presence != NULL && all && i < presence->n; i++) {
        all = presence->params[i].there;
    }
    return all;
}

size_t
ct_fsdp_overlap(const ct_fsdp_param *param, size_t from, size_t n, size_t *at)
{
    const size_t begin = param->at > from ? param->at : from;
    const size_t own = param->at + param->n, all = from + n;
    const size_t end = own < all ? own : all;
    *at = begin - from;
    return end > begin ? end - begin : 0;
}

/* ---- marks -------------------------------------------------------------------------
 */

typedef struct batch {
    ct_span spans[AT_ONCE];
    size_t n;
} batch;

static ct_status
make_missing(const ct_fsdp *unit, batch *b, ct_error *err)
{
    const ct_device *device = unit->device;
    ct_status status = device->zero(unit->stream, b->spans, b->n, err);
    if (status == CT_OK) {
        status =
            device->scale(unit->stream, -1.0, (double)INFINITY, b->spans, b->n, err);
    }
    b->n = 0;
    return status;
}

/* A zero of the device's, made once: -0 + 0 is 0, and all else stays as it is. */
static ct_status
find_zero(ct_fsdp *unit, ct_span *zero, ct_error *err)
{
    ct_scratch *scratch = &unit->ledger->zero;
    const bool made = scratch->data != NULL;
    ct_status status = unit->device->scratch_grow(scratch, sizeof(float), err);
    *zero = (ct_span){scratch->data, 1, CT_F32};
    return status != CT_OK || made ? status
                                   : unit->device->zero(unit->stream, zero, 1, err);
}

static ct_status
make_there(ct_fsdp *unit, batch *b, ct_error *err)
{
    ct_span zeros[AT_ONCE];
    ct_status status = find_zero(unit, &zeros[0], err);
    for (size_t i = 1; i < b->n; i++) {
        zeros[i] = zeros[0];
    }
    if (status == CT_OK) {
        status = unit->device->add(unit->stream, b->spans, zeros, b->n, 1.0, err);
    }
    b->n = 0;
    return status;
}

ct_status
ct_fsdp_mark(ct_fsdp *unit, const ct_fsdp_presence *presence, const ct_span *row,
             size_t from, size_t part, ct_error *err)
{
    batch missing = {.n = 0}, there = {.n = 0};
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < presence->n; i++) {
        const ct_fsdp_param *param = &presence->params[i];
        size_t at, n = ct_fsdp_overlap(param, from, row->n, &at);
        if (!param->there && n != 0) {
            missing.spans[missing.n++] = ct_span_part(*row, at, n);
        }
        for (size_t end = at + n; status == CT_OK && param->there && at < end;
             at += part - at % part) { /* to the next rank's part */
            there.spans[there.n++] = ct_span_part(*row, at, 1);
            status = there.n < AT_ONCE ? CT_OK : make_there(unit, &there, err);
        }
        if (status == CT_OK && missing.n == AT_ONCE) {
            status = make_missing(unit, &missing, err);
        }
    }
    if (status == CT_OK && missing.n != 0) {
        status = make_missing(unit, &missing, err);
    }
    return status != CT_OK || there.n == 0 ? status : make_there(unit, &there, err);
}

ct_status
ct_fsdp_read_marks(ct_fsdp *unit, ct_fsdp_presence *presence, const ct_span *shard,
                   size_t from, ct_error *err)
{
    const ct_device *where = unit->config.offload ? &ct_device_cpu : unit->device;
    ct_status status = CT_OK;
    for (size_t i = 0; status == CT_OK && i < presence->n; i++) {
        ct_fsdp_param *param = &presence->params[i];
        float head[LOOKED_AT];
        size_t at, n = ct_fsdp_overlap(param, from, shard->n, &at);
        n = n < LOOKED_AT ? n : LOOKED_AT;
        if (param->there || n == 0) {
            continue;
        }
        status = where->transfer(unit->stream, head, (const float *)shard->data + at,
                                 n * sizeof(float), err);
        for (size_t k = 0; status == CT_OK && !param->there && k < n; k++) {
            param->there = head[k] != 0.0F || !signbit(head[k]);
        }
    }
    return status;
}

/* ---- bits --------------------------------------------------------------------------
 */

size_t
ct_fsdp_bits_bytes(const ct_fsdp_presence *presence)
{
    return (presence->n + 63) / 64 * sizeof(uint64_t);
}

void
ct_fsdp_put_bits(const ct_fsdp_presence *presence, unsigned char *bits)
{
    memset(bits, 0, ct_fsdp_bits_bytes(presence));
    for (size_t i = 0; i < presence->n; i++) {
        bits[i / 8] |= (unsigned char)((unsigned)!presence->params[i].there << i % 8);
    }
}

void
ct_fsdp_take_bits(ct_fsdp_presence *presence, const unsigned char *bits)
{
    for (size_t i = 0; i < presence->n; i++) {
        const bool missing = (bits[i / 8] >> i % 8 & 1) != 0;
        presence->params[i].there = presence->params[i].there || !missing;
    }
}
