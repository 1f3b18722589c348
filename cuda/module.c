/* Module ctrainer._cuda: exports the CUDA device to ctrainer._C.
 *
 * The only file of cuda/ with Python. Importing the module needs no driver and no GPU:
 * the runtime is linked in and looks for the driver at its first use. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "comm_nccl.h"
#include "cublas.h"
#include "dynlib.h"
#include "kernels.h"
#include "nccl.h"
#include "status.h"

/* Of Linux, for CUDA 13.0: CUDA's release notes, table 3. */
#define OLDEST_DRIVER "580.65"

static const ct_plugin plugin = {
    .version = CT_DEVICE_VERSION,
    .device = &ct_device_cuda,
    .comm_id = ct_nccl_id,
    .comm_join = ct_nccl_join,
};

static PyObject *
raise_device_error(const ct_error *err)
{
    PyErr_SetString(err->code == CT_ENOMEM ? PyExc_MemoryError : PyExc_RuntimeError,
                    err->message);
    return NULL;
}

/* cudaGetDeviceCount fails without a driver or a device; both mean none. */
static cudaError_t
count_devices(int *count)
{
    const cudaError_t result = cudaGetDeviceCount(count);
    if (result != cudaSuccess) {
        *count = 0;
        /* The runtime remembers the error, and a later check would report it as another
         * call's. */
        (void)cudaGetLastError();
    }
    return result;
}

PyDoc_STRVAR(cuda_device_count_doc,
             "device_count($module, /)\n--\n\n"
             "How many CUDA devices this process can use; 0 without a driver.");

static PyObject *
cuda_device_count(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    int count;
    (void)count_devices(&count);
    return PyLong_FromLong(count);
}

PyDoc_STRVAR(cuda_why_no_device_doc,
             "why_no_device($module, /)\n--\n\n"
             "Say why device_count() is 0, or return None when it is not.");

static PyObject *
cuda_why_no_device(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    int count, driver = 0;
    const cudaError_t result = count_devices(&count);
    if (count > 0) {
        Py_RETURN_NONE;
    }
    /* 0 means no driver, with success as the result. */
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
        return PyUnicode_FromString("no NVIDIA driver is installed");
    }
    return PyUnicode_FromFormat(
        "CUDA %d.%d, which ctrainer was built with, finds no device under a driver for "
        "CUDA %d.%d: %s. It needs driver %s or newer",
        CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, driver / 1000,
        driver % 1000 / 10, cudaGetErrorString(result), OLDEST_DRIVER);
}

/* Sets dict[name] to "major.minor", or to None when version is 0. */
static int
set_version(PyObject *dict, const char *name, int version, int major, int minor)
{
    PyObject *text = version == 0 ? Py_NewRef(Py_None)
                                  : PyUnicode_FromFormat("%d.%d", version / major,
                                                         version % major / minor);
    if (text == NULL) {
        return -1;
    }
    const int result = PyDict_SetItemString(dict, name, text);
    Py_DECREF(text);
    return result;
}

PyDoc_STRVAR(
    cuda_versions_doc,
    "versions($module, /)\n--\n\n"
    "Versions as \"major.minor\": of the runtime that is linked in, and of the\n"
    "driver, cublas and nccl that this process finds; None for one that is "
    "missing.");

static PyObject *
cuda_versions(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    int driver = 0, cublas = 0, nccl = 0;
    (void)cudaDriverGetVersion(&driver);
    /* A missing library is an answer here and no error. */
    if (ct_cublas_version(&cublas, NULL) != CT_OK) {
        cublas = 0;
    }
    if (ct_nccl_version(&nccl, NULL) != CT_OK) {
        nccl = 0;
    }
    PyObject *dict = PyDict_New();
    if (dict == NULL || set_version(dict, "runtime", CUDART_VERSION, 1000, 10) < 0 ||
        set_version(dict, "driver", driver, 1000, 10) < 0 ||
        set_version(dict, "cublas", cublas, 10000, 100) < 0 ||
        set_version(dict, "nccl", nccl, 10000, 100) < 0) {
        Py_XDECREF(dict);
        return NULL;
    }
    return dict;
}

PyDoc_STRVAR(
    cuda_comm_id_doc,
    "comm_id($module, /)\n--\n\n"
    "Make the id of a new NCCL group: 128 bytes that every rank has to get.\n\n"
    "Raises RuntimeError when NCCL cannot be found, and says where it looked.");

static PyObject *
cuda_comm_id(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    char id[CT_COMM_ID_BYTES];
    ct_error err;
    ct_status status;
    /* The first call opens NCCL, which takes a while. */
    Py_BEGIN_ALLOW_THREADS
    status = ct_nccl_id(id, &err);
    Py_END_ALLOW_THREADS
    return status == CT_OK ? PyBytes_FromStringAndSize(id, sizeof id)
                           : raise_device_error(&err);
}

/* The strings in sys.path as file names. NULL with an exception, or the new list that
 * owns the strings of folders[0 .. *n). */
