/* Hooks of every age: calls with the keywords that a signature accepts. */
#ifndef BINDING_ENGINE_ADAPT_H
#define BINDING_ENGINE_ADAPT_H

#include "binding/runtime/ctpy.h"

/* op.name(*args, **keywords): the hook of that name, by attribute lookup, so that an
 * override wins. args holds nargs positional values and then one for each name of the
 * tuple kwnames (NULL for none), at most CTPY_HOOK_MAX_ARGS in all. A keyword that the
 * override does not accept is left out, so that overrides for older releases run too.
 * Returns a new reference or NULL. */
PyObject *ctpy_call_adapted(PyObject *op, PyObject *name, PyObject *const *args,
                            size_t nargs, PyObject *kwnames);

/* The adapter of the model's framework, a new reference; NULL with an exception for a
 * trainer that has none yet. */
PyObject *ctpy_adapter(PyObject *op);

/* adapter.name(*args): what only the framework can do. */
PyObject *
ctpy_ask_adapter(PyObject *op, PyObject *name, PyObject *const *args, size_t n);

/* Enters compute_loss_context_manager(); *context is the context to leave, or NULL
 * without an override. Returns 0, or -1 with an exception. */
int ctpy_enter_loss_context(PyObject *op, PyObject **context);

/* model.train(), and the optimizer's, unless `model` and op.model are in that mode
 * already: the question costs 80 ns, the change walks all modules. 0 or -1. */
int ctpy_ensure_train_mode(PyObject *op, PyObject *model);

#endif
