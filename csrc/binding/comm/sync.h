/* One rank's tensors for all ranks, for the binding's own files. */
#ifndef CTPY_COMM_SYNC_H
#define CTPY_COMM_SYNC_H

#include "binding/runtime/ctpy.h"

/* The elements of every tensor become the root's. 0 or -1; nothing for an empty
 * sequence. */
int ctpy_broadcast_sequence(ctpy_state *state, PyObject *communicator,
                            PyObject *tensors, int root);

#endif
