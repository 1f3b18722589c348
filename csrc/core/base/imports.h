/* Functions that a shared library imports from another. */
#ifndef CORE_BASE_IMPORTS_H
#define CORE_BASE_IMPORTS_H

#include "core/base/decls.h"

#include <stdbool.h>

CT_BEGIN_DECLS

typedef void ct_function(void);

/* Replaces the function in the loaded library of that file name, for the life of the
 * process, in every place with an address from the dynamic linker. Returns
 * false if the library is not loaded, does not import the function, or is of another
 * processor than x86-64 and AArch64. */
bool
ct_import_replace(const char *library, const char *function, ct_function *replacement);

CT_END_DECLS

#endif
