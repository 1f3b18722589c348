/* Tensors and arrays to spans, without importing torch or NumPy, the kernels for their
 * memory, and batches of them nested in tuples, lists and mappings.
 *
 * torch's types are found through sys.modules, so a process without torch never pays
 * for torch. NumPy arrays are read through the structure fixed by NumPy's ABI, without
 * NumPy's table of functions. A torch tensor is read through torch's exchange table
 * (from 2.10 on), at about 50 ns a gradient, or through Python methods, at some
 * microseconds. */
#include "binding/runtime/buffer.h"

#include "core/base/pages.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/ndarraytypes.h>

/* "param_groups[0]['params'][3].grad" as a new string. */
static PyObject *
ctpy_place_text(const ctpy_place *place)
{
    if (place->group < 0) {
        return PyUnicode_FromString(place->what);
    }
    return PyUnicode_FromFormat("param_groups[%zd]['params'][%zd]%s", place->group,
                                place->index, place->what);
}

/* module.name if the module is imported and has it; NULL without an exception if not.
 * A half-imported module simply has nothing yet. */
static PyObject *
find_object(const char *module_name, const char *name)
{
    PyObject *found = NULL, *key = PyUnicode_FromString(module_name);
    PyObject *module = key == NULL ? NULL : PyImport_GetModule(key);
    if (module != NULL) {
        found = PyObject_GetAttrString(module, name);
    }
    /* A missing or half-imported module is no error here; running out of memory is. */
    if (found == NULL) {
        (void)ctpy_forgive();
    }
    Py_XDECREF(module);
    Py_XDECREF(key);
    return found;
}

/* torch.Tensor's exchange table, or NULL without a readable table. */
static const ctpy_dlpack_api *
ctpy_exchange_table(PyObject *tensor_type)
{
    const ctpy_dlpack_api *api = NULL;
    PyObject *capsule =
        PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    if (capsule != NULL) {
        api = PyCapsule_GetPointer(capsule, CTPY_DLPACK_CAPSULE);
        Py_DECREF(capsule);
    }
    if (api == NULL) {
        (void)ctpy_forgive(); /* an older torch: addresses come from data_ptr() */
    }
    /* A newer torch may chain older tables behind its own; another major version has
     * another layout. */
    while (api != NULL && api->major != CTPY_DLPACK_MAJOR) {
        api = api->older;
    }
    return api != NULL && api->tensor_from_object != NULL ? api : NULL;
}

/* Looks up the types that are imported by now. Returns -1 only when out of memory. */
static int
find_types(ctpy_state *state)
{
    if (state->numpy_ndarray == NULL) {
        state->numpy_ndarray = find_object("numpy", "ndarray");
    }
    if (state->torch_tensor == NULL && !PyErr_Occurred()) {
        PyObject *parameter = find_object("torch.nn", "Parameter");
        PyObject *tensor = parameter == NULL ? NULL : find_object("torch", "Tensor");
        if (tensor != NULL) {
            state->dlpack = ctpy_exchange_table(tensor);
        }
        /* Both types or none: a half-imported torch is looked up again at the next
         * tensor. */
        if (tensor != NULL && !PyErr_Occurred()) {
            Py_XSETREF(state->torch_parameter, Py_NewRef(parameter));
            state->torch_tensor = Py_NewRef(tensor);
        }
        Py_XDECREF(tensor);
        Py_XDECREF(parameter);
    }
    return PyErr_Occurred() ? -1 : 0;
}

int
ctpy_is_torch_tensor(ctpy_state *state, PyObject *op)
{
    /* The usual case costs one comparison. */
    if (Py_IS_TYPE(op, (PyTypeObject *)state->torch_tensor)) {
        return 1;
    }
    if (state->torch_tensor == NULL && find_types(state) < 0) {
        return -1;
    }
    return state->torch_tensor == NULL ? 0
                                       : PyObject_IsInstance(op, state->torch_tensor);
}

/* What is wrong with an object. */
typedef enum ctpy_problem {
    CTPY_PROBLEM_NONE,
    CTPY_PROBLEM_ADDRESS, /* torch has none to give; an exception may be set */
    CTPY_PROBLEM_TYPE,
    CTPY_PROBLEM_DEVICE,
    CTPY_PROBLEM_DTYPE,
    CTPY_PROBLEM_STRIDES,
    CTPY_PROBLEM_STORAGE
} ctpy_problem;

/* What is common to all: a dtype that we have, memory, order and alignment. */
static ctpy_problem
ctpy_span_check(const ct_span *span, int contiguous)
{
    if (span->dtype == CT_DTYPE_COUNT) {
        return CTPY_PROBLEM_DTYPE;
    }
    if (span->n > 0 && span->data == NULL) {
        return CTPY_PROBLEM_STORAGE;
    }
    return contiguous && (uintptr_t)span->data % ct_dtype_size(span->dtype) == 0
               ? CTPY_PROBLEM_NONE
               : CTPY_PROBLEM_STRIDES;
}

