#include "core/base/interrupt.h"

#include <stdatomic.h>
#include <stddef.h>

static _Atomic(ct_interrupt_fn *) asked;

void
ct_interrupt_set(ct_interrupt_fn *fn)
{
    atomic_store(&asked, fn);
}

bool
ct_interrupted(void)
{
    ct_interrupt_fn *fn = atomic_load(&asked);
    return fn != NULL && fn();
}
