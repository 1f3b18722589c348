/* Writing and reading safetensors files.
 *
 * Tensors of a written file are sorted, so that each is aligned. Of a file that is
 * read nothing is trusted: the header is bounded, summed if a checksum is there, and
 * compared with the size of the file before data is read, so that a hostile header
 * costs an error message and no more. */
#define _GNU_SOURCE

#include "core/checkpoint/safetensors.h"

#include "core/base/alloc.h"
#include "core/base/crc.h"
#include "core/base/io.h"
#include "core/checkpoint/source.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- dtypes ---------------------------------------------------------------------- */

/* In the library's order: tensors of a later dtype come first in a file, so that
 * each tensor is aligned to its elements. */
static const struct {
    const char *tag;
    size_t bytes;
} dtypes[] = {
    {"BOOL",    1},
    {"U8",      1},
    {"I8",      1},
    {"F8_E5M2", 1},
    {"F8_E4M3", 1},
    {"F8_E8M0", 1},
    {"I16",     2},
    {"U16",     2},
    {"F16",     2},
    {"BF16",    2},
    {"I32",     4},
    {"U32",     4},
    {"F32",     4},
    {"C64",     8},
    {"F64",     8},
    {"I64",     8},
    {"U64",     8},
};

enum {
    DTYPE_COUNT = sizeof dtypes / sizeof dtypes[0],
    HEADER_ALIGNMENT = 8
};

static size_t
dtype_of(ct_text tag)
{
    size_t i = 0;
    while (i < DTYPE_COUNT && !ct_text_is(tag, dtypes[i].tag)) {
        i++;
    }
    return i;
}

/* Bytes of an element; 0 for a tag outside of the format. */
static size_t
tag_bytes(ct_text tag)
{
    size_t i = dtype_of(tag);
    return i < DTYPE_COUNT ? dtypes[i].bytes : 0;
}

/* ---- writing --------------------------------------------------------------------- */

static ct_text
text_of(const char *tag)
{
    return (ct_text){.data = tag, .n = strlen(tag)};
}

/* The safetensors library's own order, so that files of both are alike. */
static int
compare_entries(const void *left, const void *right)
{
    const ct_st_entry *a = left, *b = right;
    size_t i = dtype_of(text_of(a->tag)), k = dtype_of(text_of(b->tag));
    return i != k ? (i < k) - (i > k) : ct_text_compare(a->name, b->name);
}

static ct_status
check_entry(const ct_st_entry *entry, ct_error *err)
{
    const char *name = entry->name.data;
    int n = (int)(entry->name.n < 200 ? entry->name.n : 200);
    size_t bytes = tag_bytes(text_of(entry->tag));
    if (bytes == 0) {
        return ct_fail(err, CT_EINVAL, "tensor '%.*s': safetensors has no dtype '%s'",
                       n, name, entry->tag);
    }
    /* Metadata is stored among the tensors under that name. */
    if (ct_text_is(entry->name, "__metadata__")) {
        return ct_fail(err, CT_EINVAL, "a tensor cannot be called '__metadata__'");
    }
    for (size_t i = 0; i < entry->ndim; i++) {
        bytes *= (size_t)entry->shape[i];
    }
    if (bytes != entry->bytes) {
        return ct_fail(err, CT_EINVAL,
                       "tensor '%.*s': %zu bytes of data where its shape and dtype "
                       "need %zu",
                       n, name, entry->bytes, bytes);
    }
    return CT_OK;
}

/* Text appended piece by piece; the first failure stays, later pieces are dropped. */
typedef struct output {
    ct_buf *buf;
    ct_error *err;
    ct_status status;
} output;

static void
put(output *out, const char *text)
{
    if (out->status == CT_OK) {
        out->status = ct_buf_text(out->buf, text, out->err);
    }
}

static void
put_json(output *out, ct_text text)
{
    if (out->status == CT_OK) {
        out->status = ct_buf_json(out->buf, text.data, text.n, out->err);
    }
}

static void
put_u64(output *out, uint64_t value)
{
    if (out->status == CT_OK) {
        out->status = ct_buf_u64(out->buf, value, out->err);
    }
}

