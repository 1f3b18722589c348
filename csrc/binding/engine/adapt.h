/* Hooks of every age: calls with the keywords that a signature accepts. */
#ifndef BINDING_ENGINE_ADAPT_H
#define BINDING_ENGINE_ADAPT_H

#include "binding/runtime/ctpy.h"

/* op.name(*args, **keywords): the hook of that name, by attribute lookup, so that an
 * override wins. args holds nargs positional values and then one for each name of the
 * tuple kwnames (NULL for none), at most CTPY_HOOK_MAX_ARGS in all. A keyword that the
 * override does not accept is left out, so that those written for older releases run
 * too. Returns a new reference or NULL. */
PyObject *ctpy_call_adapted(PyObject *op, PyObject *name, PyObject *const *args,
                            size_t nargs, PyObject *kwnames);

#endif
