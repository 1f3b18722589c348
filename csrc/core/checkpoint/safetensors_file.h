/* An open safetensors file, for the two files that implement core/checkpoint/safetensors.h. */
#ifndef CT_SAFETENSORS_FILE_H
#define CT_SAFETENSORS_FILE_H

#include "core/checkpoint/safetensors.h"
#include "core/checkpoint/source.h"

/* An entry of the index of names. */
typedef struct ct_st_name {
    ct_text name;
    size_t index; /* into tensors */
} ct_st_name;

/* tensors is in the order of the data, by_name in the order of the names. Every text
 * points into header, every shape into extents. */
struct ct_st_file {
    ct_source source;
    char *path;
    char *header;
    uint32_t header_crc; /* of the file up to its data */
    bool header_checked; /* against the checksum in it */
    uint64_t data_begin;
    ct_st_tensor *tensors;
    size_t n_tensors, tensors_capacity;
    uint64_t *extents;
    size_t n_extents, extents_capacity;
    ct_st_name *by_name;
    ct_st_pair *metadata;
    size_t n_metadata, metadata_capacity;
};

#endif
