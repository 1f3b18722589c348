/* Nested batches between ranks: every rank gets the rows of all. */
#ifndef BINDING_DATA_GATHER_H
#define BINDING_DATA_GATHER_H

#include "binding/runtime/ctpy.h"

/* The messages of all ranks, a list of bytes in rank order. */
PyObject *ctpy_exchange(ctpy_state *state, PyObject *communicator, PyObject *bytes);

#endif