/* crc_at: the places for the checksums of data and header. Checksums among the given
 * pairs are skipped: they belong to the file of the metadata. Both places have their
 * final width, as checksums are known only after all offsets. */
static void
put_metadata(output *out, const ct_st_pair *pairs, size_t n, size_t *crc_at)
{
    put(out, "{\"__metadata__\":{");
    for (size_t i = 0; i < n; i++) {
        if (!ct_text_is(pairs[i].key, CT_ST_CRC_KEY) &&
            !ct_text_is(pairs[i].key, CT_ST_HEADER_KEY)) {
            put_json(out, pairs[i].key);
            put(out, ":");
            put_json(out, pairs[i].value);
            put(out, ",");
        }
    }
    put(out, "\"" CT_ST_CRC_KEY "\":\"");
    crc_at[0] = out->buf->n;
    put(out, "00000000\",\"" CT_ST_HEADER_KEY "\":\"");
    crc_at[1] = out->buf->n;
    put(out, "00000000\"}");
}

static void
put_tensor(output *out, const ct_st_entry *entry, uint64_t offset)
{
    put(out, ",");
    put_json(out, entry->name);
    put(out, ":{\"dtype\":\"");
    put(out, entry->tag);
    put(out, "\",\"shape\":[");
    for (size_t i = 0; i < entry->ndim; i++) {
        put(out, i > 0 ? "," : "");
        put_u64(out, entry->shape[i]);
    }
    put(out, "],\"data_offsets\":[");
    put_u64(out, offset);
    put(out, ",");
    put_u64(out, offset + entry->bytes);
    put(out, "]}");
}

static ct_status
build_header(ct_buf *buf, const ct_st_entry *entries, size_t n,
             const ct_st_pair *metadata, size_t n_metadata, size_t *crc_at,
             ct_error *err)
{
    uint64_t offset = 0;
    output out = {buf, err, ct_buf_le64(buf, 0, err)}; /* the length, set at the end */
    put_metadata(&out, metadata, n_metadata, crc_at);
    for (size_t i = 0; i < n; i++) {
        put_tensor(&out, &entries[i], offset);
        offset += entries[i].bytes;
    }
    put(&out, "}");
    /* The format allows spaces behind the object; data then begins aligned. */
    while (out.status == CT_OK && buf->n % HEADER_ALIGNMENT != 0) {
        put(&out, " ");
    }
    if (out.status == CT_OK) {
        /* The header's checksum is over zeros at both places, so the data need not be
         * summed first. */
        ct_store_le64(buf->data, buf->n - 8);
        char digits[CT_ST_CRC_DIGITS + 1];
        (void)snprintf(digits, sizeof digits, "%08x", ct_crc32c(0, buf->data, buf->n));
        memcpy(buf->data + crc_at[1], digits, CT_ST_CRC_DIGITS);
    }
    return out.status;
}

static ct_status
add_data(ct_plan *plan, const ct_st_entry *entry, ct_error *err)
{
    return entry->n_excerpts > 0
               ? ct_plan_add_excerpts(plan, entry->excerpts, entry->n_excerpts, err)
               : ct_plan_add_data(plan, entry->data, entry->bytes, entry->place, err);
}

ct_status
ct_st_plan(ct_plan *plan, ct_st_entry *entries, size_t n, const ct_st_pair *metadata,
           size_t n_metadata, ct_error *err)
{
    ct_buf header = {0};
    size_t crc_at[2] = {0, 0};
    ct_status status = CT_OK;
    for (size_t i = 0; i < n && status == CT_OK; i++) {
        status = check_entry(&entries[i], err);
    }
    if (status == CT_OK) {
        /* qsort forbids NULL even for no elements. */
        if (n > 0) {
            qsort(entries, n, sizeof *entries, compare_entries);
        }
        status = build_header(&header, entries, n, metadata, n_metadata, crc_at, err);
    }
    if (status == CT_OK) {
        status = ct_plan_add_buf(plan, &header, err);
    }
    for (size_t i = 0; i < n && status == CT_OK; i++) {
        status = add_data(plan, &entries[i], err);
    }
    if (status == CT_OK) {
        /* Pieces from 1 on are the data; piece 0 is the header with the place to fill
         * in. */
        ct_patch patch = {CT_PATCH_CRC32C_HEX, .first = 1, .n = n, .offset = crc_at[0]};
        status = ct_plan_add_patch(plan, patch, err);
    }
    ct_buf_fini(&header);
    return status;
}

