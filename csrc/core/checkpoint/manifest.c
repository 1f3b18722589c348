#define _POSIX_C_SOURCE 200809L
#include "core/checkpoint/manifest.h"

#include "core/base/alloc.h"
#include "core/base/buf.h"
#include "core/base/io.h"
#include "core/base/json.h"
#include "core/checkpoint/source.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    VERSION = 1,
    SIZE_LIMIT = 64 << 20, /* a manifest of more is no manifest */
    CRC_DIGITS = 8
};

void
ct_manifest_fini(ct_manifest *manifest)
{
    for (size_t i = 0; i < manifest->n; i++) {
        ct_free(manifest->files[i].name);
    }
    ct_free(manifest->files);
    *manifest = (ct_manifest){0};
}

ct_status
ct_manifest_add(ct_manifest *manifest, const char *name, size_t name_n, uint64_t bytes,
                uint32_t crc32c, ct_error *err)
{
    void *block = manifest->files;
    ct_status status = ct_grow(&block, &manifest->capacity, manifest->n + 1,
                               sizeof *manifest->files, err);
    manifest->files = block;
    if (status != CT_OK) {
        return status;
    }
    char *copy = ct_alloc(name_n + 1);
    if (copy == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the name of a file");
    }
    memcpy(copy, name, name_n);
    copy[name_n] = '\0';
    manifest->files[manifest->n++] = (ct_manifest_file){copy, bytes, crc32c};
    return CT_OK;
}

static int
compare_files(const void *left, const void *right)
{
    const ct_manifest_file *a = left, *b = right;
    return strcmp(a->name, b->name);
}

static ct_status
add_file(ct_buf *buf, const ct_manifest_file *file, bool first, ct_error *err)
{
    char rest[64];
    int n = snprintf(rest, sizeof rest, ": {\"bytes\": %llu, \"crc32c\": \"%08x\"}",
                     (unsigned long long)file->bytes, file->crc32c);
    ct_status status = ct_buf_text(buf, first ? "\n  " : ",\n  ", err);
    if (status == CT_OK) {
        status = ct_buf_json(buf, file->name, strlen(file->name), err);
    }
    return status == CT_OK ? ct_buf_add(buf, rest, (size_t)n, err) : status;
}

static ct_status
format(ct_buf *buf, const ct_manifest *manifest, ct_error *err)
{
    ct_status status = ct_buf_text(buf, "{\"version\": 1, \"files\": {", err);
    for (size_t i = 0; i < manifest->n && status == CT_OK; i++) {
        status = add_file(buf, &manifest->files[i], i == 0, err);
    }
    return status == CT_OK ? ct_buf_text(buf, "\n}}\n", err) : status;
}

ct_status
ct_manifest_write(ct_manifest *manifest, const char *folder, ct_error *err)
{
    ct_buf buf = {0};
    char *path = ct_path_join(folder, CT_MANIFEST_NAME);
    ct_status status = CT_OK;
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path below %s", folder);
    }
    if (manifest->n > 0) {
        qsort(manifest->files, manifest->n, sizeof *manifest->files, compare_files);
    }
    status = format(&buf, manifest, err);
    if (status == CT_OK && unlink(path) < 0 && errno != ENOENT) {
        status = ct_fail_io(err, errno, "replace", path);
    }
    if (status == CT_OK) {
        ct_piece piece = {buf.data, buf.n};
        status = ct_write_file(path, &piece, 1, err);
    }
    if (status == CT_OK) {
        status = ct_sync_file(path, err);
    }
    ct_free(path);
    ct_buf_fini(&buf);
    return status;
}

