/* The devices whose memory tensors are in: the host, and that of the plugin. */
#ifndef BINDING_RUNTIME_DEVICE_H
#define BINDING_RUNTIME_DEVICE_H

#include "binding/runtime/buffer.h"

#include "core/comm/plugin.h"

/* The tables of a plugin's capsule, if their version is ours; else NULL with an
 * exception. They live as long as the process. */
const ct_plugin *ctpy_plugin_borrow(PyObject *capsule);

/* The device of a plugin's capsule, the host's for None; NULL with an exception. */
const ct_device *ctpy_device_borrow(PyObject *capsule);

/* The device in whose memory the view of op is: the host, or that of ctrainer._cuda,
 * which is imported for the first such tensor. NULL with a ValueError that names the
 * place, for a device of neither. */
const ct_device *ctpy_device_of(ctpy_state *state, PyObject *op,
                                const ctpy_place *place, const ctpy_view *view);

/* The stream that torch works on now, on a device with memory of this kind; NULL for
 * the host. 0, or -1 with an exception. */
int ctpy_current_stream(ctpy_state *state, int memory, int ordinal, void **stream);

#endif
