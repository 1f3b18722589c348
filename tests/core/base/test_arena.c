/* Recycled pages: blocks keep their content and never overlap, and the pages are as
 * many as were in use at once, whatever the lengths. */
#define _GNU_SOURCE /* RUSAGE_THREAD */

#include "core/base/alloc.h"
#include "core/base/arena.h"
#include "core/base/imports.h"
#include "core/base/mapping.h"
#include "core/base/region.h"
#include "ct_random.h"
#include "ct_test.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__ /* has memory of its own for each block */
#define ASAN 1
#else
#define ASAN 0
#endif

enum {
    KIB = 1 << 10,
    MIB = 1 << 20,
    PAGE = 4096,
    BLOCKS = 48
};

typedef struct block {
    unsigned char *data, value;
    size_t bytes;
} block;

static long
faults(void)
{
    struct rusage used;
    CHECK(getrusage(RUSAGE_SELF, &used) == 0);
    return used.ru_minflt;
}

static block
block_new(size_t bytes, unsigned char value)
{
    const block b = {ct_arena_alloc(bytes), value, bytes};
    CHECK(b.data != NULL && (uintptr_t)b.data % PAGE == 0);
    memset(b.data, value, bytes);
    return b;
}

static void
block_free(block *b)
{
    CHECK(b->data[0] == b->value && memcmp(b->data, b->data + 1, b->bytes - 1) == 0);
    CHECK(ct_arena_free(b->data));
    b->data = NULL;
}