/* ---- the header ------------------------------------------------------------------ */

/* An entry of the index of names. */
typedef struct ct_st_name {
    ct_text name;
    size_t index; /* into tensors */
} ct_st_name;

/* tensors is in the order of the data, by_name in the order of the names. Every text
 * points into header, every shape into extents. */
struct ct_st_file {
    ct_source source;
    char *path;
    char *header;
    uint32_t header_crc; /* of the file before the data */
    bool header_checked; /* agrees with its own checksum */
    uint64_t data_begin;
    ct_st_tensor *tensors;
    size_t n_tensors, tensors_capacity;
    uint64_t *extents;
    size_t n_extents, extents_capacity;
    ct_st_name *by_name;
    ct_st_pair *metadata;
    size_t n_metadata, metadata_capacity;
};

/* The library's own limit; a header of more is rejected unread. */
#define HEADER_LIMIT 100000000u

enum {
    MAX_NDIM = 64
};

static ct_status
fail_tensor(const ct_st_file *file, const ct_st_tensor *tensor, const char *message,
            ct_error *err)
{
    return ct_fail(err, CT_EINVAL, "%s: tensor '%.*s' %s", file->path,
                   (int)(tensor->name.n < 100 ? tensor->name.n : 100),
                   tensor->name.data, message);
}

static ct_status
read_pair(void *arg, ct_json *json, ct_text key, ct_error *err)
{
    ct_st_file *file = arg;
    ct_st_pair pair = {.key = key};
    void *block = file->metadata;
    ct_status status = ct_json_string(json, &pair.value, err);
    if (status == CT_OK) {
        status = ct_grow(&block, &file->metadata_capacity, file->n_metadata + 1,
                         sizeof pair, err);
        file->metadata = block;
    }
    if (status == CT_OK) {
        file->metadata[file->n_metadata++] = pair;
    }
    return status;
}

enum {
    HAS_DTYPE = 1,
    HAS_SHAPE = 2,
    HAS_OFFSETS = 4,
    HAS_ALL = 7
};

/* A tensor's entry in the header, as far as it is read. */
typedef struct header_entry {
    ct_st_file *file;
    ct_st_tensor tensor;
    int seen; /* HAS_DTYPE and the like */
    int n_offsets;
} header_entry;

static ct_status
read_extent(void *arg, ct_json *json, ct_text key, ct_error *err)
{
    header_entry *entry = arg;
    ct_st_file *file = entry->file;
    uint64_t extent;
    void *block = file->extents;
    (void)key;
    /* A hostile shape must not grow the list without end. */
    if (entry->tensor.ndim == MAX_NDIM) {
        return ct_json_fail(json, "a tensor has more than 64 dimensions", err);
    }
    ct_status status = ct_json_u64(json, &extent, err);
    if (status == CT_OK) {
        status = ct_grow(&block, &file->extents_capacity, file->n_extents + 1,
                         sizeof extent, err);
        file->extents = block;
    }
    if (status == CT_OK) {
        file->extents[file->n_extents++] = extent;
        entry->tensor.ndim++;
    }
    return status;
}

static ct_status
read_offset(void *arg, ct_json *json, ct_text key, ct_error *err)
{
    header_entry *entry = arg;
    uint64_t *const bounds[2] = {&entry->tensor.begin, &entry->tensor.end};
    (void)key;
    return entry->n_offsets < 2 ? ct_json_u64(json, bounds[entry->n_offsets++], err)
                                : ct_json_fail(json, "expected two data_offsets", err);
}

static ct_status
read_field(void *arg, ct_json *json, ct_text key, ct_error *err)
{
    header_entry *entry = arg;
    int field = ct_text_is(key, "dtype")          ? HAS_DTYPE
                : ct_text_is(key, "shape")        ? HAS_SHAPE
                : ct_text_is(key, "data_offsets") ? HAS_OFFSETS
                                                  : 0;
    if (field == 0 || (entry->seen & field) != 0) {
        return ct_json_fail(json, "unknown or repeated field of a tensor", err);
    }
    entry->seen |= field;
    if (field == HAS_DTYPE) {
        return ct_json_string(json, &entry->tensor.tag, err);
    }
    if (field == HAS_SHAPE) {
        return ct_json_each(json, '[', read_extent, entry, err);
    }
    ct_status status = ct_json_each(json, '[', read_offset, entry, err);
    return status == CT_OK && entry->n_offsets < 2
               ? ct_json_fail(json, "expected two data_offsets", err)
               : status;
}

