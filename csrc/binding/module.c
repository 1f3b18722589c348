/* Module ctrainer._C: creates the types and owns the per-interpreter state. */
#include "binding/optim/optim.h"
#include "binding/runtime/ctpy.h"

#include "cpu/kernels.h"
#include "core/base/wait.h"
#include "core/base/pool.h"

#include <stdlib.h>

#define DEFAULT_STALL_SECONDS 180.0

/* Types from specs belong to one interpreter, so the module can be imported in
 * several. */
static int
add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot)
{
    *slot = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *slot == NULL ? -1 : PyModule_AddType(module, *slot);
}

static int
intern(const char *name, PyObject **slot)
{
    *slot = PyUnicode_InternFromString(name);
    return *slot == NULL ? -1 : 0;
}

/* Called by threads that wait without the GIL. */
static void
report_stall(const char *text)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    PySys_WriteStderr("ctrainer: %.500s\n", text);
    PyGILState_Release(gil);
}

/* CTRAINER_STALL_SECONDS. 0, or -1 with an exception. */
static int
read_stall_seconds(void)
{
    const char *given = getenv("CTRAINER_STALL_SECONDS");
    char *end = NULL;
    const double seconds = given == NULL ? DEFAULT_STALL_SECONDS : strtod(given, &end);
    if (!(seconds > 0.0) || (end != NULL && *end != '\0')) {
        PyErr_Format(PyExc_ValueError,
                     "CTRAINER_STALL_SECONDS is '%.100s'; expected seconds above 0",
                     given);
        return -1;
    }
    ct_stall_set(report_stall, seconds);
    return 0;
}

/* The environment's wishes are checked on import, where an error can be raised. */
static int
check_environment(void)
{
    ct_error err;
    size_t threads;
    ct_status status = ct_cpu_set_isa(NULL, &err);
    if (status == CT_OK) {
        status = ct_pool_default_threads(&threads, &err);
    }
    return status == CT_OK ? read_stall_seconds() : ctpy_raise_int(&err);
}

/* Asked by threads that wait for other processes without the GIL; leaves what the
 * handler raised. Python runs handlers on the main thread alone. */
static bool
is_interrupted(void)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    const bool raised = PyErr_CheckSignals() < 0;
    PyGILState_Release(gil);
    return raised;
}

#define CTPY_METHODS(type, name) extern PyMethodDef type##_##name##_methods[];
#include "binding/runtime/methods.def"
#undef CTPY_METHODS
#define CTPY_FUNCTIONS(name) extern PyMethodDef ctpy_##name##_functions[];
#include "binding/runtime/functions.def"
#undef CTPY_FUNCTIONS

/* Methods of a type from another file than that of its spec: a type of several files
 * has a table in each, and no list of all their functions. */
static int
add_methods(PyTypeObject *type, PyMethodDef *methods)
{
    int result = 0;
    for (PyMethodDef *m = methods; result == 0 && m->ml_name != NULL; m++) {
        PyObject *method = PyDescr_NewMethod(type, m);
        result = method == NULL
                     ? -1
                     : PyObject_SetAttrString((PyObject *)type, m->ml_name, method);
        Py_XDECREF(method);
    }
    return result;
}

/* A failure needs no cleanup here: the module is released, and module_clear drops
 * whatever was set. */
static int
module_exec(PyObject *module)
{
    if (check_environment() < 0) {
        return -1;
    }
    /* Once a process would do; every interpreter sets the same functions. */
    ct_interrupt_set(is_interrupted);
    ct_cpu_use_blas(ctpy_torch_gemm);
    ctpy_state *state = PyModule_GetState(module);
#define CTPY_NAME(name)                                                                \
    if (intern(#name, &state->str_##name) < 0) {                                       \
        return -1;                                                                     \
    }
#include "binding/runtime/hooks.def"
#undef CTPY_NAME
#define CTPY_KEYWORD(name)                                                             \
    if ((state->kw_##name = Py_BuildValue("(s)", #name)) == NULL) {                    \
        return -1;                                                                     \
    }
#include "binding/runtime/keywords.def"
#undef CTPY_KEYWORD
#define CTPY_TYPE(name)                                                                \
    if (add_type(module, &name##_spec, &state->name) < 0) {                            \
        return -1;                                                                     \
    }
#include "binding/runtime/types.def"
#undef CTPY_TYPE
#define CTPY_METHODS(type, name)                                                       \
    if (add_methods(state->type, type##_##name##_methods) < 0) {                       \
        return -1;                                                                     \
    }
#include "binding/runtime/methods.def"
#undef CTPY_METHODS
#define CTPY_FUNCTIONS(name)                                                           \
    if (PyModule_AddFunctions(module, ctpy_##name##_functions) < 0) {                  \
        return -1;                                                                     \
    }
#include "binding/runtime/functions.def"
#undef CTPY_FUNCTIONS
    return ctpy_optim_intern(state) < 0 ? -1 : ctpy_reject_copies(state);
}

/* Types hold the module and the module its types: only the collector ends this
 * cycle. */
static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    ctpy_state *state = PyModule_GetState(module);
#define CTPY_TYPE(name) Py_VISIT(state->name);
#include "binding/runtime/types.def"
#undef CTPY_TYPE
#define CTPY_NAME(name) Py_VISIT(state->str_##name);
#include "binding/runtime/hooks.def"
#undef CTPY_NAME
#define CTPY_CACHED(name) Py_VISIT(state->name);
#include "binding/runtime/cached.def"
#undef CTPY_CACHED
#define CTPY_KEYWORD(name) Py_VISIT(state->kw_##name);
#include "binding/runtime/keywords.def"
#undef CTPY_KEYWORD
    return 0;
}

static int
module_clear(PyObject *module)
{
    ctpy_state *state = PyModule_GetState(module);
#define CTPY_TYPE(name) Py_CLEAR(state->name);
#include "binding/runtime/types.def"
#undef CTPY_TYPE
#define CTPY_NAME(name) Py_CLEAR(state->str_##name);
#include "binding/runtime/hooks.def"
#undef CTPY_NAME
#define CTPY_CACHED(name) Py_CLEAR(state->name);
#include "binding/runtime/cached.def"
#undef CTPY_CACHED
#define CTPY_KEYWORD(name) Py_CLEAR(state->kw_##name);
#include "binding/runtime/keywords.def"
#undef CTPY_KEYWORD
    return 0;
}

static void
module_free(void *module)
{
    (void)module_clear(module);
    ctpy_grads_free_spare(PyModule_GetState(module));
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0,           NULL       },
};

PyModuleDef ctpy_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ctrainer._C",
    .m_doc = "Native trainer types.",
    .m_size = sizeof(ctpy_state),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__C(void)
{
    return PyModuleDef_Init(&ctpy_module);
}