static void
addresses_under_a_limit_stay_the_processs(void)
{
    const pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {(rlim_t)1 << 40, (rlim_t)1 << 40};
        CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
        CHECK(ct_arena_alloc(MIB) == NULL && !ct_arena_free(&limit));
        CHECK(!ct_arena_serve("libc.so.6"));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void
short_blocks_become_long_ones_without_a_page_fault(void)
{
    enum {
        N = 32
    };
    block blocks[N], kept[N];
    for (size_t i = 0; i < N; i++) { /* blocks in use between those that are freed */
        blocks[i] = block_new(MIB, (unsigned char)i);
        kept[i] = block_new(192 * KIB, (unsigned char)~i);
    }
    for (size_t i = 0; i < N; i++) {
        block_free(&blocks[i]);
    }
    const size_t resident = ct_memory_resident();
    const long before = faults();
    block half = block_new(N / 2 * MIB, 1), other = block_new(N / 2 * MIB - PAGE, 2);
    CHECK(ASAN || faults() - before < 16);
    CHECK(ASAN || ct_memory_resident() < resident + MIB);
    CHECK(ct_arena_measure().free == 0);
    block_free(&half);
    block_free(&other);
    for (size_t i = 0; i < N; i++) {
        block_free(&kept[i]);
    }
    const ct_arena_size size = ct_arena_measure();
    CHECK(size.used == 0 && size.free == N * (MIB + 192 * KIB));
}

static void
neighbours_become_one_block(void)
{
    enum {
        N = 4
    };
    static const size_t order[N] = {0, 2, 3, 1};
    ct_arena_trim();
    block blocks[N];
    for (size_t i = 0; i < N; i++) {
        blocks[i] = block_new(MIB, (unsigned char)i);
        CHECK(i == 0 || blocks[i].data == blocks[i - 1].data + MIB);
    }
    const unsigned char *first = blocks[0].data;
    for (size_t i = 0; i < N; i++) {
        block_free(&blocks[order[i]]);
    }
    block all = block_new(N * MIB, 5);
    CHECK(all.data == first);
    block_free(&all);
}

static void
pages_of_several_mappings_move(void)
{
    enum {
        N = 8
    };
    char *from = mmap(NULL, 2 * N * PAGE, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(from != MAP_FAILED);
    char *to = from + N * PAGE;
    CHECK(mprotect(from + 3 * PAGE, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
    memset(from, 1, N * PAGE);
    CHECK(ct_arena_move(to, from, N * PAGE));
    const long before = faults();
    memset(to, 2, N * PAGE);
    CHECK(ASAN || faults() == before);
    memset(from, 1, N * PAGE);
    CHECK(faults() > before);
    CHECK(munmap(from, 2 * N * PAGE) == 0);
}

static void
free_pages_go_back_when_they_are_trimmed(void)
{
    block b = block_new(64 * MIB, 3);
    block_free(&b);
    const size_t before = ct_memory_resident();
    ct_arena_trim();
    CHECK(ct_memory_resident() < before - 60 * MIB && ct_arena_measure().free == 0);
}

static size_t
mappings(void)
{
    FILE *file = fopen("/proc/self/maps", "r");
    size_t lines = 0;
    CHECK(file != NULL);
    for (int c; (c = getc(file)) != EOF;) {
        lines += c == '\n';
    }
    CHECK(fclose(file) == 0);
    return lines;
}

/* However long a process runs: it may have 65,530. */
static void
mappings_are_merged(void)
{
    enum {
        TURNS = 30000,
        MOST = 7500
    };
    ct_random r = {7};
    char *blocks[BLOCKS] = {NULL};
    for (size_t turn = 0; turn < TURNS; turn++) {
        char **b = &blocks[ct_random_below(&r, BLOCKS)];
        if (*b != NULL) {
            CHECK(ct_arena_free(*b));
        }
        *b = ct_arena_alloc((1 + ct_random_below(&r, 1024)) * 16 * KIB);
        CHECK(*b != NULL);
        **b = 1;
        CHECK(turn % 5000 != 0 || mappings() < MOST);
    }
    CHECK(mappings() < MOST);
    for (size_t i = 0; i < BLOCKS; i++) {
        CHECK(blocks[i] == NULL || ct_arena_free(blocks[i]));
    }
    ct_arena_trim();
}

/* The pages are those of the largest sum of blocks in use, and the ends of huge pages.
 */
static void
pages_are_as_many_as_were_in_use_at_once(uint64_t seed)
{
    ct_random r = {seed};
    block blocks[BLOCKS] = {
        {NULL, 0, 0}
    };
    ct_arena_trim();
    const size_t resident = ct_memory_resident();
    size_t most = 0;
    for (size_t turn = 0; turn < 3000; turn++) {
        block *b = &blocks[ct_random_below(&r, BLOCKS)];
        if (b->data != NULL) {
            block_free(b);
        }
        else if (ct_random_below(&r, 4) != 0) {
            const size_t longest = ct_random_below(&r, 8) == 0 ? 4 * MIB : 256 * KIB;
            *b = block_new(1 + ct_random_below(&r, longest), (unsigned char)turn);
        }
        const ct_arena_size now = ct_arena_measure();
        most = now.used > most ? now.used : most;
        CHECK(now.used + now.free == most);
    }
    CHECK(ct_memory_resident() < resident + most + 2 * MIB);
    for (size_t i = 0; i < BLOCKS; i++) {
        if (blocks[i].data != NULL) {
            block_free(&blocks[i]);
        }
    }
    CHECK(ct_arena_measure().used == 0);
}

static void
mappings_have_the_pages_of_blocks(void)
{
    ct_block_cache cache = {NULL};
    ct_mapping map;
    block a = block_new(3 * MIB, 1), between = block_new(MIB, 2), b = block_new(MIB, 3);
    CHECK(ct_mapping_open(&map, 4 * MIB, false, NULL) == CT_OK);
    ct_mapping_detect(&map);
    block_free(&a);
    block_free(&b);
    const long before = faults();
    for (int turn = 0; turn < 3; turn++) {
        CHECK(ct_mapping_obtain(&map, map.bytes, &cache, NULL) == CT_OK);
        memset(map.data, turn, map.bytes);
        ct_mapping_release(&map, &cache);
        CHECK(!ct_mapping_touched(&map));
        block_free(&between);
        a = block_new(4 * MIB, 4);
        between = block_new(MIB, 5);
        block_free(&a);
    }
    CHECK(ASAN || faults() - before < 64);
    block_free(&between);
    ct_mapping_close(&map);
}

static void
a_forked_child_has_its_own_blocks(void)
{
    block b = block_new(2 * MIB, 7);
    const pid_t child = fork();
    if (child == 0) {
        block_free(&b);
        b = block_new(3 * MIB, 8);
        block_free(&b);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    block_free(&b);
}

static void *
take_turns(void *arg)
{
    const uint64_t seed = *(const uint64_t *)arg;
    ct_random r = {seed};
    block held[4] = {
        {NULL, 0, 0}
    };
    for (size_t turn = 0; turn < 2000; turn++) {
        block *b = &held[turn % 4];
        if (b->data != NULL) {
            block_free(b);
        }
        *b =
            block_new(1 + ct_random_below(&r, 512 * KIB), (unsigned char)(turn + seed));
    }
    for (size_t i = 0; i < 4; i++) {
        block_free(&held[i]);
    }
    return NULL;
}

static void
threads_have_blocks_of_their_own(void)
{
    enum {
        N = 4
    };
    pthread_t threads[N];
    uint64_t seeds[N];
    for (size_t i = 0; i < N; i++) {
        seeds[i] = i + 1;
        CHECK(pthread_create(&threads[i], NULL, take_turns, &seeds[i]) == 0);
    }
    for (size_t i = 0; i < N; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK(ct_arena_measure().used == 0);
}

static void
without_memory_for_a_range_blocks_stay_intact(void)
{
    block blocks[BLOCKS];
    ct_random r = {5};
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = block_new(1 + ct_random_below(&r, MIB), (unsigned char)i);
    }
    for (size_t i = 0; i < BLOCKS; i += 2) {
        block_free(&blocks[i]);
    }
    for (size_t n = 1; n < 4; n++) {
        ct_alloc_fail_after(n);
        void *found = ct_arena_alloc(9 * MIB);
        ct_alloc_fail_after(0);
        if (found != NULL) {
            memset(found, 9, 9 * MIB);
            CHECK(ct_arena_free(found));
        }
    }
    for (size_t i = 1; i < BLOCKS; i += 2) {
        block_free(&blocks[i]);
    }
    CHECK(ct_arena_measure().used == 0);
}

static void
what_is_not_the_arenas_is_left_alone(void)
{
    void *others = malloc(MIB);
    CHECK(!ct_arena_free(others) && !ct_arena_free(NULL));
    CHECK(ct_arena_alloc(0) == NULL && ct_arena_alloc(SIZE_MAX) == NULL);
    CHECK(ct_arena_alloc(SIZE_MAX / 4) == NULL);
    free(others);
    CHECK(!ct_arena_serve("libnone.so"));
    CHECK(!ct_import_replace("libc.so.6", "no_such_function", NULL));
}

int
main(void)
{
    addresses_under_a_limit_stay_the_processs(); /* before the arena is opened */
    short_blocks_become_long_ones_without_a_page_fault();
    neighbours_become_one_block();
    pages_of_several_mappings_move();
    free_pages_go_back_when_they_are_trimmed();
    for (uint64_t seed = 1; seed < 4; seed++) {
        pages_are_as_many_as_were_in_use_at_once(seed);
    }
    mappings_are_merged();
    mappings_have_the_pages_of_blocks();
    a_forked_child_has_its_own_blocks();
    threads_have_blocks_of_their_own();
    without_memory_for_a_range_blocks_stay_intact();
    what_is_not_the_arenas_is_left_alone();
    return 0;
}
