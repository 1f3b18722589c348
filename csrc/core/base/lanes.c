#include "core/base/lanes.h"

#include "core/base/alloc.h"

#include <stdint.h>

ct_status
ct_lanes_reserve(ct_lanes *lanes, ct_error *err)
{
    void *own = (void *)lanes->own;
    const ct_status status =
        ct_grow(&own, &lanes->room, lanes->n + 1, sizeof(ct_pages *), err);
    lanes->own = (ct_pages **)own;
    return status;
}

void
ct_lanes_add(ct_lanes *lanes, ct_pages *own)
{
    ct_pages_hold(own);
    lanes->own[lanes->n++] = own;
}

ct_lane_place
ct_lanes_find(const ct_lanes *lanes, const void *data, size_t bytes)
{
    for (size_t i = 0; i < lanes->n && data != NULL; i++) {
        const ct_pages *lane = lanes->own[i];
        const size_t offset = (uintptr_t)data - (uintptr_t)lane->data;
        if (offset < lane->bytes && bytes <= lane->bytes - offset) {
            return (ct_lane_place){(int)i, offset};
        }
    }
    return (ct_lane_place){-1, 0};
}

char *
ct_lanes_at(const ct_lanes *lanes, int rank, ct_lane_place place)
{
    if (place.lane < 0) {
        return NULL;
    }
    const ct_pages *lane = lanes->own[place.lane];
    return (char *)lane->segment.base + (size_t)rank * lane->bytes + place.offset;
}

void
ct_lanes_fini(ct_lanes *lanes)
{
    for (size_t i = 0; i < lanes->n; i++) {
        ct_pages_drop(lanes->own[i]);
    }
    ct_free((void *)lanes->own);
    *lanes = (ct_lanes){0};
}
