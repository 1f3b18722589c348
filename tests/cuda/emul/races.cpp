/* Which operation, and which thread of a launch, last wrote or read a word of device or
 * shared memory, and whether an access is ordered behind it.
 *
 * The compiler calls __tsan_read4() and the like before the accesses of kernels, as it
 * does for ThreadSanitizer, whose library is not linked; copies and libraries call
 * touch(). An operation is behind another if a stream, an event or a wait of the host
 * says so; a thread of a launch is behind another of its block if a barrier is between
 * them. Two reads need no order. */
#include "emul.h"

#include <string.h>
#include <sys/mman.h>

namespace emul {

thread_local bool in_kernel;

#ifdef __SANITIZE_ADDRESS__

bounds arena;

void
begin_operation(const char *, uint32_t, int, const clock &)
{
}

void
enter_thread(unsigned)
{
}

void
begin_interval(bool)
{
}

void
touch(const void *, size_t, bool)
{
}

void
check_release(const void *, size_t, const char *, const clock *)
{
}

void
set_home(const void *, size_t, int)
{
}

#else

namespace {

const size_t word = 4, page = 4096;
const unsigned many = 0x7ff; /* threads read it in one interval */

/* Of a word: which of its bytes, by what, where in the launch. 0: none. */
struct access {
    uint64_t operation : 26, bytes : 4, thread : 11, interval : 23;