/* The value of a lower-case hexadecimal digit, or -1. */
static int
hex_digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static ct_status
read_crc(ct_json *json, uint32_t *crc, ct_error *err)
{
    ct_text text;
    uint32_t value = 0;
    bool valid = true;
    ct_status status = ct_json_string(json, &text, err);
    if (status != CT_OK) {
        return status;
    }
    for (size_t i = 0; i < text.n; i++) {
        int digit = hex_digit(text.data[i]);
        valid = valid && digit >= 0;
        value = value * 16 + (uint32_t)digit;
    }
    *crc = value;
    return valid && text.n == CRC_DIGITS
               ? CT_OK
               : ct_json_fail(json, "expected a crc32c of 8 digits", err);
}

static ct_status
read_entry(ct_manifest *manifest, ct_json *json, ct_text name, ct_error *err)
{
    bool first = true, more = true, has_bytes = false, has_crc = false;
    uint64_t bytes = 0;
    uint32_t crc = 0;
    ct_status status = ct_json_enter(json, '{', err);
    while (status == CT_OK && more) {
        ct_text key;
        status = ct_json_more(json, '{', &first, &more, &key, err);
        if (status != CT_OK || !more) {
            break;
        }
        if ((has_bytes && ct_text_is(key, "bytes")) ||
            (has_crc && ct_text_is(key, "crc32c"))) {
            return ct_json_fail(json, "a field of a file is there twice", err);
        }
        if (ct_text_is(key, "bytes")) {
            status = ct_json_u64(json, &bytes, err);
            has_bytes = true;
        }
        else if (ct_text_is(key, "crc32c")) {
            status = read_crc(json, &crc, err);
            has_crc = true;
        }
        else {
            status = ct_json_skip(json, err);
        }
    }
    if (status == CT_OK && !(has_bytes && has_crc)) {
        return ct_json_fail(json, "a file lacks bytes or crc32c", err);
    }
    if (status == CT_OK && !ct_path_is_inside(name.data, name.n)) {
        return ct_fail(err, CT_EINVAL,
                       "%s: lists '%.*s', which is no file of its folder", json->what,
                       (int)(name.n < 100 ? name.n : 100), name.data);
    }
    return status == CT_OK
               ? ct_manifest_add(manifest, name.data, name.n, bytes, crc, err)
               : status;
}

static ct_status
read_files(ct_manifest *manifest, ct_json *json, ct_error *err)
{
    bool first = true, more = true;
    ct_status status = ct_json_enter(json, '{', err);
    while (status == CT_OK && more) {
        ct_text name;
        status = ct_json_more(json, '{', &first, &more, &name, err);
        if (status == CT_OK && more) {
            status = read_entry(manifest, json, name, err);
        }
    }
    return status;
}

static ct_status
parse(ct_manifest *manifest, ct_json *json, ct_error *err)
{
    bool first = true, more = true, has_files = false;
    uint64_t version = 0;
    ct_status status = ct_json_enter(json, '{', err);
    while (status == CT_OK && more) {
        ct_text key;
        status = ct_json_more(json, '{', &first, &more, &key, err);
        if (status != CT_OK || !more) {
            break;
        }
        if (ct_text_is(key, "version")) {
            status = ct_json_u64(json, &version, err);
        }
        else if (ct_text_is(key, "files") && !has_files) {
            status = read_files(manifest, json, err);
            has_files = true;
        }
        else {
            status = ct_json_skip(json, err);
        }
    }
    if (status == CT_OK) {
        status = ct_json_finish(json, err);
    }
    if (status == CT_OK && (version != VERSION || !has_files)) {
        return ct_fail(err, CT_EINVAL,
                       "%s: not a manifest of version %d: version %llu, %s", json->what,
                       VERSION, (unsigned long long)version,
                       has_files ? "files listed" : "no files listed");
    }
    return status;
}

