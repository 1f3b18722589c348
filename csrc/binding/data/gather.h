/* Nested batches between ranks: every rank gets the rows of all. */
#ifndef BINDING_DATA_GATHER_H
#define BINDING_DATA_GATHER_H

#include "binding/runtime/nested.h"

#include "core/comm/bytes.h"

#include <stdbool.h>

/* Adds a nested batch to a message: the values of its tensors and arrays, anything else
 * pickled. bfloat16 travels as float32. 0, or -1 with an exception. */
int ctpy_pack(ct_packet *packet, PyObject *value, const ctpy_state *state);

/* What one rank has sent, as it is read. */
typedef struct ctpy_parcel {
    ct_packet_reader reader;
    PyObject *bytes; /* the message, borrowed, which arrays are made over */
    int rank;        /* of the sender, for messages */
    Py_ssize_t rows; /* of the batch */
    Py_ssize_t kept; /* the first so many of them are wanted */
    bool tensors;    /* make tensors where this rank has tensors */
} ctpy_parcel;

/* Opens the message of a rank. */
ctpy_parcel ctpy_parcel_open(PyObject *bytes, int rank);

/* The next nested batch of the parcel, in the containers of `like`, this rank's own.
 * Arrays are read-only and lie in the message. NULL with an exception, a ValueError
 * where the structures differ. */
PyObject *ctpy_unpack(ctpy_parcel *parcel, PyObject *like, const ctpy_state *state);

/* The messages of all ranks, a list of bytes in rank order. */
PyObject *
ctpy_exchange(ctpy_state *state, PyObject *communicator, const ct_packet *packet);

/* The rows of all ranks in rank order, rows that are shorter in the second dimension
 * filled with padding_index; tensors are on the device and of the dtype of this rank's.
 * counts: are this rank's among them? They have to be on one rank at least. */
PyObject *ctpy_gather_nested(ctpy_state *state, PyObject *communicator, PyObject *value,
                             PyObject *padding_index, bool counts);

#endif
