/* Module state, errors, locks, hooks and signals, shared by the extension types.
 *
 * The prefix ctpy_ marks helpers that need Python.h; ct_ marks the core, without
 * Python.h. */
#ifndef BINDING_RUNTIME_CTPY_H
#define BINDING_RUNTIME_CTPY_H

#include "core/base/status.h"

#include <stdbool.h>

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <signal.h> /* behind Python.h, which asks for POSIX */
#include <structmember.h>

struct ctpy_dlpack_api;

/* Per-interpreter state. Pointers to objects are strong and live as long as the
 * module. */
typedef struct ctpy_state {
#define CTPY_TYPE(name) PyTypeObject *name;
#include "binding/runtime/types.def"
#undef CTPY_TYPE
#define CTPY_NAME(name) PyObject *str_##name;
#include "binding/runtime/hooks.def"
#undef CTPY_NAME
#define CTPY_CACHED(name) PyObject *name; /* NULL until found */
#include "binding/runtime/cached.def"
#undef CTPY_CACHED
    const struct ctpy_dlpack_api *dlpack; /* torch's exchange table, or NULL */
    struct ct_grads *spare_grads;         /* of the last update, or NULL */
#define CTPY_KEYWORD(name) PyObject *kw_##name;
#include "binding/runtime/keywords.def"
#undef CTPY_KEYWORD
} ctpy_state;

extern PyModuleDef ctpy_module;

#define CTPY_TYPE(name) extern PyType_Spec name##_spec;
#include "binding/runtime/types.def"
#undef CTPY_TYPE

/* Borrows the state through the type, also for Python subclasses. With an instance at
 * hand the lookup cannot fail. */
static inline ctpy_state *
ctpy_state_borrow(PyObject *op)
{
    PyObject *module = PyType_GetModuleByDef(Py_TYPE(op), &ctpy_module);
    assert(module != NULL);
    return PyModule_GetState(module);
}

/* Raise the exception for err; return NULL, or -1, for the caller to return. CT_EHOST
 * leaves the exception of the Python callback. */
PyObject *ctpy_raise(const ct_error *err);
int ctpy_raise_int(const ct_error *err);

