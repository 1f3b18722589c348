#define _GNU_SOURCE /* syscall */
#include "cpu/amx.h"

#ifdef CT_HAVE_AMX

#include <cpuid.h>
#include <immintrin.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AMX __attribute__((target("amx-tile,amx-bf16")))

enum {
    HALF = CT_BLOCK / 2,
    TILE = HALF * CT_BLOCK,    /* elements of a tile of either factor */
    TILE_BYTES = 2 * CT_BLOCK, /* of a row of any tile */
    SUMS_BYTES = 4 * CT_BLOCK  /* of a row of sums */
};

/* Tiles 0 to 3 hold the sums, 4 and 5 rows of a, 6 and 7 columns of b. A static object,
 * because GCC takes _tile_loadconfig to read no more than 8 bytes of it. */
static const struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} config = {
    .palette = 1,
    .row_bytes = {TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES,
                  TILE_BYTES,                                                       TILE_BYTES, TILE_BYTES},
    .rows = {HALF,       HALF,       HALF,       HALF,       HALF,       HALF, HALF,       HALF      },
};

AMX void
ct_amx_begin(void)
{
    _tile_loadconfig(&config);
}

AMX void
ct_amx_end(void)
{
    _tile_release();
}

AMX void
ct_amx_multiply(const uint16_t *a, const uint16_t *b, size_t n_panels, float *sums)
{
    float *const below = sums + HALF * CT_BLOCK;
    _tile_loadd(0, sums, SUMS_BYTES);
    _tile_loadd(1, sums + HALF, SUMS_BYTES);
    _tile_loadd(2, below, SUMS_BYTES);
    _tile_loadd(3, below + HALF, SUMS_BYTES);
    for (size_t panel = 0; panel < n_panels; panel++) {
        _tile_loadd(4, a, TILE_BYTES);
        _tile_loadd(6, b, TILE_BYTES);
        _tile_loadd(7, b + TILE, TILE_BYTES);
        _tile_loadd(5, a + TILE, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        a += CT_PANEL;
        b += CT_PANEL;
    }
    _tile_stored(0, sums, SUMS_BYTES);
    _tile_stored(1, sums + HALF, SUMS_BYTES);
    _tile_stored(2, below, SUMS_BYTES);
    _tile_stored(3, below + HALF, SUMS_BYTES);
}

static bool
processor_has_amx(void)
{
    enum {
        AMX_BF16 = 1 << 22,
        AMX_TILE = 1 << 24
    };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 &&
           (d & (AMX_BF16 | AMX_TILE)) == (AMX_BF16 | AMX_TILE);
}

/* Linux keeps the tiles from processes that have not asked for them. */
static bool
system_allows_amx(void)
{
    enum {
        REQUEST = 0x1023, /* ARCH_REQ_XCOMP_PERM */
        TILE_DATA = 18    /* XFEATURE_XTILEDATA */
    };
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

/* Asked for once: a virtual machine takes long to answer. Threads that look at the same
 * time find the same. */
bool
ct_amx_usable(ct_isa isa)
{
    enum {
        UNKNOWN = -1
    };
    static atomic_int answer = UNKNOWN;
    int usable = atomic_load_explicit(&answer, memory_order_relaxed);
    if (usable == UNKNOWN) {
        usable = processor_has_amx() && system_allows_amx();
        atomic_store_explicit(&answer, usable, memory_order_relaxed);
    }
    return usable && isa == CT_ISA_V4;
}

#else

bool
ct_amx_usable(ct_isa isa)
{
    (void)isa;
    return false;
}

#endif
