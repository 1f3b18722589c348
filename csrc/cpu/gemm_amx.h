/* Matrix products in bfloat16 by the tiles of AMX (cpu/amx.h). */
#ifndef CT_CPU_GEMM_AMX_H
#define CT_CPU_GEMM_AMX_H

#include "core/ct_device.h"

/* A checked product of CT_BF16, where tiles are usable. CT_ENOMEM when the scratch
 * cannot grow. */
CT_NODISCARD ct_status ct_cpu_gemm_amx(ct_scratch *scratch, const ct_gemm *gemm,
                                       ct_error *err);

#endif
