/* Copies of so much memory that none of it is in a cache, nor would stay there. */
#ifndef CT_COPY_FAR_H
#define CT_COPY_FAR_H

#include <stddef.h>

/* From how many bytes on ct_copy_far is the better memcpy: twice a core's second cache.
 * With less, what has been copied is found there by who reads it next. */
enum {
    CT_FAR_BYTES = 4 << 20
};

/* Copies like memcpy: the two do not overlap. Of processors other than x86's it is. */
void ct_copy_far(void *to, const void *from, size_t bytes);

#endif