/* The whole file as text; release *text with ct_free. */
static ct_status
read_text(const char *path, char **text, size_t *n, ct_error *err)
{
    ct_source source;
    ct_status status = ct_source_open(&source, path, NULL, err);
    if (status != CT_OK) {
        return status;
    }
    if (source.bytes > SIZE_LIMIT) {
        status = ct_fail(err, CT_EINVAL, "%s: too large for a manifest", path);
    }
    else if ((*text = ct_alloc((size_t)source.bytes + 1)) == NULL) {
        status = ct_fail(err, CT_ENOMEM, "no memory to read %s", path);
    }
    else {
        *n = (size_t)source.bytes;
        status = ct_source_read(&source, *text, *n, 0, err);
    }
    ct_source_close(&source);
    return status;
}

/* Is a folder on the way to name a link? The manifest's writer passes over those. */
static ct_status
check_folders(const char *folder, const char *name, const char *what, ct_error *err)
{
    struct stat info;
    char *path = ct_path_join(folder, name);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path below %s", folder);
    }
    ct_status status = CT_OK;
    char *slash = strchr(path + strlen(path) - strlen(name), '/');
    for (; slash != NULL && status == CT_OK; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (lstat(path, &info) == 0 && S_ISLNK(info.st_mode)) {
            status = ct_fail(err, CT_EINVAL, "%s: lists '%.100s' behind the link %s",
                             what, name, path);
        }
        *slash = '/';
    }
    ct_free(path);
    return status;
}

static ct_status
check_files(ct_manifest *manifest, const char *folder, const char *what, ct_error *err)
{
    if (manifest->n == 0) {
        return ct_fail(err, CT_EINVAL, "%s: lists no files", what);
    }
    qsort(manifest->files, manifest->n, sizeof *manifest->files, compare_files);
    for (size_t i = 0; i < manifest->n; i++) {
        const char *name = manifest->files[i].name;
        if (i > 0 && strcmp(manifest->files[i - 1].name, name) == 0) {
            return ct_fail(err, CT_EINVAL, "%s: lists '%.100s' twice", what, name);
        }
        ct_status status = check_folders(folder, name, what, err);
        if (status != CT_OK) {
            return status;
        }
    }
    return CT_OK;
}

ct_status
ct_manifest_read(ct_manifest *manifest, const char *folder, ct_error *err)
{
    char *text = NULL;
    size_t n = 0;
    char *path = ct_path_join(folder, CT_MANIFEST_NAME);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path below %s", folder);
    }
    ct_status status = read_text(path, &text, &n, err);
    if (status == CT_OK) {
        ct_json json;
        ct_json_init(&json, path, text, n);
        status = parse(manifest, &json, err);
    }
    if (status == CT_OK) {
        status = check_files(manifest, folder, path, err);
    }
    ct_free(text);
    ct_free(path);
    return status;
}

static ct_status
check_file(const char *path, const ct_expected *expected, ct_error *err)
{
    ct_source source;
    ct_status status = ct_source_open(&source, path, expected, err);
    if (status != CT_OK) {
        return status;
    }
    ct_extent whole = {.n = source.bytes};
    status = ct_source_read_extents(&source, &whole, 1, CT_SUM_CRC32C, err);
    if (status == CT_OK) {
        status = ct_source_judge(&source, expected, whole.crc, err);
    }
    ct_source_close(&source);
    return status;
}

static ct_status
verify_file(const char *folder, const ct_manifest_file *file, ct_problem_fn *tell,
            void *arg, ct_error *err)
{
    ct_error found;
    const ct_expected expected = {file->bytes, file->crc32c};
    char *path = ct_path_join(folder, file->name);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path below %s", folder);
    }
    ct_status status = check_file(path, &expected, &found);
    ct_free(path);
    return status == CT_OK ? CT_OK : tell(arg, found.message, err);
}

ct_status
ct_manifest_verify(const char *folder, ct_problem_fn *tell, void *arg, ct_error *err)
{
    ct_manifest manifest = {0};
    ct_status status = ct_manifest_read(&manifest, folder, err);
    for (size_t i = 0; i < manifest.n && status == CT_OK; i++) {
        status = verify_file(folder, &manifest.files[i], tell, arg, err);
    }
    ct_manifest_fini(&manifest);
    return status;
}
