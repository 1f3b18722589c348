/* C linkage of the core's functions in the C++ of the CUDA plugin, as in <sys/cdefs.h>.
 */
#ifndef CORE_BASE_DECLS_H
#define CORE_BASE_DECLS_H

#ifdef __cplusplus
#define CT_BEGIN_DECLS extern "C" {
#define CT_END_DECLS }
#else
#define CT_BEGIN_DECLS
#define CT_END_DECLS
#endif

#endif