/* ---- errors ---------------------------------------------------------------------- */

/* A problem's message: the exception, the quoted attribute of the object, and the
 * sentence, with %U for the place and %S for the attribute. */
typedef struct message {
    PyObject *type;
    const char *attribute, *format;
} message;

static message
message_of(ctpy_problem what)
{
    switch (what) {
    case CTPY_PROBLEM_DEVICE:
        return (message){PyExc_ValueError, "device",
                         "%U is on device %S; expected cpu, or a GPU where the plugin "
                         "is installed (pip install 'ctrainer[cuda13]') and this "
                         "takes its tensors: move it with .cpu(), or use torch.optim "
                         "with fused=True on that device"};
    case CTPY_PROBLEM_DTYPE:
        return (message){PyExc_TypeError, "dtype",
                         "%U has dtype %S; expected float32, float64, bfloat16, "
                         "float16, int64, int32, int16, int8, uint8 or bool, in native "
                         "byte order"};
    case CTPY_PROBLEM_STRIDES:
        return (message){PyExc_ValueError, "shape",
                         "%U of shape %S is not contiguous and aligned: copy it with "
                         ".contiguous(), an array with numpy.ascontiguousarray()"};
    case CTPY_PROBLEM_STORAGE:
        return (message){PyExc_ValueError, "shape",
                         "%U of shape %S has no memory: its storage was released; fill "
                         "it again before it is used"};
    default:
        return (message){PyExc_ValueError, "layout",
                         "torch gives no address for %U, whose layout is %S; expected "
                         "a dense tensor in the CPU's memory: convert a sparse one "
                         "with .to_dense(), allocate a meta one with "
                         ".to_empty(device='cpu')"};
    }
}

static int
raise_type(const ctpy_state *state, PyObject *op, PyObject *text)
{
    /* A subclass may keep its values elsewhere, as DTensor does: its address would
     * mislead. */
    int is_tensor =
        state->torch_tensor == NULL ? 0 : PyObject_IsInstance(op, state->torch_tensor);
    if (is_tensor > 0) {
        PyErr_Format(PyExc_TypeError,
                     "%U is a %S, a subclass of torch.Tensor, whose memory cannot be "
                     "read; expected torch.Tensor or torch.nn.Parameter itself: pass "
                     "its local or plain tensor, or use torch.optim",
                     text, Py_TYPE(op));
    }
    else if (is_tensor == 0) {
        PyErr_Format(PyExc_TypeError,
                     "%U is a %.200s; expected a torch.Tensor, a torch.nn.Parameter or "
                     "a numpy.ndarray",
                     text, Py_TYPE(op)->tp_name);
    }
    return -1;
}

static int
raise_problem(ctpy_state *state, PyObject *op, const ctpy_place *place,
              ctpy_problem what)
{
    if (what == CTPY_PROBLEM_ADDRESS) {
        if (!ctpy_forgive()) { /* torch's own text is a page of C++ frames */
            return -1;
        }
    }
    /* Only on failure: the place becomes text here and not for every tensor. */
    const message how = message_of(what);
    PyObject *text = ctpy_place_text(place), *value = NULL;
    if (text != NULL && what == CTPY_PROBLEM_TYPE) {
        (void)raise_type(state, op, text);
    }
    else if (text != NULL) {
        value = PyObject_GetAttrString(op, how.attribute);
    }
    if (value != NULL) {
        PyErr_Format(how.type, how.format, text, value);
    }
    Py_XDECREF(value);
    Py_XDECREF(text);
    return -1;
}

/* ---- views of arrays and tensors ------------------------------------------------- */

static ct_dtype
dtype_from_numpy(PyArrayObject *array)
{
    if (PyArray_DESCR(array)->byteorder == NPY_OPPBYTE) {
        return CT_DTYPE_COUNT;
    }
    switch (PyArray_TYPE(array)) {
    case NPY_FLOAT:
        return CT_F32;
    case NPY_DOUBLE:
        return CT_F64;
    case NPY_HALF:
        return CT_F16;
    case NPY_BYTE:
        return CT_I8;
    case NPY_SHORT:
        return CT_I16;
    case NPY_INT:
        return CT_I32;
    /* long has 4 bytes on some systems. */
    case NPY_LONG:
        return sizeof(long) == 8 ? CT_I64 : CT_I32;
    case NPY_LONGLONG:
        return CT_I64;
    case NPY_UBYTE:
        return CT_U8;
    case NPY_BOOL:
        return CT_BOOL;
    default:
        return CT_DTYPE_COUNT;
    }
}