    bool is_none() const
    {
        return operation == 0;
    }
};

struct cell {
    access written, read[word]; /* the reads since, of bytes or of streams */
};

struct told {
    const char *name;
    uint32_t stream, number;
};

/* Addresses are given out once, so that what uses old memory is found. */
const size_t arena_bytes = (size_t)1 << 38;

void *
reserve(size_t bytes, int protection)
{
    void *made = mmap(NULL, bytes, protection,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) {
        die("there are not %zu addresses", bytes);
    }
    return made;
}

} // namespace

bounds arena = {(uintptr_t)reserve(arena_bytes, PROT_NONE), arena_bytes};

namespace {

cell *const cells =
    (cell *)reserve(arena_bytes / word * sizeof(cell), PROT_READ | PROT_WRITE);
/* Of each page, the device's number plus 1; 0: there is no memory. */
unsigned char *const homes =
    (unsigned char *)reserve(arena_bytes / page, PROT_READ | PROT_WRITE);

std::vector<told> &operations = *new std::vector<told>(1); /* also at the exit */
clock seen_by_it; /* by the running operation */
access now;       /* what an access is that is made now; of all bytes */
uint64_t block_began;
int home;

const char *
name_of(access it)
{
    return operations[it.operation].name;
}

bool
is_behind(access earlier)
{
    const told &it = operations[earlier.operation];
    return it.stream < seen_by_it.size() && seen_by_it[it.stream] >= it.number;
}

[[noreturn]] void
report(access earlier, const char *did, const char *does, const void *data)
{
    const told &then = operations[earlier.operation], &it = operations[now.operation];
    if (earlier.operation == now.operation) {
        die("race in %s: block %u's thread %u %s %p, which thread %u %s with no "
            "barrier "
            "between them",
            it.name, here.block.x, (unsigned)now.thread, does, data,
            (unsigned)earlier.thread, did);
    }
    die("race: %s on stream %u %s %p, which %s on stream %u %s, and nothing orders "
        "them",
        it.name, it.stream, does, data, then.name, then.stream, did);
}

bool
overlap(access a, access b)
{
    return !a.is_none() && (a.bytes & b.bytes) != 0;
}

/* Whether the running thread's access is ordered behind it. */
bool
is_ordered(access earlier, access mine)
{
    if (earlier.operation != mine.operation) {
        return is_behind(earlier);
    }
    return earlier.thread == mine.thread
               ? earlier.interval >= block_began
               : earlier.interval >= block_began && earlier.interval < mine.interval;
}

inline bool
is_same(access a, access b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

inline void
write_word(cell *it, access mine, const void *data)
{
    if (is_same(it->written, mine) && it->read[0].is_none()) {
        return;
    }
    if (overlap(it->written, mine) && !is_ordered(it->written, mine)) {
        report(it->written, "writes", "writes", data);
    }
    for (access &read : it->read) {
        if (overlap(read, mine) && !is_ordered(read, mine)) {
            report(read, "reads", "writes", data);
        }
        read = {};
    }
    it->written = mine;
}

inline void
read_word(cell *it, access mine, const void *data)
{
    if (is_same(it->read[0], mine)) {
        return;
    }
    if (overlap(it->written, mine) && !is_ordered(it->written, mine)) {
        report(it->written, "writes", "reads", data);
    }
    access *kept = NULL;
    for (access &read : it->read) {
        if (read.operation == mine.operation && read.interval == mine.interval &&
            (read.thread == mine.thread || overlap(read, mine))) {
            read.bytes |= mine.bytes;
            read.thread = read.thread == mine.thread ? mine.thread : many;
            return;
        }
        if (kept == NULL && (read.is_none() || is_ordered(read, mine))) {
            kept = &read;
        }
    }
    *(kept == NULL ? &it->read[word - 1] : kept) = mine;
}

inline void
each_word(cell *of, uintptr_t begin, uintptr_t address, size_t bytes, bool writes)
{
    if (address % word == 0 && bytes % word == 0) { /* the same, and sooner */
        access mine = now;
        mine.bytes = 0xf;
        for (uintptr_t at = address; at < address + bytes; at += word) {
            cell *it = &of[(at - begin) / word];
            writes ? write_word(it, mine, (void *)at) : read_word(it, mine, (void *)at);
        }
        return;
    }
    for (uintptr_t at = address; at < address + bytes;) {
        const uintptr_t end = std::min(at / word * word + word, address + bytes);
        access mine = now;
        mine.bytes = ((1U << (end - at)) - 1) << at % word;
        cell *it = &of[(at - begin) / word];
        writes ? write_word(it, mine, (void *)at) : read_word(it, mine, (void *)at);
        at = end;
    }
}

void
check_home(uintptr_t address)
{
    const int found = homes[(address - arena.begin) / page] - 1;
    if (found != home) {
        die("%s %s at %p", name_of(now),
            found < 0 ? "uses memory that is not, or no longer, there"
                      : "uses another device's memory",
            (void *)address);
    }
}

/* ---- shared memory: the statics of this module ----------------------------------- */

extern "C" __attribute__((visibility("hidden"))) char __bss_start, _end;

/* A block finds nothing there but what it has written. */
void
touch_shared(uintptr_t address, size_t bytes, bool writes)
{
    static const uintptr_t begin = (uintptr_t)&__bss_start / word * word;
    static std::vector<cell> of((((uintptr_t)&_end) - begin) / word + 1);
    for (uintptr_t at = address / word * word; at < address + bytes; at += word) {
        cell &it = of[(at - begin) / word];
        const auto is_old = [](access a) {
            return a.operation != now.operation || a.interval < block_began;
        };
        if (is_old(it.written)) {
            it = {};
            if (!writes) {
                die("%s reads shared memory that its block has not written",
                    name_of(now));
            }
        }
    }
    each_word(of.data(), begin, address, bytes, writes);
}

inline void
check_access(const void *data, size_t bytes, bool writes)
{
    const uintptr_t address = (uintptr_t)data;
    if (address - arena.begin < arena.bytes) {
        check_home(address);
        check_home(address + bytes - 1);
        each_word(cells, arena.begin, address, bytes, writes);
        return;
    }
    const bool is_static =
        address >= (uintptr_t)&__bss_start && address < (uintptr_t)&_end;
    const bool is_place = address - (uintptr_t)&here < sizeof here;
    if (is_static && !is_place && in_kernel) {
        touch_shared(address, bytes, writes);
    }
}

} // namespace

void
begin_operation(const char *name, uint32_t stream, int device, const clock &at)
{
    operations.push_back({name, stream, at[stream]});
    seen_by_it = at;
    home = device;
    now = {};
    now.operation = (operations.size() - 1) & 0x3ffffff;
    now.interval = 1;
    block_began = 0;
}

void
enter_thread(unsigned thread)
{
    now.thread = thread;
}

void
begin_interval(bool of_new_block)
{
    now.interval++;
    if (of_new_block) {
        block_began = now.interval;
    }
}

void
touch(const void *data, size_t bytes, bool writes)
{
    const uintptr_t address = (uintptr_t)data;
    if (bytes == 0 || address - arena.begin >= arena.bytes) {
        return;
    }
    for (uintptr_t at = address; at < address + bytes; at += page - at % page) {
        check_home(at);
    }
    open_memory(data, bytes);
    each_word(cells, arena.begin, address, bytes, writes);
}

void
check_release(const void *data, size_t bytes, const char *name, const clock *at)
{
    seen_by_it = at == NULL ? seen_by_it : *at;
    const uintptr_t first = ((uintptr_t)data - arena.begin) / word;
    for (size_t i = 0; i < (bytes + word - 1) / word; i++) {
        const cell &it = cells[first + i];
        static_assert(word == 4, "every read");
        for (access one :
             {it.written, it.read[0], it.read[1], it.read[2], it.read[3]}) {
            if (!one.is_none() && !is_behind(one)) {
                die("%s of memory that %s on stream %u uses, and nothing orders them",
                    name, name_of(one), operations[one.operation].stream);
            }
        }
    }
}

void
set_home(const void *data, size_t bytes, int device)
{
    const size_t first = ((uintptr_t)data - arena.begin) / page;
    const size_t pages = (bytes + page - 1) / page, words = page / word;
    memset(&homes[first], device + 1, pages);
    if (device < 0) {
        madvise(&cells[first * words], pages * words * sizeof(cell), MADV_DONTNEED);
    }
}

#endif

} // namespace emul

#ifndef __SANITIZE_ADDRESS__
extern "C" {

#define CT_ACCESS(bytes)                                                               \
    void __tsan_read##bytes(void *data)                                                \
    {                                                                                  \
        emul::check_access(data, bytes, false);                                        \
    }                                                                                  \
    void __tsan_write##bytes(void *data)                                               \
    {                                                                                  \
        emul::check_access(data, bytes, true);                                         \
    }                                                                                  \
    void __tsan_unaligned_read##bytes(void *data)                                      \
    {                                                                                  \
        emul::check_access(data, bytes, false);                                        \
    }                                                                                  \
    void __tsan_unaligned_write##bytes(void *data)                                     \
    {                                                                                  \
        emul::check_access(data, bytes, true);                                         \
    }
CT_ACCESS(1)
CT_ACCESS(2)
CT_ACCESS(4)
CT_ACCESS(8)
CT_ACCESS(16)

void
__tsan_read_range(void *data, size_t bytes)
{
    emul::check_access(data, bytes, false);
}

void
__tsan_write_range(void *data, size_t bytes)
{
    emul::check_access(data, bytes, true);
}

void
__tsan_func_entry(void *)
{
}

void
__tsan_func_exit(void)
{
}

void
__tsan_init(void)
{
}

} // extern "C"
#endif