/* Drops what a call returned: 0, or -1 for NULL, with its exception. */
static inline int
ctpy_drop_steal(PyObject *answer)
{
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* module.name(*args) of Python, for warnings, errors and what a run does rarely: the
 * function is looked up at each call. format: of Py_BuildValue, a tuple. */
PyObject *
ctpy_call_function(const char *module, const char *name, const char *format, ...);

/* Gives the exception that is set, if it is an Exception, a note of where it was
 * raised: ctrainer.runtime.notes.locate(exception, place, facts); format: of
 * Py_BuildValue, the tuple of facts. The exception stays set. Returns NULL. */
PyObject *ctpy_locate_error(const char *place, const char *format, ...);

/* Looks an optional attribute op.name up: 1 and a new reference in *value; 0 and NULL,
 * no exception; or -1 with the exception. */
int ctpy_lookup(PyObject *op, PyObject *name, PyObject **value);

/* Looks the optional entry mapping[name] up, like ctpy_lookup. */
int ctpy_item(PyObject *mapping, const char *name, PyObject **value);

/* The value, None for NULL; borrowed. */
static inline PyObject *
ctpy_or_none(PyObject *value)
{
    return value == NULL ? Py_None : value;
}

/* n integers as a tuple; () for NULL. */
PyObject *ctpy_int64_tuple(const int64_t *values, int n);

/* Clears the current exception, if any: true. MemoryError and exceptions outside
 * Exception, such as KeyboardInterrupt, stay set: false. */
bool ctpy_forgive(void);

/* The exception that is set, taken away: a new reference. */
PyObject *ctpy_take_exception(void);

/* Sets an exception again, over any other. */
void ctpy_set_exception_steal(PyObject *value);

/* tp_traverse and tp_dealloc for instances that own no Python object but the type. */
int ctpy_leaf_traverse(PyObject *op, visitproc visit, void *arg);
void ctpy_leaf_dealloc(PyObject *op);

/* tp_dealloc for instances that own nothing but Python objects, which `clear`, the
 * type's tp_clear, releases. */
void ctpy_dealloc(PyObject *op, inquiry clear);

/* Guard an object's core struct on free-threaded builds; with a GIL they cost
 * nothing. Never `return` or call a hook between them. */
#if PY_VERSION_HEX >= 0x030d0000
#define CTPY_LOCK(op) Py_BEGIN_CRITICAL_SECTION(op)
#define CTPY_UNLOCK() Py_END_CRITICAL_SECTION()
#else
#define CTPY_LOCK(op) {
#define CTPY_UNLOCK() }
#endif

/* Enters a context manager and returns it. On an exception, or for NULL: returns NULL,
 * with the context released. */
PyObject *ctpy_enter_context_steal(PyObject *context, PyObject *enter_name);

/* Calls context.__exit__ with the current exception, or none, releases the context and
 * returns result, the body's value; NULL if the exception propagates. NULL is no
 * context. */
PyObject *
ctpy_leave_context_steal(PyObject *context, PyObject *exit_name, PyObject *result);

#define CTPY_HOOK_MAX_ARGS 11

/* Calls op.name(*args) by attribute lookup, so that a Python override wins.
 * Borrows everything; returns a new reference or NULL. A hook runs arbitrary code:
 * hold a strong reference to every object used afterwards. */
static inline PyObject *
ctpy_call_hook(PyObject *op, PyObject *name, PyObject *const *args, size_t nargs)
{
    PyObject *stack[2 + CTPY_HOOK_MAX_ARGS]; /* [0] is scratch space for vectorcall */
    assert(nargs <= CTPY_HOOK_MAX_ARGS);
    stack[1] = op;
    for (size_t i = 0; i < nargs; i++) {
        stack[2 + i] = args[i];
    }
    return PyObject_VectorcallMethod(
        name, &stack[1], (1 + nargs) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* Copies of our objects, by copy.copy(), copy.deepcopy() and pickle. */

/* What __getstate__ returns: (the instance's own attributes or None, fields). Takes
 * `fields`, a dict or NULL, over. */
PyObject *ctpy_copy_state_steal(PyObject *op, PyObject *fields);

/* Restores the instance's attributes from such a state and returns the fields,
 * borrowed; NULL with TypeError for any other state. */
PyObject *ctpy_take_copy_state_borrow(PyObject *op, PyObject *state);

/* Lets the copying methods of a type without valid copies raise, with the remedy. 0, or
 * -1. */
int ctpy_reject_copies(const ctpy_state *state);

/* Is op.name the method that our own class defines, in C or Python, not an override?
 * 1, 0 or -1. */
int ctpy_is_default(PyObject *op, PyObject *name);

/* Attribute of op as a C value. Return 0, or -1 with an exception naming the attribute.
 */
int ctpy_get_bool(PyObject *op, PyObject *name, int *value);
int ctpy_get_double(PyObject *op, PyObject *name, double *value);
int ctpy_get_int64(PyObject *op, PyObject *name, int64_t *value);
int ctpy_double_steal(PyObject *found, double *value);
int ctpy_set_int64(PyObject *op, PyObject *name, int64_t value);
int ctpy_set_double(PyObject *op, PyObject *name, double value);

/* The attribute, a new reference; NULL without an exception: none. */
PyObject *ctpy_get_optional(PyObject *op, PyObject *name, int *failed);

/* The truth of the attribute; false if missing. */
int ctpy_get_flag(PyObject *op, PyObject *name, bool *value);

/* op.outer.name, a new reference or as a C value: a field of args, state or control. */
PyObject *ctpy_field_object(PyObject *op, PyObject *outer, PyObject *name);
int ctpy_field_bool(PyObject *op, PyObject *outer, PyObject *name, int *value);
int ctpy_field_int64(PyObject *op, PyObject *outer, PyObject *name, int64_t *value);

/* ---- Ctrl-C and SIGTERM while training ------------------------------------------- */

typedef struct ctpy_signals {
    struct sigaction on_int, on_term; /* the previous handlers */
    bool installed;
} ctpy_signals;

/* Replaces the handlers of SIGINT and SIGTERM by a handler that sets a flag. For the
 * main thread alone; *saved starts as {0}. */
void ctpy_signals_install(ctpy_signals *saved);

/* Puts the old handlers back and returns the signal that arrived meanwhile, or 0. */
int ctpy_signals_restore(ctpy_signals *saved);

/* The signal that arrived since install, or 0. */
int ctpy_signal_requested(void);

/* Sets the flag as for that signal, unless it is set; 0: does nothing. */
void ctpy_signal_request(int number);

/* True after Ctrl-C or SIGTERM: the run should end. Long loops check it between
 * batches. */
static inline bool
ctpy_stop_requested(void)
{
    return ctpy_signal_requested() != 0;
}

#endif
