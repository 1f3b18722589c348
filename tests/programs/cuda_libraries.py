"""The CUDA plugin is imported: the driver's libraries that are mapped then."""

import ctrainer._cuda

assert ctrainer._cuda
with open("/proc/self/maps") as maps:
    print([line for line in maps if "libcuda.so" in line])
