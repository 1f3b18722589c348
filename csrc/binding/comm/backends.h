/* Devices as Python names them. */
#ifndef BINDING_COMM_BACKENDS_H
#define BINDING_COMM_BACKENDS_H

#include "binding/runtime/ctpy.h"

#include "core/device/device.h"

/* The device of a plugin's capsule, the host's for None; NULL with an exception. It
 * lives as long as the process. */
const ct_device *ctpy_device_borrow(PyObject *capsule);

#endif
