#include "core/checkpoint/plan.h"

#include "core/base/alloc.h"
#include "core/base/crc32.h"
#include "core/base/crc32c.h"
#include "core/base/io.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

void
ct_plan_fini(ct_plan *plan)
{
    for (size_t i = 0; i < plan->n_pieces; i++) {
        ct_free(plan->pieces[i].owned);
    }
    ct_free(plan->pieces);
    ct_free(plan->patches);
    ct_free(plan->name);
    *plan = (ct_plan){0};
}

ct_status
ct_plan_set_name(ct_plan *plan, const char *name, ct_error *err)
{
    if (!ct_path_is_inside(name, strlen(name))) {
        return ct_fail(err, CT_EINVAL,
                       "a file of a checkpoint needs a name inside its folder, got "
                       "'%.200s'",
                       name);
    }
    char *copy = ct_path_join("", name);
    if (copy == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory for the name of a file");
    }
    ct_free(plan->name);
    plan->name = copy;
    return CT_OK;
}

static ct_status
add_piece(ct_plan *plan, ct_plan_piece piece, ct_error *err)
{
    void *block = plan->pieces;
    ct_status status = ct_grow(&block, &plan->pieces_capacity, plan->n_pieces + 1,
                               sizeof *plan->pieces, err);
    plan->pieces = block;
    if (status == CT_OK) {
        plan->pieces[plan->n_pieces++] = piece;
        plan->bytes += piece.n;
    }
    return status;
}

ct_status
ct_plan_add_buf(ct_plan *plan, ct_buf *buf, ct_error *err)
{
    ct_plan_piece piece = {.data = buf->data, .n = buf->n, .owned = buf->data};
    ct_status status = add_piece(plan, piece, err);
    if (status == CT_OK) {
        *buf = (ct_buf){0};
    }
    return status;
}

ct_status
ct_plan_add_data(ct_plan *plan, const void *data, size_t n, ct_error *err)
{
    return add_piece(plan, (ct_plan_piece){.data = data, .n = n}, err);
}

ct_status
ct_plan_add_excerpts(ct_plan *plan, const ct_excerpt *excerpts, size_t n, ct_error *err)
{
    ct_plan_piece piece = {.excerpts = excerpts, .n_excerpts = n};
    for (size_t i = 0; i < n; i++) {
        piece.n += excerpts[i].n;
    }
    return add_piece(plan, piece, err);
}

ct_status
ct_plan_add_patch(ct_plan *plan, ct_patch patch, ct_error *err)
{
    void *block = plan->patches;
    ct_status status = ct_grow(&block, &plan->patches_capacity, plan->n_patches + 1,
                               sizeof *plan->patches, err);
    plan->patches = block;
    if (status == CT_OK) {
        plan->patches[plan->n_patches++] = patch;
        if (patch.kind == CT_PATCH_CRC32) {
            plan->pieces[patch.first].zipped = true;
        }
    }
    return status;
}

static void
store_hex(unsigned char *at, uint32_t value)
{
    for (int i = 7; i >= 0; i--, value >>= 4) {
        at[i] = (unsigned char)"0123456789abcdef"[value & 15u];
    }
}

static void
apply_patch(const ct_plan *plan, const ct_patch *patch)
{
    uint32_t crc = 0;
    unsigned char *at = plan->pieces[patch->to].owned + patch->offset;
    for (size_t i = patch->first; i < patch->first + patch->n; i++) {
        const ct_plan_piece *piece = &plan->pieces[i];
        crc = patch->kind == CT_PATCH_CRC32
                  ? piece->crc32
                  : ct_crc32c_combine(crc, piece->crc32c, piece->n);
    }
    if (patch->kind == CT_PATCH_CRC32) {
        ct_store_le32(at, crc);
    }
    else {
        store_hex(at, crc);
    }
}

/* Borrowed pieces first: patches go by their checksums and change owned ones. */
void
ct_plan_seal(ct_plan *plan)
{
    for (size_t i = 0; i < plan->n_pieces; i++) {
        ct_plan_piece *piece = &plan->pieces[i];
        if (piece->owned == NULL) {
            piece->crc32c = ct_crc32c(0, piece->data, piece->n);
        }
        if (piece->zipped) {
            piece->crc32 = ct_crc32(0, piece->data, piece->n);
        }
    }
    ct_plan_fill_in(plan);
}

void
ct_plan_fill_in(ct_plan *plan)
{
    for (size_t i = 0; i < plan->n_patches; i++) {
        apply_patch(plan, &plan->patches[i]);
    }
    plan->crc32c = 0;
    for (size_t i = 0; i < plan->n_pieces; i++) {
        ct_plan_piece *piece = &plan->pieces[i];
        if (piece->owned != NULL) {
            piece->crc32c = ct_crc32c(0, piece->data, piece->n);
        }
        plan->crc32c = ct_crc32c_combine(plan->crc32c, piece->crc32c, piece->n);
    }
}

ct_status
ct_plan_write(const ct_plan *plan, const char *path, ct_error *err)
{
    ct_piece *pieces = ct_calloc(plan->n_pieces + 1, sizeof *pieces);
    if (pieces == NULL) {
        return ct_fail(err, CT_ENOMEM, "no memory to write %s", path);
    }
    for (size_t i = 0; i < plan->n_pieces; i++) {
        pieces[i] = (ct_piece){plan->pieces[i].data, plan->pieces[i].n};
    }
    ct_status status = unlink(path) < 0 && errno != ENOENT
                           ? ct_fail_io(err, errno, "replace", path)
                           : ct_write_file(path, pieces, plan->n_pieces, err);
    ct_free(pieces);
    return status;
}
