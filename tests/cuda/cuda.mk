# The CUDA part of the Makefile.
#
#   make cuda         compile and link ctrainer._cuda with nvcc, then what make test has not
#                     run: cuda-emul-asan, and the tests of the plugin and its machine code
#   make cuda-emul    run the sources of cuda/ on the CPU, plainly and under sanitizers
#   make cuda-check   run them on a GPU; a test that finds none exits 77: skipped
NVCC ?= nvcc
NVCC_WHEELS := $(foreach w,cuda-nvcc cuda-crt nvvm cuda-runtime,'nvidia-$w==13.0.*')
CUDA_CHECK_ARCH ?= sm_75# newer devices compile its PTX for themselves
EMUL := $(BUILD)/emul
CHECKED := $(BUILD)/cuda
CUDA_HEADERS := $(HEADERS) $(wildcard cuda/*.h cuda/*.cuh tests/cuda/*.h tests/cuda/emul/*.h)
CUDA_C := $(filter-out cuda/module.c,$(wildcard cuda/*.c))
CUDA_CU := $(wildcard cuda/*.cu)
EMUL_TESTS := $(patsubst tests/cuda/%.cpp,$(EMUL)/%,$(wildcard tests/cuda/test_*.cpp))
ONLY_EMULATED := launch dynlib nccl fsdp mapping streams
CHECK_TESTS := $(patsubst %,$(CHECKED)/test_%,$(filter-out $(ONLY_EMULATED), \
    $(patsubst tests/cuda/test_%.cpp,%,$(wildcard tests/cuda/test_*.cpp))))
EMUL_WHEELS := $(abspath $(EMUL))/wheels
EMUL_INCLUDE := -DCT_EMUL '-DCT_EMUL_WHEELS="$(EMUL_WHEELS)"' \
    -Itests/cuda -Itests/cuda/emul -Icsrc
EMUL_LIBRARIES := $(EMUL_WHEELS)/nvidia/cu13/lib/libcublas.so.13 \
    $(EMUL_WHEELS)/nvidia/nccl/lib/libnccl.so.2
PYTHON_INCLUDE = $(shell $(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))')
PLUGIN_CORE := base/alloc base/status base/wait \
    comm/comm device/update
EMUL_FLAGS := -O1 -g -Wall -Wextra -Wshadow -Werror -ffp-contract=off -fPIC -pthread $(SAN)

.PHONY: cuda cuda-emul cuda-emul-build cuda-emul-libraries cuda-emul-python cuda-emul-torch cuda-emul-plain cuda-emul-asan cuda-check
cuda: cuda-emul-asan $(TESTABLE)
	command -v $(NVCC) >/dev/null || test -x /usr/local/cuda/bin/nvcc || \
	  $(PY) -m pip install -q --disable-pip-version-check $(NVCC_WHEELS)
	CTRAINER_CUDA=1 PYTHONPATH=. $(PY) setup.py -q build_ext --inplace
	$(PY) -m pytest $(addprefix tests/cuda/test_,module.py ptx.py cubins.py fsdp_gpu.py)

cuda-emul: cuda-emul-plain cuda-emul-asan
cuda-emul-asan:
	$(MAKE) BUILD=$(BUILD)/asan SAN="-O1 -g -fsanitize=address,undefined \
	  -fno-sanitize-recover=all" cuda-emul-plain

cuda-emul-build: $(EMUL_TESTS) cuda-emul-libraries
cuda-emul-libraries: $(EMUL_LIBRARIES)

cuda-emul-python: $(EMUL)/_cuda.so $(EMUL_LIBRARIES)

cuda-emul-plain: cuda-emul-build
	failed=; for t in $(EMUL_TESTS); do $$t || failed="$$failed $$t"; done; \
	  test -z "$$failed" || { echo "FAILED:$$failed"; exit 1; }

cuda-check: $(CHECK_TESTS)
	failed=; for t in $(CHECK_TESTS); do s=0; $$t || s=$$?; case $$s in \
	  0) echo "$$t passed";; \
	  77) echo "$$t SKIPPED: no CUDA device";; \
	  *) failed="$$failed $$t";; esac; done; \
	  test -z "$$failed" || { echo "FAILED:$$failed"; exit 1; }

EMUL_OBJECTS := $(CUDA_CU:cuda/%=$(EMUL)/%.o) $(CUDA_C:cuda/%=$(EMUL)/%.o) \
    $(patsubst tests/cuda/emul/%.cpp,$(EMUL)/emul_%.o,$(wildcard tests/cuda/emul/*.cpp))

# With calls before the accesses to memory, which races.cpp takes.
EMUL_ACCESSES := $(if $(SAN),,-fsanitize=thread)
$(EMUL)/%.cu.o: cuda/%.cu $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CXX) -x c++ -std=c++17 $(EMUL_FLAGS) $(EMUL_ACCESSES) $(EMUL_INCLUDE) -c -o $@ $<

$(EMUL)/%.c.o: cuda/%.c $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -fPIC $(EMUL_INCLUDE) -c -o $@ $<

$(EMUL)/emul_%.o: tests/cuda/emul/%.cpp $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 $(EMUL_FLAGS) -O2 $(EMUL_INCLUDE) -c -o $@ $<

$(EMUL)/test_%: tests/cuda/test_%.cpp $(EMUL_OBJECTS) $(BUILD)/libcore.a
	$(CXX) -std=c++17 $(EMUL_FLAGS) $(EMUL_INCLUDE) -rdynamic -o $@ $^ -ldl -lm

# The plugin over the emulation, for Python's tests of what needs a GPU.
$(EMUL)/module.o: cuda/module.c $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -fPIC $(EMUL_INCLUDE) -isystem $(PYTHON_INCLUDE) -c -o $@ $<

$(EMUL)/core/%.o: csrc/core/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -fPIC -c -o $@ $<

$(EMUL)/_cuda.so: $(EMUL_OBJECTS) $(EMUL)/module.o $(PLUGIN_CORE:%=$(EMUL)/core/%.o)
	$(CXX) -shared -pthread -o $@ $^ -ldl -lm

# The same where torch has a device of its own over that memory, of the kind kDLExtDev.
TORCH_DIR = $(shell $(PY) -c 'import importlib.util as i; print(*i.find_spec("torch").submodule_search_locations)')
TORCH_DEVICE := -DCT_CUDA_DLPACK=12
$(EMUL)/torch/device.cu.o: cuda/device.cu $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CXX) -x c++ -std=c++17 $(EMUL_FLAGS) $(EMUL_ACCESSES) $(TORCH_DEVICE) $(EMUL_INCLUDE) -c -o $@ $<

$(EMUL)/torch/_cuda.so: $(EMUL)/torch/device.cu.o $(filter-out %/device.cu.o,$(EMUL_OBJECTS)) \
    $(EMUL)/module.o $(PLUGIN_CORE:%=$(EMUL)/core/%.o)
	$(CXX) -shared -pthread -o $@ $^ -ldl -lm

$(EMUL)/torch/libdevice.so: tests/cuda/emul/torch/device.cpp tests/cuda/emul/emul.h $(EMUL)/torch/_cuda.so
	$(CXX) -std=c++20 -O1 -fPIC -shared -Itests/cuda/emul -isystem $(TORCH_DIR)/include \
	  -isystem $(TORCH_DIR)/include/torch/csrc/api/include -o $@ $< -L$(TORCH_DIR)/lib \
	  -Wl,-rpath,$(TORCH_DIR)/lib -ltorch -ltorch_cpu -lc10

cuda-emul-torch: $(EMUL)/torch/libdevice.so $(EMUL_LIBRARIES)

# Like NVIDIA's wheels: cuda/dynlib.c has to find them. They use the test's runtime.
$(EMUL_WHEELS)/nvidia/cu13/lib/libcublas.so.13: tests/cuda/emul/libs/cublas.cpp
$(EMUL_WHEELS)/nvidia/nccl/lib/libnccl.so.2: tests/cuda/emul/libs/nccl.cpp
$(EMUL_LIBRARIES): tests/cuda/emul/emul.h
	@mkdir -p $(@D)
	$(CXX) -std=c++17 $(EMUL_FLAGS) $(EMUL_INCLUDE) -fPIC -shared -o $@ $(filter %.cpp,$^)

# For a GPU: the sources are compiled once, with nvcc, for all of these programs.
NVCC_FLAGS = -std=c++17 -O3 --fmad=false -arch=$(CUDA_CHECK_ARCH) -Icsrc -Itests/cuda
CHECKED_OBJECTS := $(CUDA_CU:cuda/%=$(CHECKED)/%.o) $(CUDA_C:cuda/%=$(CHECKED)/%.o)
.SECONDARY: $(CHECKED_OBJECTS)

$(CHECKED)/%.cu.o: cuda/%.cu $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -c -o $@ $<

$(CHECKED)/%.c.o: cuda/%.c $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -c -o $@ $<

$(CHECKED)/test_%: tests/cuda/test_%.cpp $(CHECKED_OBJECTS) $(BUILD)/libcore.a
	$(NVCC) $(NVCC_FLAGS) -o $@ $^ -ldl

$(CHECKED)/gpu_kernels: benchmarks/gpu_kernels.cpp $(CHECKED_OBJECTS) $(BUILD)/libcore.a
	$(NVCC) $(NVCC_FLAGS) -o $@ $^ -ldl

$(EMUL)/gpu_kernels: benchmarks/gpu_kernels.cpp $(EMUL_OBJECTS) $(BUILD)/libcore.a
	$(CXX) -std=c++17 $(EMUL_FLAGS) $(EMUL_INCLUDE) -rdynamic -o $@ $^ -ldl -lm
