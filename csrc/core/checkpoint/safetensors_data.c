/* Reading the data of an open safetensors file, straight to where it belongs. */
#include "core/checkpoint/safetensors_file.h"

#include "core/base/alloc.h"
#include "core/base/crc32c.h"

#include <stdlib.h>

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

/* The checksum of the data that the file carries; false if it has none. */
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
        for (int k = 0; k < CT_ST_CRC_DIGITS; k++) {
            digits[k] = pair->value.data[k];
        }
        *crc = (uint32_t)strtoul(digits, &end, 16);
        return end == digits + CT_ST_CRC_DIGITS;
    }
    return false;
}

/* The data has no gaps: its checksum is that of all tensors in their order. */
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
        extents[i] = (ct_extent){
            .offset = t->begin, .n = t->end - t->begin, .target = targets[i]};
    }
    ct_status status =
        ct_source_read_extents(&file->source, extents, file->n_tensors,
                               summed ? CT_SUM_CRC32C : CT_SUM_NONE, err);
    if (status == CT_OK && summed) {
        status = judge(file, extents, own, expected, err);
    }
    ct_free(extents);
    return status;
}
