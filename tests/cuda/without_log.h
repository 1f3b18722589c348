/* For nvcc's -include: a loss's logarithm, a function of CUDA's library, is left out,
 * so that the rest of a kernel can be read. */
#include <cmath>
#include <math.h>

#define log(x) (x)
