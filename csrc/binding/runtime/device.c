/* The table of kernels for a tensor's memory, and torch's current stream there.
 *
 * What kind of memory a tensor is in, DLPack says, and which kind the plugin's kernels
 * take, its table: no kind is known by name. */
#include "binding/runtime/device.h"

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
    const ctpy_dlpack_api *api = state->dlpack;
    *stream = NULL;
    if (memory == CTPY_DL_CPU) {
        return 0;
    }
    if (api == NULL || api->current_work_stream == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this torch has no function for its current stream: kernels on "
                        "a GPU need torch 2.10 or newer");
        return -1;
    }
    return api->current_work_stream(memory, ordinal, stream);
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

PyMethodDef ctpy_runtime_device_functions[] = {
    {"has_kernels", ctpy_has_kernels, METH_O, ctpy_has_kernels_doc},
    {NULL,          NULL,             0,      NULL                },
};
