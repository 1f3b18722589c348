/* Matrix products in bfloat16 on the CPU. */
#ifndef CT_CPU_GEMM_BF16_H
#define CT_CPU_GEMM_BF16_H

#include "cpu/isa.h"

#include "core/ct_device.h"

/* A checked product of CT_BF16, by the processor's instructions for bfloat16, or in
 * float32 where it has none. CT_ENOMEM when the scratch cannot grow. */
CT_NODISCARD ct_status ct_cpu_gemm_bf16(ct_isa isa, ct_scratch *scratch,
                                        const ct_gemm *gemm, ct_error *err);

/* A checked product of CT_F32 or CT_F64, by the BLAS that is loaded or our own. */
void ct_cpu_gemm_real(ct_isa isa, const ct_gemm *gemm);

#endif