static ct_status
read_entry(void *arg, ct_json *json, ct_text name, ct_error *err)
{
    ct_st_file *file = arg;
    header_entry entry = {.file = file, .tensor = {.name = name}};
    void *block = file->tensors;
    /* The only member of the header that is no tensor. */
    if (ct_text_is(name, "__metadata__")) {
        return ct_json_each(json, '{', read_pair, file, err);
    }
    ct_status status = ct_json_each(json, '{', read_field, &entry, err);
    if (status == CT_OK && entry.seen != HAS_ALL) {
        status =
            fail_tensor(file, &entry.tensor, "lacks dtype, shape or data_offsets", err);
    }
    if (status == CT_OK) {
        status = ct_grow(&block, &file->tensors_capacity, file->n_tensors + 1,
                         sizeof entry.tensor, err);
        file->tensors = block;
    }
    if (status == CT_OK) {
        file->tensors[file->n_tensors++] = entry.tensor;
    }
    return status;
}

static ct_status
parse_header(ct_st_file *file, size_t n, ct_error *err)
{
    ct_json json;
    ct_json_init(&json, file->path, file->header, n);
    ct_status status = ct_json_each(&json, '{', read_entry, file, err);
    return status == CT_OK ? ct_json_finish(&json, err) : status;
}

static ct_status
fail_header(const ct_st_file *file, ct_error *err)
{
    return ct_fail(err, CT_EINVAL,
                   "%s: its header is damaged, or rewritten by a program that kept the "
                   "metadata of ctrainer.*",
                   file->path);
}

/* The digits of a checksum in the header's text, "KEY":"00000000" in the writer's
 * spelling; NULL without a checksum. */
static char *
find_digits(const ct_st_file *file, size_t n, const char *key)
{
    char *found = memmem(file->header, n, key, strlen(key));
    char *digits = found == NULL ? NULL : found + strlen(key);
    return digits != NULL && file->header + n - digits >= CT_ST_CRC_DIGITS ? digits
                                                                           : NULL;
}

/* Do the characters after the data's checksum nearly spell the key of the header's?
 * Then the key is damaged. */
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

/* Compares the header with its checksum, if there is one. Parsing overwrites the
 * header, so the comparison comes first. */
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
    /* Before the allocation: a length from the file decides nothing unchecked. */
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
        /* Another spelling of the key, with escapes or spaces, escapes the search
         * above. */
        if (ct_text_is(file->metadata[i].key, CT_ST_HEADER_KEY) &&
            !file->header_checked) { /* not in the writer's spelling */
            status = fail_header(file, err);
        }
    }
    return status;
}

/* ---- the tensors ----------------------------------------------------------------- */

/* Empty tensors begin where the next one does, and come first. */
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
    uint64_t bytes = tag_bytes(tensor->tag);
    if (bytes == 0) {
        return fail_tensor(file, tensor, "has a dtype that this reader lacks", err);
    }
    for (size_t i = 0; i < tensor->ndim; i++) {
        uint64_t extent = tensor->shape[i];
        /* An overflow could make a huge shape fit small offsets. */
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
                       (unsigned long long)at,
                       at > available ? ": cut short; use another checkpoint" : "");
    }
    for (size_t i = 0; i < file->n_tensors; i++) {
        /* Offsets in the file are relative to the data; callers read by places in the
         * file. */
        file->tensors[i].begin += file->data_begin;
        file->tensors[i].end += file->data_begin;
    }
    return CT_OK;
}

/* Sorted for bsearch; neighbours show repeated names. */
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

