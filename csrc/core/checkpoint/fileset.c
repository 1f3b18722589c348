#define _POSIX_C_SOURCE 200809L
#include "core/checkpoint/fileset.h"

#include "core/base/alloc.h"
#include "core/base/io.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/source.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

/* A file as it was right after it was written: if somebody has changed it since, its
 * checksum is worked out anew. */
struct ct_fileset_file {
    ct_plan plan;
    bool written;
    struct stat as_written;
};

void
ct_fileset_clear(ct_fileset *set)
{
    for (size_t i = 0; i < set->n; i++) {
        ct_plan_fini(&set->files[i].plan);
    }
    set->n = 0;
}

void
ct_fileset_fini(ct_fileset *set)
{
    ct_fileset_clear(set);
    ct_free(set->files);
    *set = (ct_fileset){0};
}

static ct_fileset_file *
find(const ct_fileset *set, const char *name)
{
    for (size_t i = 0; i < set->n; i++) {
        if (strcmp(set->files[i].plan.name, name) == 0) {
            return &set->files[i];
        }
    }
    return NULL;
}

ct_status
ct_fileset_keep(ct_fileset *set, ct_plan *plan, size_t *index, ct_error *err)
{
    ct_fileset_file *f = find(set, plan->name);
    if (f != NULL) {
        ct_plan_fini(&f->plan);
    }
    else {
        void *block = set->files;
        ct_status status = ct_grow(&block, &set->capacity, set->n + 1, sizeof *f, err);
        set->files = block;
        if (status != CT_OK) {
            return status;
        }
        f = &set->files[set->n++];
    }
    *f = (ct_fileset_file){.plan = *plan};
    *plan = (ct_plan){0};
    *index = (size_t)(f - set->files);
    return CT_OK;
}

/* "sub/name" needs a folder "sub". */
static ct_status
make_parent(char *path, const char *name, ct_error *err)
{
    char *slash = strchr(name, '/') == NULL ? NULL : strrchr(path, '/');
    if (slash == NULL) {
        return CT_OK;
    }
    *slash = '\0';
    ct_status status = ct_make_folders(path, err);
    *slash = '/';
    return status;
}

ct_status
ct_fileset_write_one(ct_fileset *set, size_t index, const char *folder, ct_error *err)
{
    ct_fileset_file *f = &set->files[index];
    if (f->written) {
        return CT_OK;
    }
    char *path = ct_path_join(folder, f->plan.name);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the path of %s", f->plan.name);
    }
    ct_status status = make_parent(path, f->plan.name, err);
    ct_plan_seal(&f->plan);
    if (status == CT_OK) {
        status = ct_plan_write(&f->plan, path, err);
    }
    if (status == CT_OK) {
        f->written = stat(path, &f->as_written) == 0;
    }
    ct_free(path);
    return status;
}

ct_status
ct_fileset_write(ct_fileset *set, const char *folder, ct_error *err)
{
    ct_status status = CT_OK;
    for (size_t i = 0; i < set->n && status == CT_OK; i++) {
        status = ct_fileset_write_one(set, i, folder, err);
    }
    return status;
}

typedef struct census {
    const ct_fileset *set;
    const char *folder;
    ct_manifest manifest;
} census;

static bool
is_untouched(const ct_fileset_file *f, const struct stat *now)
{
    const struct stat *then = &f->as_written;
    return f->written && then->st_ino == now->st_ino && then->st_size == now->st_size &&
           then->st_mtim.tv_sec == now->st_mtim.tv_sec &&
           then->st_mtim.tv_nsec == now->st_mtim.tv_nsec;
}

static ct_status
count_file(census *c, const char *name, const char *path, ct_error *err)
{
    struct stat now;
    uint32_t crc = 0;
    uint64_t bytes = 0;
    ct_status status = CT_OK;
    const ct_fileset_file *f = find(c->set, name);
    if (stat(path, &now) < 0) {
        return ct_fail_io(err, errno, "look at", path);
    }
    if (f != NULL && is_untouched(f, &now)) {
        crc = f->plan.crc32c;
        bytes = f->plan.bytes;
    }
    else {
        status = ct_checksum_file(path, &crc, &bytes, err);
    }
    if (status == CT_OK) {
        status = ct_sync_file(path, err);
    }
    return status == CT_OK
               ? ct_manifest_add(&c->manifest, name, strlen(name), bytes, crc, err)
               : status;
}

static ct_status
visit(void *arg, const char *relative, int is_folder, ct_error *err)
{
    census *c = arg;
    if (strcmp(relative, CT_MANIFEST_NAME) == 0) {
        return CT_OK; /* somebody's copy of another folder's: ours replaces it */
    }
    char *path = ct_path_join(c->folder, relative);
    if (path == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for a path below %s", c->folder);
    }
    ct_status status =
        is_folder ? ct_sync_folder(path, err) : count_file(c, relative, path, err);
    ct_free(path);
    return status;
}

ct_status
ct_fileset_sync(ct_fileset *set, const char *folder, ct_error *err)
{
    census c = {.set = set, .folder = folder};
    ct_status status = ct_walk(folder, visit, &c, err);
    if (status == CT_OK) {
        status = ct_manifest_write(&c.manifest, folder, err);
    }
    if (status == CT_OK) {
        status = ct_sync_folder(folder, err);
    }
    ct_manifest_fini(&c.manifest);
    return status;
}
