/* Rows that arrive in batches of different widths, in one region.
 *
 * Runs of equal width are packed and remembered; ct_rows_spread moves them apart from
 * the last row to the first, within the region. Used bytes never move before that. */
#include "core/data/rows.h"

#include "core/base/alloc.h"

#include <stdint.h>
#include <string.h>

/* a * b, or SIZE_MAX when that overflows: more than any region can hold. */
static size_t
times(size_t a, size_t b)
{
    return b != 0 && a > SIZE_MAX / b ? SIZE_MAX : a * b;
}

/* The bytes to reserve when `needed` do not fit: those of all expected rows, or twice
 * the present size. */
static size_t
wanted_bytes(const ct_rows *rows, size_t needed, size_t width)
{
    const size_t row_bytes = times(width, rows->position_bytes);
    const size_t expected = times(rows->expected_rows, row_bytes);
    const size_t doubled = times(rows->region.bytes, 2);
    if (expected != SIZE_MAX && expected >= needed) {
        return expected;
    }
    return doubled != SIZE_MAX && doubled > needed ? doubled : needed;
}

static ct_status
make_room(ct_rows *rows, size_t needed, size_t width, ct_error *err)
{
    if (rows->spill_bytes > 0 && needed > rows->spill_bytes) {
        ct_status status = ct_region_to_file(&rows->region, rows->spill_folder, err);
        if (status != CT_OK) {
            return status;
        }
    }
    if (needed <= rows->region.bytes) {
        return CT_OK;
    }
    const size_t wanted = wanted_bytes(rows, needed, width);
    if (wanted > needed && ct_region_reserve(&rows->region, wanted, NULL) == CT_OK) {
        return CT_OK;
    }
    return ct_region_reserve(&rows->region, needed, err);
}

ct_status
ct_rows_reserve(ct_rows *rows, size_t n, size_t width, ct_error *err)
{
    const size_t bytes = times(times(n, width), rows->position_bytes);
    void *block = rows->runs;
    if (bytes > SIZE_MAX - rows->used_bytes) {
        return ct_fail(err, CT_ENOMEM, "%zu rows of %zu positions overflow", n, width);
    }
    ct_status status =
        ct_grow(&block, &rows->runs_capacity, rows->n_runs + 1, sizeof(ct_run), err);
    rows->runs = block;
    return status == CT_OK ? make_room(rows, rows->used_bytes + bytes, width, err)
                           : status;
}

/* The run for rows of this width; there is room for another run. */
static ct_run *
run_of_width(ct_rows *rows, size_t width)
{
    if (rows->n_runs == 0 || rows->runs[rows->n_runs - 1].width != width) {
        rows->runs[rows->n_runs++] = (ct_run){.width = width};
    }
    return &rows->runs[rows->n_runs - 1];
}

ct_status
ct_rows_append(ct_rows *rows, const void *data, size_t n, size_t width, ct_error *err)
{
    ct_status status = ct_rows_reserve(rows, n, width, err);
    if (status != CT_OK) {
        return status;
    }
    const size_t bytes = n * width * rows->position_bytes;
    if (bytes > 0) {
        memcpy((char *)rows->region.data + rows->used_bytes, data, bytes);
    }
    rows->used_bytes += bytes;
    rows->n_rows += n;
    run_of_width(rows, width)->n_rows += n;
    rows->width = width > rows->width ? width : rows->width;
    return CT_OK;
}

/* Fills `bytes` with copies of an item, doubling the filled part each time. */
static void
fill(char *to, size_t bytes, const void *item, size_t item_bytes)
{
    size_t done = item_bytes < bytes ? item_bytes : bytes;
    memcpy(to, item, done);
    while (done < bytes) {
        const size_t part = done < bytes - done ? done : bytes - done;
        memcpy(to + done, to, part);
        done += part;
    }
}

/* From the last row to the first: a row moves right or stays, over rows that have moved
 * before. */
static void
spread_run(char *from, char *to, const ct_run *run, size_t position_bytes, size_t width,
           const void *item, size_t item_bytes)
{
    const size_t narrow = run->width * position_bytes;
    const size_t wide = width * position_bytes;
    for (size_t row = run->n_rows; row-- > 0;) {
        memmove(to + row * wide, from + row * narrow, narrow);
        if (wide > narrow) {
            fill(to + row * wide + narrow, wide - narrow, item, item_bytes);
        }
    }
}

ct_status
ct_rows_spread(ct_rows *rows, const void *fill_item, size_t item_bytes, ct_error *err)
{
    const size_t total = times(times(rows->n_rows, rows->width), rows->position_bytes);
    ct_status status = make_room(rows, total, rows->width, err);
    if (status != CT_OK) {
        return status;
    }
    char *base = rows->region.data;
    size_t from = rows->used_bytes, to = total;
    for (size_t i = rows->n_runs; i-- > 0 && from != to;) {
        const ct_run *run = &rows->runs[i];
        from -= run->n_rows * run->width * rows->position_bytes;
        to -= run->n_rows * rows->width * rows->position_bytes;
        spread_run(base + from, base + to, run, rows->position_bytes, rows->width,
                   fill_item, item_bytes);
    }
    if (rows->n_runs > 0) {
        rows->runs[0] = (ct_run){.n_rows = rows->n_rows, .width = rows->width};
        rows->n_runs = 1;
    }
    rows->used_bytes = total;
    ct_region_trim(&rows->region, total);
    return CT_OK;
}

void
ct_rows_fini(ct_rows *rows)
{
    ct_region_fini(&rows->region);
    ct_free(rows->runs);
    *rows = (ct_rows){0};
}

void
ct_pad_row(const ct_pad_rule *rule, void *row, const void *values, size_t n)
{
    const size_t item = rule->item_bytes;
    const unsigned char *from = values;
    unsigned char *to = row;
    if (n == 0) {
        return;
    }
    if (rule->left) {
        to += (rule->width - n) * item;
    }
    if (rule->rotate) {
        memcpy(to, rule->first != NULL ? rule->first : from + (n - 1) * item, item);
        to += item;
        n--;
    }
    memcpy(to, from, n * item);
}
