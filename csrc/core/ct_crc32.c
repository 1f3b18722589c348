#include "core/ct_crc32.h"

#include "core/ct_crc_table.h"

#include <pthread.h>

/* A constant, worked out at first use. */
static ct_crc_table table;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void
fill_table(void)
{
    ct_crc_table_init(&table, 0xedb88320u);
}

uint32_t
ct_crc32(uint32_t crc, const void *data, size_t n)
{
    (void)pthread_once(&once, fill_table);
    return ct_crc_table_run(&table, crc, data, n);
}
