# The one entry to every task: demo test bench lint asan tsan leaks fuzz cuda format.
# Tools come from $(VENV), which `make install` makes; PYTHON makes the environment.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
CC ?= cc
BUILD := build
STRICT := -std=c11 -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wvla -Werror
EXACT := -ffp-contract=off -fno-math-errno -fno-trapping-math
CFLAGS := -O3 $(STRICT) $(EXACT) -pthread -fvisibility=hidden -Icsrc

CORE := $(wildcard csrc/core/*.c csrc/cpu/*.c)
HEADERS := $(wildcard csrc/*/*.h csrc/*/*.def)
TESTS := $(patsubst tests/core/%.c,$(BUILD)/%,$(wildcard tests/core/test_*.c))

.PHONY: ext check-core
ext:
	PYTHONPATH=. $(PY) setup.py -q build_ext --inplace

check-core: $(TESTS)
	set -e; for t in $(TESTS); do $$t; done

$(BUILD)/test_%: tests/core/test_%.c $(CORE) $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -Itests/core -o $@ $< $(CORE) -lm
