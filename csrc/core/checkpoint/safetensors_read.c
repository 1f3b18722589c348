/* Opening safetensors files: a hostile header must cost an error message and no more.
 */
#define _GNU_SOURCE
#include "core/checkpoint/safetensors_file.h"

#include "core/base/alloc.h"
#include "core/base/crc32c.h"
#include "core/base/io.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The library's own limit; a header of more is refused unread. */
#define HEADER_LIMIT 100000000u

enum {
    MAX_NDIM = 64
};

void
ct_st_close(ct_st_file *file)
{
    if (file == NULL) {
        return;
    }
    ct_source_close(&file->source);
    ct_free(file->metadata);
    ct_free(file->by_name);
    ct_free(file->extents);
    ct_free(file->tensors);
    ct_free(file->header);
    ct_free(file->path);
    ct_free(file);
}

static ct_status
fail_tensor(const ct_st_file *file, const ct_st_tensor *tensor, const char *message,
            ct_error *err)
{
    return ct_fail(err, CT_EINVAL, "%s: tensor '%.*s' %s", file->path,
                   (int)(tensor->name.n < 100 ? tensor->name.n : 100),
                   tensor->name.data, message);
}

static ct_status
read_metadata(ct_st_file *file, ct_json *json, ct_error *err)
{
    bool first = true, more = true;
    ct_status status = ct_json_enter(json, '{', err);
    while (status == CT_OK) {
        ct_st_pair pair;
        void *block = file->metadata;
        status = ct_json_more(json, '{', &first, &more, &pair.key, err);
        if (status != CT_OK || !more) {
            return status;
        }
        status = ct_json_string(json, &pair.value, err);
        if (status == CT_OK) {
            status = ct_grow(&block, &file->metadata_capacity, file->n_metadata + 1,
                             sizeof pair, err);
            file->metadata = block;
        }
        if (status == CT_OK) {
            file->metadata[file->n_metadata++] = pair;
        }
    }
    return status;
}

static ct_status
read_shape(ct_st_file *file, ct_json *json, ct_st_tensor *tensor, ct_error *err)
{
    bool first = true, more = true;
    ct_status status = ct_json_enter(json, '[', err);
    tensor->ndim = 0;
    while (status == CT_OK) {
        uint64_t extent;
        void *block = file->extents;
        status = ct_json_more(json, '[', &first, &more, NULL, err);
        if (status != CT_OK || !more) {
            return status;
        }
        if (tensor->ndim == MAX_NDIM) {
            return ct_json_fail(json, "a tensor has more than 64 dimensions", err);
        }
        status = ct_json_u64(json, &extent, err);
        if (status == CT_OK) {
            status = ct_grow(&block, &file->extents_capacity, file->n_extents + 1,
                             sizeof extent, err);
            file->extents = block;
        }
        if (status == CT_OK) {
            file->extents[file->n_extents++] = extent;
            tensor->ndim++;
        }
    }
    return status;
}

static ct_status
read_offsets(ct_json *json, ct_st_tensor *tensor, ct_error *err)
{
    uint64_t *const bounds[2] = {&tensor->begin, &tensor->end};
    bool first = true, more = true;
    ct_status status = ct_json_enter(json, '[', err);
    for (int i = 0; i < 2 && status == CT_OK; i++) {
        status = ct_json_more(json, '[', &first, &more, NULL, err);
        if (status == CT_OK) {
            status = more ? ct_json_u64(json, bounds[i], err)
                          : ct_json_fail(json, "expected two data_offsets", err);
        }
    }
    if (status == CT_OK) {
        status = ct_json_more(json, '[', &first, &more, NULL, err);
    }
    return status == CT_OK && more
               ? ct_json_fail(json, "expected two data_offsets", err)
               : status;
}

enum {
    HAS_DTYPE = 1,
    HAS_SHAPE = 2,
    HAS_OFFSETS = 4,
    HAS_ALL = 7
};

static ct_status
read_field(ct_st_file *file, ct_json *json, ct_text key, ct_st_tensor *tensor,
           int *seen, ct_error *err)
{
    int field = ct_text_is(key, "dtype")          ? HAS_DTYPE
                : ct_text_is(key, "shape")        ? HAS_SHAPE
                : ct_text_is(key, "data_offsets") ? HAS_OFFSETS
                                                  : 0;
    if (field == 0 || (*seen & field) != 0) {
        return ct_json_fail(json, "unknown or repeated field of a tensor", err);
    }
    *seen |= field;
    if (field == HAS_DTYPE) {
        return ct_json_string(json, &tensor->tag, err);
    }
    return field == HAS_SHAPE ? read_shape(file, json, tensor, err)
                              : read_offsets(json, tensor, err);
}

