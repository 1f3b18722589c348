/* ctrainer._C.LossScaler, shared by its two files. */
#ifndef CT_BINDING_LOSS_SCALER_H
#define CT_BINDING_LOSS_SCALER_H

#include "binding/runtime/ctpy.h"
#include "core/engine/scaler.h"

typedef struct LossScaler {
    PyObject_HEAD
    ct_scaler core; /* valid from tp_new on, so no method has to ask */
} LossScaler;

extern const char LossScaler_state_dict_doc[];
PyObject *LossScaler_state_dict(PyObject *op, PyObject *unused);
extern const char LossScaler_load_state_dict_doc[];
PyObject *LossScaler_load_state_dict(PyObject *op, PyObject *state);
extern const char LossScaler___getstate___doc[];
PyObject *LossScaler___getstate__(PyObject *op, PyObject *unused);
extern const char LossScaler___setstate___doc[];
PyObject *LossScaler___setstate__(PyObject *op, PyObject *state);

#endif