static ctpy_problem
ctpy_view_array(PyObject *op, ctpy_view *view)
{
    _Static_assert(sizeof(npy_intp) == sizeof(int64_t), "shapes are read in place");
    PyArrayObject *array = (PyArrayObject *)op;
    size_t n = 1;
    for (int i = 0; i < PyArray_NDIM(array); i++) {
        n *= (size_t)PyArray_DIM(array, i);
    }
    *view = (ctpy_view){
        .span = {PyArray_DATA(array), n, dtype_from_numpy(array)},
        .ndim = PyArray_NDIM(array),
        .shape = (const int64_t *)PyArray_DIMS(array),
        .readonly = !PyArray_CHKFLAGS(array, NPY_ARRAY_WRITEABLE),
        .memory = CTPY_DL_CPU,
    };
    return ctpy_span_check(&view->span,
                           PyArray_CHKFLAGS(array, NPY_ARRAY_C_CONTIGUOUS));
}

static ct_dtype
dtype_from_dlpack(const ctpy_dl_tensor *t)
{
    if (t->type_lanes != 1) {
        return CT_DTYPE_COUNT;
    }
    switch (t->type_code << 8 | t->type_bits) {
    case CTPY_DL_FLOAT << 8 | 32:
        return CT_F32;
    case CTPY_DL_FLOAT << 8 | 64:
        return CT_F64;
    case CTPY_DL_BFLOAT << 8 | 16:
        return CT_BF16;
    case CTPY_DL_FLOAT << 8 | 16:
        return CT_F16;
    case CTPY_DL_INT << 8 | 64:
        return CT_I64;
    case CTPY_DL_INT << 8 | 32:
        return CT_I32;
    case CTPY_DL_INT << 8 | 16:
        return CT_I16;
    case CTPY_DL_INT << 8 | 8:
        return CT_I8;
    case CTPY_DL_UINT << 8 | 8:
        return CT_U8;
    case CTPY_DL_BOOL << 8 | 8:
        return CT_BOOL;
    default:
        return CT_DTYPE_COUNT;
    }
}

/* Walks the dimensions from the last; n is the number of elements even if the answer
 * is no. A dimension of 1 may have any stride, and so may all of an empty tensor. */
static int
is_contiguous(int ndim, const int64_t *shape, const int64_t *strides, size_t *n)
{
    int64_t expected = 1;
    int contiguous = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        if (strides != NULL && shape[i] != 1 && strides[i] != expected) {
            contiguous = 0;
        }
        expected *= shape[i];
    }
    *n = (size_t)expected;
    return contiguous || expected == 0;
}

/* Do the n elements fill their memory without gaps or overlaps, in whatever order?
 * Finds the dimension of each stride in turn, from the smallest on. */
static int
is_dense(int ndim, const int64_t *shape, const int64_t *strides, size_t n)
{
    int64_t expected = 1;
    while ((size_t)expected < n) {
        int i = 0;
        while (i < ndim && (shape[i] == 1 || strides[i] != expected)) {
            i++;
        }
        /* No dimension continues the block so far: a gap or an overlap. */
        if (i == ndim) {
            return 0;
        }
        expected *= shape[i];
    }
    return (size_t)expected == n;
}

/* Each fills *view from an object of exactly the reader's type. */
static ctpy_problem
ctpy_view_exchange(const ctpy_dlpack_api *api, PyObject *op, ctpy_view *view)
{
    ctpy_dl_tensor t;
    if (api->tensor_from_object(op, &t) != 0) {
        return CTPY_PROBLEM_ADDRESS;
    }
    const bool on_host =
        t.device_type == CTPY_DL_CPU || t.device_type == CTPY_DL_CUDA_HOST;
    size_t n;
    int contiguous = is_contiguous(t.ndim, t.shape, t.strides, &n);
    *view = (ctpy_view){
        .span = {(char *)t.data + t.byte_offset, n, dtype_from_dlpack(&t)},
        .ndim = t.ndim,
        .shape = t.shape,
        /* NULL makes the usual order cheap to compare. */
        .strides = contiguous ? NULL : t.strides,
        .memory = on_host ? CTPY_DL_CPU : t.device_type,
        .ordinal = on_host ? 0 : t.device_id,
    };
    return ctpy_span_check(&view->span,
                           contiguous || is_dense(t.ndim, t.shape, t.strides, n));
}

/* 1 when str(op.name) is expected, 0 when not, -1 with an exception. */
static int
attribute_is(PyObject *op, const char *name, const char *expected)
{
    int answer = -1;
    PyObject *value = PyObject_GetAttrString(op, name);
    PyObject *text = value == NULL ? NULL : PyObject_Str(value);
    if (text != NULL) {
        answer = PyUnicode_CompareWithASCIIString(text, expected) == 0;
    }
    Py_XDECREF(text);
    Py_XDECREF(value);
    return answer;
}

/* Calls op.name() and reads an integer; -1 with an exception on failure. */
static int64_t
call_integer(PyObject *op, const char *name)
{
    PyObject *value = PyObject_CallMethod(op, name, NULL);
    int64_t n = value == NULL ? -1 : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    return n;
}

static ct_dtype
dtype_from_torch(PyObject *op)
{
    for (int d = 0; d < CT_DTYPE_COUNT; d++) {
        char name[32];
        PyOS_snprintf(name, sizeof name, "torch.%s", ct_dtype_name((ct_dtype)d));
        int same = attribute_is(op, "dtype", name);
        if (same != 0) {
            return same < 0 ? CT_DTYPE_COUNT : (ct_dtype)d;
        }
    }
    return CT_DTYPE_COUNT;
}