static ct_status
read_tensor(ct_st_file *file, ct_json *json, ct_text name, ct_error *err)
{
    ct_st_tensor tensor = {.name = name};
    bool first = true, more = true;
    int seen = 0;
    void *block = file->tensors;
    ct_status status = ct_json_enter(json, '{', err);
    while (status == CT_OK && more) {
        ct_text key;
        status = ct_json_more(json, '{', &first, &more, &key, err);
        if (status == CT_OK && more) {
            status = read_field(file, json, key, &tensor, &seen, err);
        }
    }
    if (status == CT_OK && seen != HAS_ALL) {
        status = fail_tensor(file, &tensor, "lacks dtype, shape or data_offsets", err);
    }
    if (status == CT_OK) {
        status = ct_grow(&block, &file->tensors_capacity, file->n_tensors + 1,
                         sizeof tensor, err);
        file->tensors = block;
    }
    if (status == CT_OK) {
        file->tensors[file->n_tensors++] = tensor;
    }
    return status;
}

static ct_status
parse_header(ct_st_file *file, size_t n, ct_error *err)
{
    ct_json json;
    bool first = true, more = true;
    ct_json_init(&json, file->path, file->header, n);
    ct_status status = ct_json_enter(&json, '{', err);
    while (status == CT_OK) {
        ct_text key;
        status = ct_json_more(&json, '{', &first, &more, &key, err);
        if (status != CT_OK || !more) {
            break;
        }
        status = ct_text_is(key, "__metadata__") ? read_metadata(file, &json, err)
                                                 : read_tensor(file, &json, key, err);
    }
    return status == CT_OK ? ct_json_finish(&json, err) : status;
}

static int
compare_begins(const void *left, const void *right)
{
    const ct_st_tensor *a = left, *b = right;
    return a->begin != b->begin ? (a->begin > b->begin) - (a->begin < b->begin)
                                : (a->end > b->end) - (a->end < b->end);
}

static int
compare_names(const void *left, const void *right)
{
    const ct_st_name *a = left, *b = right;
    return ct_text_compare(a->name, b->name);
}

static ct_status
check_size(const ct_st_file *file, const ct_st_tensor *tensor, ct_error *err)
{
    uint64_t bytes = ct_st_tag_bytes(tensor->tag);
    if (bytes == 0) {
        return fail_tensor(file, tensor, "has a dtype that this reader lacks", err);
    }
    for (size_t i = 0; i < tensor->ndim; i++) {
        uint64_t extent = tensor->shape[i];
        if (extent != 0 && bytes > UINT64_MAX / extent) {
            return fail_tensor(file, tensor, "has a shape that overflows", err);
        }
        bytes *= extent;
    }
    if (tensor->end < tensor->begin || tensor->end - tensor->begin != bytes) {
        return fail_tensor(file, tensor, "has data_offsets that do not fit its shape",
                           err);
    }
    return CT_OK;
}

/* Data without gaps or overlaps from the header's end to the file's. */
static ct_status
check_layout(ct_st_file *file, ct_error *err)
{
    uint64_t at = 0, available = file->source.bytes - file->data_begin;
    for (size_t i = 0; i < file->n_tensors; i++) {
        ct_st_tensor *tensor = &file->tensors[i];
        ct_status status = check_size(file, tensor, err);
        if (status != CT_OK) {
            return status;
        }
        if (tensor->begin != at) {
            return fail_tensor(file, tensor,
                               tensor->begin < at ? "overlaps the one before it"
                                                  : "leaves a gap before it",
                               err);
        }
        at = tensor->end;
    }
    if (at != available) {
        return ct_fail(err, CT_EINVAL,
                       "%s: holds %llu bytes of data where its header promises %llu%s",
                       file->path, (unsigned long long)available,
                       (unsigned long long)at, at > available ? ": cut short" : "");
    }
    for (size_t i = 0; i < file->n_tensors; i++) {
        file->tensors[i].begin += file->data_begin;
        file->tensors[i].end += file->data_begin;
    }
    return CT_OK;
}

static ct_status
index_names(ct_st_file *file, ct_error *err)
{
    size_t n = file->n_tensors;
    ct_st_name *names = ct_calloc(n + 1, sizeof *names);
    if (names == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to read %s", file->path);
    }
    file->by_name = names;
    for (size_t i = 0; i < n; i++) {
        names[i] = (ct_st_name){file->tensors[i].name, i};
    }
    qsort(names, n, sizeof *names, compare_names);
    for (size_t i = 1; i < n; i++) {
        if (ct_text_compare(names[i - 1].name, names[i].name) == 0) {
            return fail_tensor(file, &file->tensors[names[i].index], "is there twice",
                               err);
        }
    }
    return CT_OK;
}

/* Shapes are found only now, as extents moved while it grew. */
static void
place_shapes(ct_st_file *file)
{
    uint64_t *at = file->extents;
    for (size_t i = 0; i < file->n_tensors; i++) {
        file->tensors[i].shape = at;
        at += file->tensors[i].ndim;
    }
}

static ct_status
fail_header(const ct_st_file *file, ct_error *err)
{
    return ct_fail(err, CT_EINVAL,
                   "%s: its header is damaged, or rewritten by a program that kept the "
                   "metadata of ctrainer.*",
                   file->path);
}

/* The digits of a checksum in the header's text, "KEY":"00000000" as the writer puts
 * it; NULL where there are none. */