/* Sets the tensors' shapes: extents has moved while it grew. */
static void
place_shapes(ct_st_file *file)
{
    uint64_t *at = file->extents;
    for (size_t i = 0; i < file->n_tensors; i++) {
        file->tensors[i].shape = at;
        at += file->tensors[i].ndim;
    }
}

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
    /* 0 would be a descriptor, and a failure before the opening closes the source. */
    made->source.fd = -1;
    ct_status status = open_file(made, path, expected, err);
    if (status != CT_OK) {
        ct_st_close(made);
        return status;
    }
    *file = made;
    return CT_OK;
}

const ct_st_tensor *
ct_st_tensors_borrow(const ct_st_file *file, size_t *n)
{
    *n = file->n_tensors;
    return file->tensors;
}

const ct_st_pair *
ct_st_metadata_borrow(const ct_st_file *file, size_t *n)
{
    *n = file->n_metadata;
    return file->metadata;
}

static int
compare_to_name(const void *key, const void *item)
{
    const ct_text *name = key;
    const ct_st_name *entry = item;
    return ct_text_compare(*name, entry->name);
}

const ct_st_tensor *
ct_st_find_borrow(const ct_st_file *file, ct_text name)
{
    const ct_st_name *found = bsearch(&name, file->by_name, file->n_tensors,
                                      sizeof(ct_st_name), compare_to_name);
    return found == NULL ? NULL : &file->tensors[found->index];
}

/* ---- the data -------------------------------------------------------------------- */

/* The data's checksum in the metadata; false without a checksum. */
static bool
find_crc(const ct_st_file *file, uint32_t *crc)
{
    for (size_t i = 0; i < file->n_metadata; i++) {
        const ct_st_pair *pair = &file->metadata[i];
        char digits[CT_ST_CRC_DIGITS + 1] = {0};
        char *end = NULL;
        if (!ct_text_is(pair->key, CT_ST_CRC_KEY) ||
            pair->value.n != CT_ST_CRC_DIGITS) {
            continue;
        }
        /* strtoul needs an end, and the text in the header has none. */
        for (int k = 0; k < CT_ST_CRC_DIGITS; k++) {
            digits[k] = pair->value.data[k];
        }
        *crc = (uint32_t)strtoul(digits, &end, 16);
        return end == digits + CT_ST_CRC_DIGITS;
    }
    return false;
}

/* The data has no gaps: its checksum combines the tensors' in order. */
static uint32_t
join(const ct_st_file *file, const ct_extent *extents, uint32_t crc)
{
    for (size_t i = 0; i < file->n_tensors; i++) {
        crc = ct_crc32c_combine(crc, extents[i].crc, extents[i].n);
    }
    return crc;
}

static ct_status
judge(const ct_st_file *file, const ct_extent *extents, const uint32_t *own,
      const ct_expected *expected, ct_error *err)
{
    uint32_t crc = join(file, extents, 0);
    if (own != NULL && crc != *own) {
        return ct_fail(err, CT_EINVAL,
                       "%s: its data is damaged: checksum %08x, written as %08x",
                       file->path, crc, *own);
    }
    /* The manifest's sum is of the whole file: the header's sum, continued over the
     * data. */
    return expected == NULL
               ? CT_OK
               : ct_source_judge(&file->source, expected,
                                 join(file, extents, file->header_crc), err);
}

ct_status
ct_st_read(const ct_st_file *file, void *const *targets, bool check,
           const ct_expected *expected, ct_error *err)
{
    uint32_t crc = 0;
    const uint32_t *own = check && find_crc(file, &crc) ? &crc : NULL;
    bool summed = own != NULL || expected != NULL;
    ct_extent *extents = ct_calloc(file->n_tensors + 1, sizeof *extents);
    if (extents == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to read %s", file->path);
    }
    for (size_t i = 0; i < file->n_tensors; i++) {
        const ct_st_tensor *t = &file->tensors[i];
        extents[i] = (ct_extent){.offset = t->begin,
                                 .n = t->end - t->begin,
                                 .target = targets == NULL ? NULL : targets[i]};
    }
    /* Without a sum nothing reads the tensors that have no target. */
    ct_status status =
        ct_source_read_extents(&file->source, extents, file->n_tensors,
                               summed ? CT_SUM_CRC32C : CT_SUM_NONE, err);
    if (status == CT_OK && summed) {
        status = judge(file, extents, own, expected, err);
    }
    ct_free(extents);
    return status;
}