/* The numbers of a tuple as bytes. */
static PyObject *
packed_numbers(PyObject *tuple)
{
    const Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(int64_t));
    int64_t *numbers = bytes == NULL ? NULL : (void *)PyBytes_AS_STRING(bytes);
    for (Py_ssize_t i = 0; bytes != NULL && i < n; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(bytes);
    }
    return bytes;
}

/* The shape of a tensor, then its strides; NULL with an exception. The module keeps
 * them: there are as many as shapes of parameters and of batches. */
static const int64_t *
layout_borrow(ctpy_state *state, PyObject *op)
{
    PyObject *shape = PyObject_GetAttrString(op, "shape"), *kept = NULL;
    PyObject *strides = shape == NULL ? NULL : PyObject_CallMethod(op, "stride", NULL);
    PyObject *both = strides == NULL ? NULL : PySequence_Concat(shape, strides);
    if (both != NULL && state->torch_layouts == NULL) {
        state->torch_layouts = PyDict_New();
    }
    if (both != NULL && state->torch_layouts != NULL) {
        kept = PyDict_GetItemWithError(state->torch_layouts, both);
        PyObject *made = kept != NULL || PyErr_Occurred() ? NULL : packed_numbers(both);
        if (made != NULL && PyDict_SetItem(state->torch_layouts, both, made) == 0) {
            kept = made;
        }
        Py_XDECREF(made);
    }
    Py_XDECREF(both);
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    return kept == NULL ? NULL : (const void *)PyBytes_AS_STRING(kept);
}

static ctpy_problem
ctpy_view_methods(ctpy_state *state, PyObject *op, bool shaped, ctpy_view *view)
{
    int on_cpu = attribute_is(op, "device", "cpu");
    int strided = on_cpu < 1 ? on_cpu : attribute_is(op, "layout", "torch.strided");
    if (on_cpu < 0 || strided < 0) {
        return CTPY_PROBLEM_ADDRESS;
    }
    if (!on_cpu) {
        return attribute_is(op, "device", "meta") == 0 ? CTPY_PROBLEM_DEVICE
                                                       : CTPY_PROBLEM_ADDRESS;
    }
    if (!strided) {
        return CTPY_PROBLEM_ADDRESS;
    }
    int64_t contiguous = call_integer(op, "is_contiguous");
    int64_t n = contiguous < 0 ? -1 : call_integer(op, "numel");
    int64_t ndim = n < 0 ? -1 : call_integer(op, "dim");
    PyObject *address = ndim < 0 ? NULL : PyObject_CallMethod(op, "data_ptr", NULL);
    void *data = address == NULL ? NULL : PyLong_AsVoidPtr(address);
    Py_XDECREF(address);
    /* data_ptr() raises for tensors without memory. */
    if (PyErr_Occurred()) {
        return CTPY_PROBLEM_ADDRESS;
    }
    *view = (ctpy_view){
        .span = {data, (size_t)n, dtype_from_torch(op)},
        .ndim = (int)ndim,
        .memory = CTPY_DL_CPU,
    };
    if (shaped && !PyErr_Occurred()) {
        view->shape = layout_borrow(state, op);
        if (view->shape != NULL && contiguous == 0) {
            view->strides = view->shape + ndim;
            contiguous = is_dense(view->ndim, view->shape, view->strides, (size_t)n);
        }
    }
    return PyErr_Occurred() ? CTPY_PROBLEM_ADDRESS
                            : ctpy_span_check(&view->span, contiguous == 1);
}

/* shaped: also of a torch before 2.10, whose tensors cost more with their shape. */
static int
view_of(ctpy_state *state, PyObject *op, const ctpy_place *place, bool anywhere,
        bool shaped, ctpy_view *view)
{
    PyObject *type = (PyObject *)Py_TYPE(op);
    ctpy_problem found = CTPY_PROBLEM_TYPE;
    if (type != state->torch_parameter && type != state->torch_tensor &&
        type != state->numpy_ndarray && find_types(state) < 0) {
        return -1;
    }
    if (type == state->torch_parameter || type == state->torch_tensor) {
        found = state->dlpack != NULL ? ctpy_view_exchange(state->dlpack, op, view)
                                      : ctpy_view_methods(state, op, shaped, view);
    }
    else if (type == state->numpy_ndarray) {
        found = ctpy_view_array(op, view);
    }
    if (found == CTPY_PROBLEM_NONE && view->memory != CTPY_DL_CPU && !anywhere) {
        found = CTPY_PROBLEM_DEVICE;
    }
    return found == CTPY_PROBLEM_NONE ? 0 : raise_problem(state, op, place, found);
}

int
ctpy_view_of(ctpy_state *state, PyObject *op, const ctpy_place *place, ctpy_view *view)
{
    return view_of(state, op, place, false, true, view);
}

