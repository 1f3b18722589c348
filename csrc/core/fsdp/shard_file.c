/* Shards in a file: read as a whole, past the mapping. A thread belongs to one read and
 * ends with it. */
#include "core/fsdp/shard_file.h"

#include "core/base/thread.h"

static ct_status
hold(ct_shard_file *file, ct_block_cache *cache, ct_error *err)
{
    ct_status status = ct_disk_memory_check(file->disk, "a gather", err);
    if (status == CT_OK) {
        status = ct_mapping_obtain(file->copy, file->copy->bytes, cache, err);
    }
    if (status == CT_OK) {
        file->held = true;
        /* What was written at the shards' addresses stays in the page cache alone,
         * from where the kernel writes it before a read. */
        ct_disk_memory_drop_pages(file->disk);
    }
    return status;
}

static ct_status
read_all(const ct_shard_file *file, ct_error *err)
{
    const ct_disk_memory *disk = file->disk;
    return ct_disk_memory_read(disk, disk->data, file->copy->data, disk->bytes, err);
}

static void *
run(void *arg)
{
    ct_shard_file *file = arg;
    file->status = read_all(file, &file->error);
    return NULL;
}

ct_status
ct_shard_file_begin(ct_shard_file *file, ct_block_cache *cache, ct_error *err)
{
    if (file->held) {
        return CT_OK;
    }
    const ct_status status = hold(file, cache, err);
    if (status != CT_OK) {
        return status;
    }
    file->begun = ct_thread_start(&file->thread, run, file) == 0;
    if (!file->begun) {
        ct_shard_file_drop(file, cache);
        return ct_fail(err, CT_ENOMEM, "no thread to read shards ahead");
    }
    return CT_OK;
}

/* A forked child has no such thread. */
static void
end(ct_shard_file *file)
{
    if (file->begun && ct_owner_is_here(file->disk->owner)) {
        (void)pthread_join(file->thread, NULL);
    }
    file->begun = false;
}

ct_status
ct_shard_file_read(ct_shard_file *file, ct_block_cache *cache, ct_error *err)
{
    if (file->begun) {
        end(file);
        if (file->status != CT_OK && err != NULL) {
            *err = file->error;
        }
        return file->status;
    }
    const ct_status status = file->held ? CT_OK : hold(file, cache, err);
    return status == CT_OK ? read_all(file, err) : status;
}

ct_span
ct_shard_file_find(const ct_shard_file *file, const ct_span *shard)
{
    ct_span found = *shard;
    if (file->held && ct_disk_memory_has(file->disk, shard->data)) {
        const size_t offset =
            (size_t)((const unsigned char *)shard->data - file->disk->data);
        found.data = (unsigned char *)file->copy->data + offset;
    }
    return found;
}

void
ct_shard_file_drop(ct_shard_file *file, ct_block_cache *cache)
{
    end(file);
    if (file->held) {
        ct_mapping_release(file->copy, cache);
        file->held = false;
    }
}