static PyObject *
encode_path(const char **folders, Py_ssize_t capacity, size_t *n)
{
    PyObject *path = PySys_GetObject("path"); /* borrowed */
    PyObject *owner = PyList_New(0);
    *n = 0;
    if (owner == NULL || path == NULL || !PyList_Check(path)) {
        return owner;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(path) && i < capacity; i++) {
        PyObject *entry = PyList_GetItem(path, i);
        PyObject *bytes =
            PyUnicode_Check(entry) ? PyUnicode_EncodeFSDefault(entry) : NULL;
        if (bytes == NULL && PyErr_Occurred() &&
            PyErr_ExceptionMatches(PyExc_MemoryError)) {
            Py_DECREF(owner);
            return NULL;
        }
        if (bytes == NULL) { /* not a folder's name: nothing to look below */
            PyErr_Clear();
            continue;
        }
        folders[(*n)++] = PyBytes_AsString(bytes);
        const int failed = PyList_Append(owner, bytes);
        Py_DECREF(bytes);
        if (failed) {
            Py_DECREF(owner);
            return NULL;
        }
    }
    return owner;
}

PyDoc_STRVAR(cuda_find_libraries_doc,
             "find_libraries($module, /)\n--\n\n"
             "Look for cuBLAS and NCCL below the folders that sys.path names now.\n\n"
             "The import does this once; call it again after changing sys.path.");

static PyObject *
cuda_find_libraries(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    const char *folders[256];
    size_t n;
    ct_error err;
    PyObject *owner = encode_path(folders, sizeof folders / sizeof folders[0], &n);
    if (owner == NULL) {
        return NULL;
    }
    const ct_status status = ct_dynlib_set_path(folders, n, &err);
    /* The folders' names were copied. */
    Py_DECREF(owner);
    if (status != CT_OK) {
        return raise_device_error(&err);
    }
    Py_RETURN_NONE;
}

/* The runtime that is linked in needs a driver of its own major version: warns of an
 * older one, and returns 1. */
static int
has_old_driver(void)
{
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0 ||
        driver / 1000 >= CUDART_VERSION / 1000) {
        return 0;
    }
    return PyErr_WarnFormat(
               PyExc_RuntimeWarning, 1,
               "NVIDIA's driver is for CUDA %d.%d, and ctrainer's plugin for GPUs "
               "needs one for CUDA %d: update the driver to %s or newer. Until then "
               "torch alone works on the GPU",
               driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
               OLDEST_DRIVER) < 0
               ? -1
               : 1;
}

/* Asks torch to empty its cache. The calling thread may have the GIL or not. */
static bool
free_torchs_cache(void)
{
    const PyGILState_STATE held = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *name = PyUnicode_FromString("torch");
    PyObject *torch = name == NULL ? NULL : PyImport_GetModule(name);
    PyObject *allocator =
        torch == NULL ? NULL : PyObject_GetAttrString(torch, "accelerator");
    PyObject *done = NULL;
    if (allocator != NULL && !PyObject_HasAttrString(allocator, "empty_cache")) {
        Py_DECREF(allocator); /* before torch 2.9 */
        allocator = PyObject_GetAttrString(torch, "cuda");
    }
    if (allocator != NULL) {
        done = PyObject_CallMethod(allocator, "empty_cache", NULL);
    }
    const bool freed = done != NULL;
    Py_XDECREF(done);
    Py_XDECREF(allocator);
    Py_XDECREF(torch);
    Py_XDECREF(name);
    PyErr_Restore(type, value, traceback); /* the caller says what was to be stored */
    PyGILState_Release(held);
    return freed;
}

/* sys.path is Python's, so the folders are passed on here: the rest of cuda/ has no
 * Python. */
static int
module_exec(PyObject *module)
{
    PyObject *done = cuda_find_libraries(module, NULL);
    if (done == NULL) {
        return -1;
    }
    Py_DECREF(done);
    const int old = has_old_driver();
    if (old != 0) { /* without tables, tensors on a GPU are left to torch */
        return old < 0 ? -1 : PyModule_AddObjectRef(module, "plugin", Py_None);
    }
    /* No destructor: the table is static. */
    PyObject *capsule = PyCapsule_New((void *)&plugin, CT_PLUGIN_CAPSULE, NULL);
    if (capsule == NULL) {
        return -1;
    }
    ct_cuda_free_kept = free_torchs_cache;
    const int result = PyModule_AddObjectRef(module, "plugin", capsule);
    Py_DECREF(capsule);
    return result;
}

static PyMethodDef module_functions[] = {
    {"comm_id",        cuda_comm_id,        METH_NOARGS, cuda_comm_id_doc       },
    {"device_count",   cuda_device_count,   METH_NOARGS, cuda_device_count_doc  },
    {"find_libraries", cuda_find_libraries, METH_NOARGS, cuda_find_libraries_doc},
    {"versions",       cuda_versions,       METH_NOARGS, cuda_versions_doc      },
    {"why_no_device",  cuda_why_no_device,  METH_NOARGS, cuda_why_no_device_doc },
    {NULL,             NULL,                0,           NULL                   },
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0,           NULL       },
};

static PyModuleDef cuda_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ctrainer._cuda",
    .m_doc = "The CUDA device, as a plugin of ctrainer._C.",
    .m_methods = module_functions,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__cuda(void)
{
    return PyModuleDef_Init(&cuda_module);
}
