/* What belongs to the whole process: threads, instruction set, the C allocator. */
#include "binding/runtime/ctpy.h"
#include "core/device/device.h"
#include "core/base/mapping.h"
#include "core/base/pool.h"

#include <stdint.h>

static const char ctpy_get_num_threads_doc[] =
    "get_num_threads($module, /)\n--\n\n"
    "Return how many threads work on an update, the caller included.";

static PyObject *
ctpy_get_num_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    return PyLong_FromSize_t(ct_pool_threads());
}

static const char ctpy_set_num_threads_doc[] =
    "set_num_threads($module, n, /)\n--\n\n"
    "Let n threads, 1 to 256, work on an update; results do not depend on it.\n\n"
    "The default is the number of processors that the process may use, or\n"
    "CTRAINER_NUM_THREADS, or OMP_NUM_THREADS.";

static PyObject *
ctpy_set_num_threads(PyObject *Py_UNUSED(module), PyObject *arg)
{
    ct_status status;
    ct_error err;
    Py_ssize_t n = PyNumber_AsSsize_t(arg, PyExc_OverflowError);
    if (n == -1 && PyErr_Occurred()) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = ct_pool_set_threads(n < 0 ? 0 : (size_t)n, &err);
    Py_END_ALLOW_THREADS
    if (status != CT_OK) {
        return ctpy_raise(&err);
    }
    Py_RETURN_NONE;
}

static const char ctpy_cpu_isa_doc[] =
    "cpu_isa($module, /)\n--\n\n"
    "Return the instruction set of the kernels: 'base', 'v3' (AVX2) or 'v4' (AVX-512).";

static PyObject *
ctpy_cpu_isa(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    return PyUnicode_FromString(ct_cpu_isa());
}

static const char ctpy_set_cpu_isa_doc[] =
    "set_cpu_isa($module, name, /)\n--\n\n"
    "Use the kernels of that instruction set; results are the same bits on each.\n\n"
    "The default is the best that the processor has, or CTRAINER_ISA. Raises\n"
    "ValueError where the processor lacks it. Not while a step is under way.";

static PyObject *
ctpy_set_cpu_isa(PyObject *Py_UNUSED(module), PyObject *arg)
{
    ct_error err;
    const char *name = PyUnicode_AsUTF8(arg);
    if (name == NULL) {
        return NULL;
    }
    if (ct_cpu_set_isa(name, &err) != CT_OK) {
        return ctpy_raise(&err);
    }
    Py_RETURN_NONE;
}

enum {
    INITIAL_KEPT = 128 * 1024, /* of glibc */
    TUNED_KEPT = 1 << 30,
    ENDS_KEPT = 64 /* times as much as of a block, at the end of the heap */
};

static const char ctpy_malloc_tune_doc[] =
    "malloc_tune($module, enable, /)\n--\n\n"
    "Keep freed blocks of up to 1 GiB in the process instead of returning them.\n\n"
    "glibc maps blocks above 128 KiB anew each time and faults their pages in, which\n"
    "costs a training step on the CPU about a sixth of its time. This sets\n"
    "M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of the whole process; False goes back to\n"
    "glibc's initial values, which from then on no longer adapt. Where the user has\n"
    "set MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ nothing is changed. Returns\n"
    "whether the setting was applied: False without glibc.";

static PyObject *
ctpy_malloc_tune(PyObject *Py_UNUSED(module), PyObject *arg)
{
    int enable = PyObject_IsTrue(arg);
    const size_t kept = enable > 0 ? TUNED_KEPT : INITIAL_KEPT;
    return enable < 0 ? NULL : PyBool_FromLong(ct_malloc_keep(kept, kept));
}

static const char ctpy_malloc_keep_doc[] =
    "malloc_keep($module, nbytes, /)\n--\n\n"
    "Keep freed blocks of up to nbytes, return longer ones to the system.\n\n"
    "A middle way between malloc_tune(True) and (False). Whether it was applied; see\n"
    "there. Raises ValueError for nbytes below 1.";

static PyObject *
ctpy_malloc_keep(PyObject *Py_UNUSED(module), PyObject *arg)
{
    const size_t kept = PyLong_AsSize_t(arg);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (kept < 1 || kept > SIZE_MAX / ENDS_KEPT) {
        return PyErr_Format(PyExc_ValueError,
                            "nbytes must be at least 1 and at most %zu, got %zu",
                            SIZE_MAX / ENDS_KEPT, kept);
    }
    return PyBool_FromLong(ct_malloc_keep(kept, kept * ENDS_KEPT));
}

PyMethodDef ctpy_runtime_process_functions[] = {
    {"cpu_isa",         ctpy_cpu_isa,         METH_NOARGS, ctpy_cpu_isa_doc        },
    {"get_num_threads", ctpy_get_num_threads, METH_NOARGS, ctpy_get_num_threads_doc},
    {"malloc_keep",     ctpy_malloc_keep,     METH_O,      ctpy_malloc_keep_doc    },
    {"malloc_tune",     ctpy_malloc_tune,     METH_O,      ctpy_malloc_tune_doc    },
    {"set_cpu_isa",     ctpy_set_cpu_isa,     METH_O,      ctpy_set_cpu_isa_doc    },
    {"set_num_threads", ctpy_set_num_threads, METH_O,      ctpy_set_num_threads_doc},
    {NULL,              NULL,                 0,           NULL                    },
};
