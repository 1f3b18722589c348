/* Matrix products by the BLAS that is in the process already: NumPy's OpenBLAS. */
#ifndef CT_CPU_BLAS_H
#define CT_CPU_BLAS_H

#include "core/device/device.h"

/* Does the product and returns true, or returns false where no BLAS is loaded. The
 * operands have been checked. Runs on that library's own threads. */
bool ct_blas_gemm(const ct_gemm *gemm);

#endif