int
ctpy_view_anywhere(ctpy_state *state, PyObject *op, const ctpy_place *place,
                   ctpy_view *view)
{
    return view_of(state, op, place, true, true, view);
}

int
ctpy_reject_device(ctpy_state *state, PyObject *op, const ctpy_place *place)
{
    return raise_problem(state, op, place, CTPY_PROBLEM_DEVICE);
}

static int
same_order(const ctpy_view *a, const ctpy_view *b)
{
    if (a->strides == NULL || b->strides == NULL) {
        return a->strides == b->strides;
    }
    for (int i = 0; i < a->ndim; i++) {
        /* A dimension of 1 is never walked, so its stride is arbitrary. */
        if (a->shape[i] != 1 && a->strides[i] != b->strides[i]) {
            return 0;
        }
    }
    return 1;
}

int
ctpy_view_matches(const ctpy_view *a, const ctpy_view *b)
{
    if (a->span.n != b->span.n || a->span.dtype != b->span.dtype) {
        return 0;
    }
    /* NumPy has none for an array without dimensions. */
    if (a->shape == NULL || b->shape == NULL) {
        return a->strides == b->strides;
    }
    return a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, sizeof *a->shape * (size_t)a->ndim) == 0 &&
           same_order(a, b);
}

int
ctpy_span_on(ctpy_state *state, PyObject *op, const char *what, int writable,
             int memory, ct_span *span)
{
    const ctpy_place place = {what, -1, -1};
    ctpy_view view;
    if (view_of(state, op, &place, memory != CTPY_DL_CPU, false, &view) < 0) {
        return -1;
    }
    if (view.memory != memory) {
        PyErr_Format(PyExc_ValueError,
                     "%s is in the host's memory; expected that of the GPU: move it "
                     "with .cuda()",
                     what);
        return -1;
    }
    if (view.strides != NULL) {
        return raise_problem(state, op, &place, CTPY_PROBLEM_STRIDES);
    }
    if (writable && view.readonly) {
        PyErr_Format(PyExc_ValueError,
                     "%s is a read-only array; expected one that can be written: copy "
                     "it with .copy()",
                     what);
        return -1;
    }
    *span = view.span;
    return 0;
}

/* ---- devices ---------------------------------------------------------------------
 *
 * What kind of memory a tensor is in, DLPack says, and which kind the plugin's kernels
 * take, its table: no kind is known by name. */

const ct_plugin *
ctpy_plugin_borrow(PyObject *capsule)
{
    const ct_plugin *plugin = PyCapsule_GetPointer(capsule, CT_PLUGIN_CAPSULE);
    if (plugin != NULL && plugin->version != CT_DEVICE_VERSION) {
        PyErr_Format(PyExc_RuntimeError,
                     "the device's plugin has tables of version %d, and ctrainer._C of "
                     "%d: install both from one release of ctrainer",
                     plugin->version, CT_DEVICE_VERSION);
        return NULL;
    }
    return plugin;
}

const ct_device *
ctpy_device_borrow(PyObject *capsule)
{
    if (Py_IsNone(capsule)) {
        return &ct_device_cpu;
    }
    const ct_plugin *plugin = ctpy_plugin_borrow(capsule);
    return plugin == NULL ? NULL : plugin->device;
}

/* The plugin's device; NULL where there is none, with an exception where one is there
 * and of no use. */
static const ct_device *
find_plugin(ctpy_state *state)
{
    if (state->plugin == NULL) {
        PyObject *module = PyImport_ImportModule("ctrainer._cuda");
        state->plugin =
            module == NULL ? NULL : PyObject_GetAttrString(module, "plugin");
        Py_XDECREF(module);
    }
    if (state->plugin == NULL) {
        (void)ctpy_forgive();
        return NULL;
    }
    return ctpy_device_borrow(state->plugin);
}

const ct_device *
ctpy_device_of(ctpy_state *state, PyObject *op, const ctpy_place *place,
               const ctpy_view *view)
{
    if (view->memory == CTPY_DL_CPU) {
        return &ct_device_cpu;
    }
    const ct_device *device = find_plugin(state);
    if (device != NULL && device->dlpack == view->memory) {
        return device;
    }
    if (!PyErr_Occurred()) {
        (void)ctpy_reject_device(state, op, place);
    }
    return NULL;
}

int
ctpy_current_stream(ctpy_state *state, int memory, int ordinal, void **stream)
{
    *stream = NULL;
    if (memory == CTPY_DL_CPU) {
        return 0;
    }
    /* No tensor of the process may have been read yet. */
    if (state->torch_tensor == NULL && find_types(state) < 0) {
        return -1;
    }
    const ctpy_dlpack_api *api = state->dlpack;
    if (api == NULL || api->current_work_stream == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this torch has no function for its current stream: kernels on "
                        "a GPU need torch 2.10 or newer");
        return -1;
    }
    return api->current_work_stream(memory, ordinal, stream);
}