static char *
find_digits(const ct_st_file *file, size_t n, const char *key)
{
    char *found = memmem(file->header, n, key, strlen(key));
    char *digits = found == NULL ? NULL : found + strlen(key);
    return digits != NULL && file->header + n - digits >= CT_ST_CRC_DIGITS ? digits
                                                                           : NULL;
}

/* Is what follows the checksum of the data nearly the key of the header's? */
static bool
is_spoilt_key(const ct_st_file *file, size_t n, const char *digits)
{
    static const char next[] = "\",\"" CT_ST_HEADER_KEY "\":\"";
    const char *at = digits + CT_ST_CRC_DIGITS;
    size_t differ = 0;
    if ((size_t)(file->header + n - at) < sizeof next - 1) {
        return false;
    }
    for (size_t i = 0; i < sizeof next - 1; i++) {
        differ += at[i] != next[i];
    }
    return differ <= 6;
}

/* Is the checksum at digits[1] that of the header with zeros at both places? */
static bool
is_whole(const ct_st_file *file, uint32_t begun, size_t n, char *const *digits)
{
    char saved[2][CT_ST_CRC_DIGITS], computed[CT_ST_CRC_DIGITS + 1];
    for (int i = 0; i < 2; i++) {
        memcpy(saved[i], digits[i], CT_ST_CRC_DIGITS);
        memset(digits[i], '0', CT_ST_CRC_DIGITS);
    }
    (void)snprintf(computed, sizeof computed, "%08x",
                   ct_crc32c(begun, file->header, n));
    for (int i = 0; i < 2; i++) {
        memcpy(digits[i], saved[i], CT_ST_CRC_DIGITS);
    }
    return memcmp(computed, saved[1], CT_ST_CRC_DIGITS) == 0;
}

/* Compares the header with the checksum that it carries, if it does, before it is
 * parsed, which changes it. */
static ct_status
check_header(ct_st_file *file, const unsigned char *length, size_t n, ct_error *err)
{
    char *const digits[] = {find_digits(file, n, "\"" CT_ST_CRC_KEY "\":\""),
                            find_digits(file, n, "\"" CT_ST_HEADER_KEY "\":\"")};
    uint32_t begun = ct_crc32c(0, length, 8);
    file->header_crc = ct_crc32c(begun, file->header, n);
    if (digits[1] == NULL) {
        return digits[0] != NULL && is_spoilt_key(file, n, digits[0])
                   ? fail_header(file, err)
                   : CT_OK;
    }
    if (digits[0] == NULL || !is_whole(file, begun, n, digits)) {
        return fail_header(file, err);
    }
    file->header_checked = true;
    return CT_OK;
}

static ct_status
load_header(ct_st_file *file, ct_error *err)
{
    unsigned char length[8];
    const ct_source *source = &file->source;
    if (source->bytes < 8) {
        return ct_fail(err, CT_EINVAL, "%s: %llu bytes are no safetensors file",
                       file->path, (unsigned long long)source->bytes);
    }
    ct_status status = ct_source_read(source, length, 8, 0, err);
    if (status != CT_OK) {
        return status;
    }
    uint64_t n = ct_load_le64(length);
    if (n > HEADER_LIMIT || n > source->bytes - 8) {
        return ct_fail(
            err, CT_EINVAL, "%s: a header of %llu bytes does not fit a file of %llu",
            file->path, (unsigned long long)n, (unsigned long long)source->bytes);
    }
    file->data_begin = 8 + n;
    if ((file->header = ct_alloc((size_t)n + 1)) == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to read %s", file->path);
    }
    status = ct_source_read(source, file->header, (size_t)n, 8, err);
    if (status == CT_OK) {
        status = check_header(file, length, (size_t)n, err);
    }
    if (status == CT_OK) {
        status = parse_header(file, (size_t)n, err);
    }
    for (size_t i = 0; i < file->n_metadata && status == CT_OK; i++) {
        if (ct_text_is(file->metadata[i].key, CT_ST_HEADER_KEY) &&
            !file->header_checked) { /* not as the writer puts it */
            status = fail_header(file, err);
        }
    }
    return status;
}

static ct_status
open_file(ct_st_file *file, const char *path, const ct_expected *expected,
          ct_error *err)
{
    if ((file->path = ct_path_join("", path)) == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to read %s", path);
    }
    ct_status status = ct_source_open(&file->source, file->path, expected, err);
    if (status == CT_OK) {
        status = load_header(file, err);
    }
    if (status == CT_OK) {
        place_shapes(file);
        if (file->n_tensors > 0) {
            qsort(file->tensors, file->n_tensors, sizeof *file->tensors,
                  compare_begins);
        }
        status = check_layout(file, err);
    }
    return status == CT_OK ? index_names(file, err) : status;
}

ct_status
ct_st_open(ct_st_file **file, const char *path, const ct_expected *expected,
           ct_error *err)
{
    ct_st_file *made = ct_calloc(1, sizeof *made);
    if (made == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to read %s", path);
    }
    made->source.fd = -1;
    ct_status status = open_file(made, path, expected, err);
    if (status != CT_OK) {
        ct_st_close(made);
        return status;
    }
    *file = made;
    return CT_OK;
}
