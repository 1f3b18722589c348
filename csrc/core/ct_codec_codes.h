/* Gradients that travel as codes of 8 bits, what is lost being remembered.
 *
 * Each rank sends a code for every element and a scale for every 256; all get what all
 * have sent, and add it up in rank order. A quarter of float32's bytes, times the
 * ranks, arrives: fewer than of a sum of whole gradients up to 8 ranks. */
#ifndef CT_CODEC_CODES_H
#define CT_CODEC_CODES_H

#include "core/ct_codec.h"

/* For n_buckets buckets. Released with ops->free. */
CT_NODISCARD ct_status ct_codec_codes_new(ct_codec **codec, const ct_device *device,
                                          void *stream, size_t n_buckets,
                                          ct_error *err);

#endif