int
ctpy_target_of(ctpy_state *state, PyObject *op, const ctpy_place *place,
               const ctpy_view *view, ctpy_target *target)
{
    const ct_device *device = ctpy_device_of(state, op, place, view);
    *target = (ctpy_target){device, view->memory, view->ordinal, NULL};
    return device == NULL ? -1
                          : ctpy_current_stream(state, view->memory, view->ordinal,
                                                &target->stream);
}

int
ctpy_view_at(ctpy_state *state, PyObject *op, const char *what, ctpy_target *target,
             ctpy_view *view)
{
    const ctpy_place place = {.what = what, .group = -1};
    if (ctpy_view_anywhere(state, op, &place, view) < 0 ||
        (target->device == NULL &&
         ctpy_target_of(state, op, &place, view, target) < 0)) {
        return -1;
    }
    if (!ctpy_target_has(target, view)) {
        PyErr_Format(PyExc_ValueError,
                     "%s is on another device than the first: all tensors that are "
                     "used together have to be on one device",
                     what);
        return -1;
    }
    return 0;
}

static const char ctpy_has_kernels_doc[] =
    "has_kernels($module, tensor, /)\n--\n\n"
    "Is the tensor or array where kernels of ctrainer can work: in the host's memory, "
    "or,\nwith the plugin ctrainer._cuda and torch 2.10 or newer, in that of a GPU?";

static PyObject *
ctpy_has_kernels(PyObject *module, PyObject *op)
{
    ctpy_state *state = PyModule_GetState(module);
    const ctpy_place place = {"tensor", -1, -1};
    ctpy_view view;
    const bool found = ctpy_view_anywhere(state, op, &place, &view) == 0 &&
                       ctpy_device_of(state, op, &place, &view) != NULL;
    return found || ctpy_forgive() ? PyBool_FromLong(found) : NULL;
}

static const char ctpy_prefer_huge_pages_doc[] =
    "prefer_huge_pages($module, tensor, /)\n--\n\n"
    "Ask the system for huge pages under a tensor or array that is not written yet.\n\n"
    "Large arrays are then read and written faster; nothing else changes. Does nothing "
    "for\nless than 2 MiB, for memory of a GPU, and where the system has none.";

static PyObject *
ctpy_prefer_huge_pages(PyObject *module, PyObject *op)
{
    ctpy_state *state = PyModule_GetState(module);
    const ctpy_place place = {"tensor", -1, -1};
    ctpy_view view;
    if (ctpy_view_anywhere(state, op, &place, &view) < 0) {
        return ctpy_forgive() ? Py_NewRef(Py_None) : NULL;
    }
    if (view.memory == CTPY_DL_CPU) {
        ct_pages_prefer_huge(view.span.data,
                             view.span.n * ct_dtype_size(view.span.dtype));
    }
    Py_RETURN_NONE;
}

/* ---- nested batches, under the names of transformers' functions ------------------ */

