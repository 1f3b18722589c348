/* Writing, reading and verifying manifests.
 *
 * A manifest is data from outside: names that leave the folder, repeated entries and
 * malformed checksums are rejected before any listed file is opened.
 *
 * The presence of a manifest stands for a complete checkpoint: the writer calls
 * ct_manifest_write after all other files have been synchronized. */
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
    /* The list may have grown even if the copy of the name fails below; the count has
     * not. */
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

/* Sorted by name: equal checkpoints have equal manifests, and repeated names are
 * neighbours. */
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

ct_status
ct_manifest_format(ct_manifest *manifest, ct_buf *buf, ct_error *err)
{
    /* qsort forbids NULL, the array of an empty list. */
    if (manifest->n > 0) {
        qsort(manifest->files, manifest->n, sizeof *manifest->files, compare_files);
    }
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
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path below %s", folder);
    }
    ct_status status = ct_manifest_format(manifest, &buf, err);
    /* ct_write_file only creates. The old name is unlinked rather than overwritten, so
     * that a hard-linked copy of the folder keeps the old manifest. */
    if (status == CT_OK && unlink(path) < 0 && errno != ENOENT) {
        status = ct_fail_io(err, errno, "replace", path);
    }
    if (status == CT_OK) {
        status = ct_write_file(path, buf.data, buf.n, err);
    }
    if (status == CT_OK) {
        /* The caller synchronizes the folder, and so the name. */
        status = ct_sync_file(path, err);
    }
    ct_free(path);
    ct_buf_fini(&buf);
    return status;
}

/* The value of a lower-case hexadecimal digit, or -1. Upper case is rejected: the
 * writer has lower case alone, and strtoul would take signs and spaces too. */
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
        /* A wrong digit spoils the value, but `valid` remembers. */
        value = value * 16 + (uint32_t)digit;
    }
    *crc = value;
    return valid && text.n == CRC_DIGITS
               ? CT_OK
               : ct_json_fail(json, "expected a crc32c of 8 digits", err);
}

typedef struct entry {
    uint64_t bytes;
    uint32_t crc;
    bool has_bytes, has_crc;
} entry;

/* Unknown fields are skipped, so that a later release may add some; a repeated field is
 * ambiguous and rejected. */
static ct_status
read_field(void *arg, ct_json *json, ct_text key, ct_error *err)
{
    entry *e = arg;
    const bool is_bytes = ct_text_is(key, "bytes"), is_crc = ct_text_is(key, "crc32c");
    if ((is_bytes && e->has_bytes) || (is_crc && e->has_crc)) {
        return ct_json_fail(json, "a field of a file is there twice", err);
    }
    e->has_bytes = e->has_bytes || is_bytes;
    e->has_crc = e->has_crc || is_crc;
    return is_bytes ? ct_json_u64(json, &e->bytes, err)
           : is_crc ? read_crc(json, &e->crc, err)
                    : ct_json_skip(json, err);
}

static ct_status
read_file(void *arg, ct_json *json, ct_text name, ct_error *err)
{
    entry e = {0};
    ct_status status = ct_json_each(json, '{', read_field, &e, err);
    if (status == CT_OK && !(e.has_bytes && e.has_crc)) {
        return ct_json_fail(json, "a file lacks bytes or crc32c", err);
    }
    /* Names are joined to the folder later: "../x" would read files outside. */
    if (status == CT_OK && !ct_path_is_inside(name.data, name.n)) {
        return ct_fail(err, CT_EINVAL,
                       "%s: lists '%.*s', which is no file of its folder", json->what,
                       (int)(name.n < 100 ? name.n : 100), name.data);
    }
    return status == CT_OK
               ? ct_manifest_add(arg, name.data, name.n, e.bytes, e.crc, err)
               : status;
}

typedef struct content {
    ct_manifest *manifest;
    uint64_t version;
    bool has_files;
} content;

/* A newer version is an error at once: what follows may have another form. That there
 * is a version is judged after the parse, as members may come in any order. */
static ct_status
read_member(void *arg, ct_json *json, ct_text key, ct_error *err)
{
    content *c = arg;
    if (ct_text_is(key, "version")) {
        ct_status status = ct_json_u64(json, &c->version, err);
        if (status == CT_OK && c->version > VERSION) {
            return ct_fail(err, CT_EINVAL,
                           "%s: has version %llu of its format, and this ctrainer "
                           "reads versions up to %d: a newer release wrote it, so "
                           "update ctrainer",
                           json->what, (unsigned long long)c->version, VERSION);
        }
        return status;
    }
    if (!ct_text_is(key, "files") || c->has_files) {
        return ct_json_skip(json, err);
    }
    c->has_files = true;
    return ct_json_each(json, '{', read_file, c->manifest, err);
}

static ct_status
parse(ct_manifest *manifest, ct_json *json, ct_error *err)
{
    content c = {.manifest = manifest};
    ct_status status = ct_json_each(json, '{', read_member, &c, err);
    if (status == CT_OK) {
        status = ct_json_finish(json, err);
    }
    if (status == CT_OK && (c.version != VERSION || !c.has_files)) {
        return ct_fail(err, CT_EINVAL,
                       "%s: not a manifest of version %d: version %llu, %s", json->what,
                       VERSION, (unsigned long long)c.version,
                       c.has_files ? "files listed" : "no files listed");
    }
    return status;
}

/* Strings decode in place, so `text` lives until all names have been copied. */
ct_status
ct_manifest_parse(ct_manifest *manifest, char *text, size_t n, const char *what,
                  ct_error *err)
{
    ct_json json;
    ct_json_init(&json, what, text, n);
    return parse(manifest, &json, err);
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
    /* Before the allocation: the size is the file's statement. */
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

/* Is a folder of the path `name` a link? The writer of manifests skips files below
 * links. */
static ct_status
check_folders(const char *folder, const char *name, const char *what, ct_error *err)
{
    struct stat info;
    char *path = ct_path_join(folder, name);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path below %s", folder);
    }
    ct_status status = CT_OK;
    /* From the first slash inside the name: the user may have linked the folder
     * itself. */
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
        status = ct_manifest_parse(manifest, text, n, path, err);
    }
    if (status == CT_OK) {
        status = check_files(manifest, folder, path, err);
    }
    ct_free(text);
    ct_free(path);
    return status;
}

/* Damage of a file is a finding, not a failure: the search continues with the next
 * file, so that a run reports all problems. */
static ct_status
verify_file(const char *folder, const ct_manifest_file *file, ct_problem_fn *report,
            void *arg, ct_error *err)
{
    ct_error problem;
    ct_expected found;
    const ct_expected expected = {file->bytes, file->crc32c};
    char *path = ct_path_join(folder, file->name);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path below %s", folder);
    }
    ct_status status = ct_checksum_file(path, &expected, &found, &problem);
    ct_free(path);
    return status == CT_OK ? CT_OK : report(arg, problem.message, err);
}

ct_status
ct_manifest_verify(const char *folder, ct_problem_fn *report, void *arg, ct_error *err)
{
    ct_manifest manifest = {0};
    ct_status status = ct_manifest_read(&manifest, folder, err);
    for (size_t i = 0; i < manifest.n && status == CT_OK; i++) {
        status = verify_file(folder, &manifest.files[i], report, arg, err);
    }
    ct_manifest_fini(&manifest);
    return status;
}
