/* Each chunk by a radix sort, which costs as much as reading the lengths, whatever the
 * lengths are, and keeps the order of equal ones. */
#include "core/data/order.h"

#include "core/base/alloc.h"

#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

enum {
    DIGITS = 4,
    VALUES = 256 /* of a digit */
};

typedef struct sample {
    int64_t index;
    uint32_t key; /* ascending where lengths descend */
} sample;

static uint32_t
descending(int32_t length)
{
    return (uint32_t)INT32_MAX - (uint32_t)length;
}

static uint32_t
digit_of(uint32_t key, int digit)
{
    return key >> (8 * digit) & (VALUES - 1);
}

/* One pass by a digit; false where all samples have the same, and nothing is moved. */
static bool
sort_by_digit(const sample *from, sample *to, size_t n, int digit)
{
    size_t place[VALUES] = {0};
    for (size_t i = 0; i < n; i++) {
        place[digit_of(from[i].key, digit)]++;
    }
    if (place[digit_of(from[0].key, digit)] == n) {
        return false;
    }
    size_t before = 0;
    for (size_t i = 0; i < VALUES; i++) {
        const size_t count = place[i];
        place[i] = before;
        before += count;
    }
    for (size_t i = 0; i < n; i++) {
        to[place[digit_of(from[i].key, digit)]++] = from[i];
    }
    return true;
}

static void
sort_chunk(int64_t *order, size_t n, const int32_t *lengths, sample *a, sample *b)
{
    for (size_t i = 0; i < n; i++) {
        a[i] = (sample){.index = order[i], .key = descending(lengths[order[i]])};
    }
    for (int digit = 0; digit < DIGITS; digit++) {
        if (sort_by_digit(a, b, n, digit)) {
            sample *sorted = b;
            b = a;
            a = sorted;
        }
    }
    for (size_t i = 0; i < n; i++) {
        order[i] = a[i].index;
    }
}

ct_status
ct_order_by_length(int64_t *order, size_t n, const int32_t *lengths, size_t n_lengths,
                   size_t chunk, ct_error *err)
{
    if (chunk == 0) {
        return ct_fail(err, CT_EINVAL, "a chunk has at least one sample, got 0");
    }
    for (size_t i = 0; i < n; i++) {
        if (order[i] < 0 || (uint64_t)order[i] >= n_lengths) {
            return ct_fail(err, CT_EINVAL,
                           "index %" PRId64 " at place %zu of the order is not in "
                           "[0, %zu), the samples that have a length",
                           order[i], i, n_lengths);
        }
    }
    const size_t most = chunk < n ? chunk : n;
    if (most > SIZE_MAX / 2 / sizeof(sample)) {
        return ct_fail(err, CT_ENOMEM, "out of memory: a chunk of %zu samples", most);
    }
    sample *samples = ct_alloc(2 * most * sizeof *samples);
    if (samples == NULL && n > 0) {
        return ct_fail(err, CT_ENOMEM, "out of memory: a chunk of %zu samples", most);
    }
    for (size_t at = 0; at < n; at += most) {
        const size_t count = n - at < most ? n - at : most;
        sort_chunk(order + at, count, lengths, samples, samples + most);
    }
    ct_free(samples);
    return CT_OK;
}

void
ct_order_longest_first(int64_t *order, size_t n, const int32_t *lengths, size_t chunk)
{
    size_t longest = 0;
    for (size_t at = 0; at < n; at += chunk) {
        if (lengths[order[at]] > lengths[order[longest]]) {
            longest = at;
        }
        if (n - at <= chunk) { /* at + chunk might overflow */
            break;
        }
    }
    if (n > 0) {
        const int64_t first = order[0];
        order[0] = order[longest];
        order[longest] = first;
    }
}

/* Checks that `to` is a permutation, and leaves all marks set. */
static ct_status
check_permutation(const int64_t *to, size_t n, bool *marks, ct_error *err)
{
    for (size_t i = 0; i < n; i++) {
        if (to[i] < 0 || (uint64_t)to[i] >= n || marks[to[i]]) {
            return ct_fail(err, CT_EINVAL,
                           "row %zu goes to place %" PRId64
                           ": expected each of 0 .. %zu once",
                           i, to[i], n - 1);
        }
        marks[to[i]] = true;
    }
    return CT_OK;
}

/* Carries one row after the other to its place, along each cycle. spare: two rows. */
static void
move_all(unsigned char *rows, size_t n, size_t row_bytes, const int64_t *to,
         bool *waits, unsigned char *spare)
{
    unsigned char *carried = spare, *met = spare + row_bytes;
    for (size_t i = 0; i < n; i++) {
        if (waits[i]) {
            memcpy(carried, rows + i * row_bytes, row_bytes);
        }
        for (size_t from = i; waits[from];) {
            const size_t place = (size_t)to[from];
            waits[from] = false;
            memcpy(met, rows + place * row_bytes, row_bytes);
            memcpy(rows + place * row_bytes, carried, row_bytes);
            unsigned char *next = met;
            met = carried;
            carried = next;
            from = place;
        }
    }
}

ct_status
ct_rows_move(void *rows, size_t n, size_t row_bytes, const int64_t *to, ct_error *err)
{
    if (n == 0 || row_bytes == 0) {
        return CT_OK;
    }
    bool *marks = ct_calloc(n, sizeof *marks);
    unsigned char *spare = ct_alloc(2 * row_bytes);
    ct_status status;
    if (marks != NULL && spare != NULL) {
        status = check_permutation(to, n, marks, err);
        if (status == CT_OK) {
            move_all(rows, n, row_bytes, to, marks, spare);
        }
    }
    else {
        status = ct_fail(err, CT_ENOMEM, "out of memory: an order of %zu rows", n);
    }
    ct_free(spare);
    ct_free(marks);
    return status;
}