static int
has_attribute(PyObject *op, const char *name)
{
    PyObject *found = PyObject_GetAttrString(op, name);
    if (found != NULL) {
        Py_DECREF(found);
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

/* Anything with detach(), so that tensors of other packages pass; the exact types
 * before it are the most frequent leaves. */
int
ctpy_is_tensor(PyObject *op)
{
    if (PyFloat_CheckExact(op) || PyLong_CheckExact(op) || PyObject_CheckBuffer(op)) {
        return 0;
    }
    return has_attribute(op, "detach");
}

int
ctpy_kind_of(PyObject *op)
{
    if (op == Py_None) {
        return CTPY_NONE;
    }
    if (PyTuple_Check(op) || PyList_Check(op)) {
        return CTPY_SEQUENCE;
    }
    if (PyDict_Check(op)) {
        return CTPY_MAPPING;
    }
    if (!PyMapping_Check(op) || PyObject_CheckBuffer(op)) {
        return CTPY_LEAF;
    }
    /* PyMapping_Check holds for anything with an index, tensors included. */
    int tensor = ctpy_is_tensor(op);
    if (tensor != 0) {
        return tensor < 0 ? -1 : CTPY_LEAF;
    }
    int mapping = has_attribute(op, "keys");
    return mapping < 0 ? -1 : mapping ? CTPY_MAPPING : CTPY_LEAF;
}

PyObject *
ctpy_children(PyObject *op, ctpy_kind kind, PyObject **keys)
{
    PyObject *values, *result, *names = NULL;
    if (keys != NULL) {
        *keys = NULL;
    }
    if (kind == CTPY_SEQUENCE) {
        result = PySequence_Tuple(op);
        if (result != NULL && keys != NULL) {
            *keys = Py_NewRef(Py_None);
        }
        return result;
    }
    if (keys != NULL) {
        if ((names = PyMapping_Keys(op)) == NULL) {
            return NULL;
        }
        *keys = PyList_AsTuple(names);
        Py_DECREF(names);
        if (*keys == NULL) {
            return NULL;
        }
    }
    values = PyMapping_Values(op);
    result = values == NULL ? NULL : PyList_AsTuple(values);
    Py_XDECREF(values);
    if (result == NULL && keys != NULL) {
        Py_CLEAR(*keys);
    }
    return result;
}

static PyObject *
make_mapping(PyObject *type, PyObject *keys, PyObject *items)
{
    PyObject *dict = PyDict_New();
    const Py_ssize_t n = PyTuple_GET_SIZE(items);
    for (Py_ssize_t i = 0; dict != NULL && i < n; i++) {
        if (PyDict_SetItem(dict, PyTuple_GET_ITEM(keys, i),
                           PyTuple_GET_ITEM(items, i)) < 0) {
            Py_CLEAR(dict);
        }
    }
    if (dict == NULL || type == (PyObject *)&PyDict_Type) {
        return dict;
    }
    /* By the type's constructor, so that a subclass of dict stays the same class. */
    PyObject *result = PyObject_CallOneArg(type, dict);
    Py_DECREF(dict);
    return result;
}

PyObject *
ctpy_container(PyObject *type, PyObject *keys, PyObject *items)
{
    if (keys != Py_None) {
        return make_mapping(type, keys, items);
    }
    if (type == (PyObject *)&PyTuple_Type) {
        return Py_NewRef(items);
    }
    if (type == (PyObject *)&PyList_Type) {
        return PySequence_List(items);
    }
    int named = has_attribute(type, "_make");
    if (named != 0) {
        return named < 0 ? NULL : PyObject_CallMethod(type, "_make", "(O)", items);
    }
    return PyObject_CallOneArg(type, items);
}

/* Maps fn over the tensors, keeping the structure and other leaves. */
typedef PyObject *ctpy_map_fn(PyObject *tensor, const ctpy_state *state);

static PyObject *
map_children(PyObject *op, ctpy_kind kind, ctpy_map_fn *fn, const ctpy_state *state);

static PyObject *
ctpy_nested_map(PyObject *op, ctpy_map_fn *fn, const ctpy_state *state)
{
    PyObject *result = NULL;
    const int kind = ctpy_kind_of(op);
    /* A list that contains itself must raise instead of overflowing the stack. */
    if (kind < 0 || Py_EnterRecursiveCall(" in a nested batch")) {
        return NULL;
    }
    if (kind == CTPY_SEQUENCE || kind == CTPY_MAPPING) {
        result = map_children(op, (ctpy_kind)kind, fn, state);
    }
    else {
        const int tensor = kind == CTPY_NONE ? 0 : ctpy_is_tensor(op);
        result = tensor < 0 ? NULL : tensor > 0 ? fn(op, state) : Py_NewRef(op);
    }
    Py_LeaveRecursiveCall();
    return result;
}

static PyObject *
map_children(PyObject *op, ctpy_kind kind, ctpy_map_fn *fn, const ctpy_state *state)
{
    PyObject *result = NULL, *keys = NULL, *mapped = NULL;
    PyObject *children = ctpy_children(op, kind, &keys);
    if (children == NULL ||
        (mapped = PyTuple_New(PyTuple_GET_SIZE(children))) == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(children); i++) {
        PyObject *item = ctpy_nested_map(PyTuple_GET_ITEM(children, i), fn, state);
        if (item == NULL) {
            goto done;
        }
        PyTuple_SET_ITEM(mapped, i, item);
    }
    result = ctpy_container((PyObject *)Py_TYPE(op), keys, mapped);
done:
    Py_XDECREF(mapped);
    Py_XDECREF(children);
    Py_XDECREF(keys);
    return result;
}

/* The first dimension of a tensor or array; -1 for anything else or no dimension. */
static Py_ssize_t
first_dimension(PyObject *op, const ctpy_state *state)
{
    if (PyFloat_CheckExact(op) || PyLong_CheckExact(op) || PyUnicode_Check(op)) {
        return -1;
    }
    PyObject *shape = PyObject_GetAttr(op, state->str_shape);
    if (shape == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -2;
        }
        PyErr_Clear();
        return -1;
    }
    Py_ssize_t n = -1;
    if (PyTuple_Check(shape) && PyTuple_GET_SIZE(shape) > 0) {
        n = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, 0));
        n = n == -1 && PyErr_Occurred() ? -2 : n;
    }
    Py_DECREF(shape);
    return n;
}

PyObject *
ctpy_batch_entry(PyObject *batch, PyObject *key, int *failed)
{
    const int kind = ctpy_kind_of(batch);
    *failed = kind < 0;
    if (kind != CTPY_MAPPING) {
        return NULL;
    }
    PyObject *found = PyObject_GetItem(batch, key);
    if (found == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear();
    }
    *failed = found == NULL && PyErr_Occurred() != NULL;
    return found;
}

