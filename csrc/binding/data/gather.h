/* Nested batches between ranks: every rank gets the rows of all. */
#ifndef BINDING_DATA_GATHER_H
#define BINDING_DATA_GATHER_H

#include "binding/runtime/buffer.h"

#include <stdbool.h>

/* pickle.dumps(value) with the newest protocol, as bytes. */
PyObject *ctpy_pickle(PyObject *value);

/* pickle.loads(bytes) of a rank's message; ValueError, naming the rank, for damaged
 * bytes. */
PyObject *ctpy_unpickle(PyObject *bytes, int rank);

/* Appends the nodes of a nested batch to a list: None, an array for a tensor or a
 * number, another object as it is, and for a container the tuple (number of children,)
 * before the children. bfloat16 becomes float32. 0, or -1 with an exception. */
int ctpy_flatten(PyObject *list, PyObject *value, const ctpy_state *state);

/* A reader over the nodes of a rank's batch. */
typedef struct ctpy_nodes {
    PyObject *list;  /* borrowed */
    Py_ssize_t at;   /* of the next node */
    int rank;        /* of the sender, for messages */
    Py_ssize_t rows; /* of the batch; -1: every row is kept */
    Py_ssize_t kept; /* how many of the first rows are kept */
    bool tensors;    /* make tensors if this rank's values are tensors */
} ctpy_nodes;

/* The next nested batch, in the containers of `like`, this rank's own. NULL with an
 * exception, a ValueError for differing structures. */
PyObject *ctpy_unflatten(ctpy_nodes *nodes, PyObject *like, const ctpy_state *state);

/* The messages of all ranks, a list of bytes in rank order. */
PyObject *ctpy_exchange(ctpy_state *state, PyObject *communicator, PyObject *bytes);

/* The rows of all ranks in rank order, rows that are shorter in the second dimension
 * filled with padding_index; tensors are on the device and of the dtype of this rank's.
 * counts: are this rank's rows among the result? At least one rank's have to be. */
PyObject *ctpy_gather_nested(ctpy_state *state, PyObject *communicator, PyObject *value,
                             PyObject *padding_index, bool counts);

#endif