Py_ssize_t
ctpy_batch_size(PyObject *op, const ctpy_state *state)
{
    const int kind = ctpy_kind_of(op);
    if (kind < 0) {
        return -2;
    }
    if (kind == CTPY_LEAF || kind == CTPY_NONE) {
        return kind == CTPY_NONE ? -1 : first_dimension(op, state);
    }
    if (Py_EnterRecursiveCall(" in a nested batch")) {
        return -2;
    }
    Py_ssize_t n = -1;
    PyObject *children = ctpy_children(op, (ctpy_kind)kind, NULL);
    if (children == NULL) {
        n = -2;
    }
    for (Py_ssize_t i = 0; n == -1 && i < PyTuple_GET_SIZE(children); i++) {
        n = ctpy_batch_size(PyTuple_GET_ITEM(children, i), state);
    }
    if (n == -1 && PyList_Check(op) && PyTuple_GET_SIZE(children) > 0) {
        n = PyTuple_GET_SIZE(children); /* rows that no collator has put together */
    }
    Py_XDECREF(children);
    Py_LeaveRecursiveCall();
    return n;
}

static PyObject *
detach(PyObject *tensor, const ctpy_state *state)
{
    return PyObject_CallMethodNoArgs(tensor, state->str_detach);
}

static int
is_bfloat16(PyObject *tensor, const ctpy_state *state)
{
    PyObject *text = NULL, *dtype = PyObject_GetAttr(tensor, state->str_dtype);
    if (dtype != NULL) {
        text = PyObject_Str(dtype);
        Py_DECREF(dtype);
    }
    if (text == NULL) {
        return -1;
    }
    int result = PyUnicode_CompareWithASCIIString(text, "torch.bfloat16") == 0;
    Py_DECREF(text);
    return result;
}

PyObject *
ctpy_tensor_array(PyObject *tensor, const ctpy_state *state)
{
    PyObject *result = NULL, *host = NULL;
    PyObject *detached = PyObject_CallMethodNoArgs(tensor, state->str_detach);
    if (detached == NULL ||
        (host = PyObject_CallMethodNoArgs(detached, state->str_cpu)) == NULL) {
        goto done;
    }
    /* NumPy has no bfloat16; every value is exact in float32. */
    const int widen = is_bfloat16(host, state);
    if (widen > 0) {
        Py_SETREF(host, PyObject_CallMethodNoArgs(host, state->str_float));
    }
    if (widen >= 0 && host != NULL) {
        result = PyObject_CallMethodNoArgs(host, state->str_numpy);
    }
done:
    Py_XDECREF(host);
    Py_XDECREF(detached);
    return result;
}

PyObject *
ctpy_tensor_like(PyObject *like, PyObject *array)
{
    return PyObject_CallMethod(like, "new_tensor", "O", array);
}

PyObject *
ctpy_numpify_all(PyObject *op, const ctpy_state *state)
{
    return ctpy_nested_map(op, ctpy_tensor_array, state);
}

/* ---- module functions ------------------------------------------------------------ */

static const char ctpy_nested_detach_doc[] =
    "nested_detach($module, tensors, /)\n--\n\n"
    "Return tensors, nested in tuples, lists and mappings, with each one detached.";

static PyObject *
ctpy_nested_detach(PyObject *module, PyObject *tensors)
{
    return ctpy_nested_map(tensors, detach, PyModule_GetState(module));
}

static const char ctpy_nested_numpify_doc[] =
    "nested_numpify($module, tensors, /)\n--\n\n"
    "Return tensors, nested in tuples, lists and mappings, as NumPy arrays.\n\n"
    "bfloat16, which NumPy lacks, becomes float32; arrays stay what they are.";

static PyObject *
ctpy_nested_numpify(PyObject *module, PyObject *tensors)
{
    return ctpy_numpify_all(tensors, PyModule_GetState(module));
}

static const char ctpy_find_batch_size_doc[] =
    "find_batch_size($module, tensors, /)\n--\n\n"
    "Return the first dimension of the first tensor or array in a nested batch.\n\n"
    "None where there is none. tensors: dicts, lists and tuples of them.";

static PyObject *
ctpy_find_batch_size(PyObject *module, PyObject *tensors)
{
    const Py_ssize_t n = ctpy_batch_size(tensors, PyModule_GetState(module));
    if (n == -1) {
        Py_RETURN_NONE;
    }
    return n < 0 ? NULL : PyLong_FromSsize_t(n);
}

PyMethodDef ctpy_runtime_buffer_functions[] = {
    {"find_batch_size",   ctpy_find_batch_size,   METH_O, ctpy_find_batch_size_doc  },
    {"has_kernels",       ctpy_has_kernels,       METH_O, ctpy_has_kernels_doc      },
    {"nested_detach",     ctpy_nested_detach,     METH_O, ctpy_nested_detach_doc    },
    {"nested_numpify",    ctpy_nested_numpify,    METH_O, ctpy_nested_numpify_doc   },
    {"prefer_huge_pages", ctpy_prefer_huge_pages, METH_O, ctpy_prefer_huge_pages_doc},
    {NULL,                NULL,                   0,      NULL                      },
};
