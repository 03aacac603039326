# `make demo` and `make test` each work as the first command on a machine with Python 3.11 (venv), g++ and make.
# pip is configured as always: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_CONSTRAINT, ...

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
JOBS ?= $(shell nproc)

BIN := $(VENV)/bin
QUIET ?= --quiet
PIP := $(BIN)/pip install $(QUIET) --disable-pip-version-check
SOURCES := $(shell find cpp -type f) CMakeLists.txt pyproject.toml python/moepack/__init__.py
TOKENIZERS := build/tokenizers-1.0.1
CXX_FILES = $(shell git ls-files --cached --others --exclude-standard cpp tests/cpp tests/fuzz | grep -E '\.(cpp|h)$$')

.DEFAULT_GOAL := install
.PHONY: install demo test test-all test-arm test-instructions update-instructions test-cpp test-python test-python-all test-sanitizers fuzz lint format gtest clean

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/moepack demo

test: lint test-cpp test-python
test-all: lint test-cpp test-python-all

test-python: $(VENV)/.tools
	$(BIN)/python -m pytest -m "not slow"

test-python-all: $(VENV)/.tools $(TOKENIZERS)/.installed
	MOEPACK_TOKENIZERS=$(abspath $(TOKENIZERS)/prefix) $(BIN)/python -m pytest

# For text in the C++ runner: the tokenizer library of ExecuTorch's LLM runners, from the sources of its Python package.
$(TOKENIZERS)/.installed: | $(VENV)/.build-tools
	@rm -rf $(@D) && mkdir -p $(@D)/source
	$(BIN)/pip download $(QUIET) --disable-pip-version-check --dest $(@D) --no-deps --no-build-isolation \
	  --no-binary=:all: pytorch_tokenizers==$(TOKENIZERS:build/tokenizers-%=%)
	@tar -xzf $(@D)/*.tar.gz -C $(@D)/source --strip-components=1
	$(BIN)/cmake -S $(@D)/source -B $(@D)/build -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) --log-level=ERROR \
	  -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS=-w -DCMAKE_CXX_FLAGS=-w -DSUPPORT_REGEX_LOOKAHEAD=ON \
	  -DCMAKE_INSTALL_PREFIX=$(abspath $(@D)/prefix)
	$(BIN)/cmake --build $(@D)/build --parallel $(JOBS) -- --quiet
	@$(BIN)/cmake --install $(@D)/build > $(@D)/install.log
	@touch $@

test-cpp: build/cpp/build.ninja
	$(BIN)/cmake --build build/cpp --parallel $(JOBS) -- --quiet
	$(BIN)/ctest --test-dir build/cpp --output-on-failure --no-tests=error --parallel $(JOBS)

# On an emulated CPU that has all extensions, dot products only, or neither: every NEON kernel against the scalar one, then
# programs that are exported here, through the runner.
EMULATED = QEMU_LD_PREFIX=/usr/aarch64-linux-gnu qemu-aarch64-static
test-arm: $(VENV)/.tools build/executorch-aarch64/.unpacked
	$(BIN)/cmake --preset linux-aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) --log-level=WARNING \
	  -Dexecutorch_ROOT=$(abspath build/executorch-aarch64/executorch) -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_COMPILE_WARNING_AS_ERROR=ON -DMOEPACK_BUILD_RUNNER=ON -DMOEPACK_BUILD_SELFTEST=ON
	$(BIN)/cmake --build build/linux-aarch64 --parallel $(JOBS) -- --quiet
	for cpu in max cortex-a76 cortex-a57; do \
	  $(EMULATED) -cpu $$cpu build/linux-aarch64/cpp/selftest/moepack_selftest || exit; done
	MOEPACK_ARM_BUILD=$(abspath build/linux-aarch64) $(BIN)/python -m pytest tests/python/test_arm.py

# ExecuTorch's headers and libraries for aarch64, from its wheel; nothing of it is installed.
build/executorch-aarch64/.unpacked: pyproject.toml | $(VENV)/.build-tools
	@rm -rf $(@D) && mkdir -p $(@D)
	$(BIN)/pip download $(QUIET) --disable-pip-version-check --dest $(@D) --no-deps --only-binary=:all: \
	  --platform manylinux_2_28_aarch64 \
	  $$($(call requirements,[r for r in p["project"]["dependencies"] if r.startswith("executorch")]))
	@cd $(@D) && $(abspath $(BIN)/python) -m zipfile -e *.whl .
	@touch $@

# Instructions per multiply-accumulate, of the native kernels and those for Arm, against the committed figures.
SELFTEST = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) --log-level=WARNING \
  -DMOEPACK_BUILD_SELFTEST=ON -B
test-instructions update-instructions: $(VENV)/.build-tools
	$(SELFTEST) build/selftest
	$(SELFTEST) build/selftest-arm -DCMAKE_TOOLCHAIN_FILE=$(abspath cpp/cmake/aarch64-linux-gnu.cmake)
	for build in build/selftest build/selftest-arm; do \
	  $(BIN)/cmake --build $$build --parallel $(JOBS) -- --quiet || exit; done
	$(BIN)/python tests/bench/instructions.py $(if $(filter update%,$@),--update) \
	  build/selftest/cpp/selftest/moepack_selftest build/selftest-arm/cpp/selftest/moepack_selftest

# All C++ tests with AddressSanitizer and UBSan, those of threads with ThreadSanitizer. The latter, of gcc 12, cannot map
# its shadow where addresses are too random.
THREADED = experts_test ffn_test tasks_test float_tile_test
FIXED_ADDRESSES = $(shell setarch -R true 2> /dev/null && echo setarch -R)
test-sanitizers: build/address/build.ninja build/thread/build.ninja
	$(BIN)/cmake --build build/address --parallel $(JOBS) -- --quiet
	$(BIN)/ctest --test-dir build/address --output-on-failure --no-tests=error --parallel $(JOBS)
	$(BIN)/cmake --build build/thread --parallel $(JOBS) --target $(THREADED) -- --quiet
	for test in $(THREADED); do $(FIXED_ADDRESSES) build/thread/tests/cpp/$$test --gtest_brief=1 || exit; done

# The same inputs each time; another FUZZ_SEED gives others. Seconds are per target, of which there are eleven.
FUZZ_SECONDS ?= 6
FUZZ_SEED ?= 1
FUZZ = --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)
fuzz: build/address/build.ninja $(VENV)/.tools
	$(BIN)/cmake --build build/address --parallel $(JOBS) --target packed_fuzz op_fuzz -- --quiet
	build/address/tests/fuzz/packed_fuzz $(FUZZ)
	build/address/tests/fuzz/op_fuzz $(FUZZ)
	$(BIN)/python tests/fuzz/readers.py $(FUZZ)

SANITIZED = $(BIN)/cmake -S . -B $(@D) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) --log-level=WARNING \
  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_COMPILE_WARNING_AS_ERROR=ON -DMOEPACK_BUILD_TESTS=ON
build/address/build.ninja: CMakeLists.txt | $(VENV)/.tools gtest
	$(SANITIZED) -DMOEPACK_SANITIZE=address,undefined -DMOEPACK_BUILD_EXECUTORCH=ON -DMOEPACK_BUILD_FUZZERS=ON
build/thread/build.ninja: CMakeLists.txt | $(VENV)/.tools gtest
	$(SANITIZED) -DMOEPACK_SANITIZE=thread

# The bindings that need torch or Python are compiled in build/python, everything else in build/cpp.
TIDY = xargs -P $(JOBS) -n 1 $(BIN)/clang-tidy --quiet --extra-arg=-Wno-unknown-warning-option -p
# Of the files named on stdin, those that a build compiles: kernels for another processor need its headers.
COMPILED = $(BIN)/python -c 'import json, sys; \
  built = [entry["file"] for entry in json.load(open(sys.argv[1]))]; \
  print(*(f for f in sys.stdin.read().split() if any(b.endswith("/" + f) for b in built)), sep="\n")'
lint: $(VENV)/.tools build/cpp/build.ninja
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	@printf '%s\n' $(filter cpp/%.cpp,$(filter-out cpp/ops/torch_% cpp/python/%,$(CXX_FILES))) | \
	  $(COMPILED) build/cpp/compile_commands.json | $(TIDY) build/cpp
	@printf '%s\n' $(filter cpp/ops/torch_%.cpp cpp/python/%.cpp,$(CXX_FILES)) | $(TIDY) build/python

format: $(VENV)/.tools
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "moepack needs Python 3.11 or later: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { echo "Python's venv module is missing (Debian: python3-venv)"; exit 1; }
	@touch $@

# Prints requirements of pyproject.toml, p, one a line.
requirements = $(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); print(*($(1)), sep="\n")'

# What a build needs, torch and ExecuTorch among it, stays in the environment: rebuilding is quick then. A torch that is
# in the environment already, such as a CPU build, satisfies the pin and is kept.
$(VENV)/.build-tools: pyproject.toml | $(VENV)/.created
	@command -v c++ > /dev/null || { echo "moepack needs a C++20 compiler (Debian: g++)"; exit 1; }
	@$(BIN)/python -c 'import torch' 2> /dev/null || { \
	  echo "Installing torch: 0.2 GB to download as a CPU build; the CUDA build that plain PyPI has for x86-64 Linux is 3 GB."; \
	  echo "Nothing here needs CUDA: PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL can say where pip finds a CPU build."; }
	@$(call requirements,p["build-system"]["requires"]) > $(VENV)/build-requirements.txt
	$(PIP) -r $(VENV)/build-requirements.txt "cmake>=3.28" "ninja>=1.11"
	@touch $@

$(VENV)/.installed: $(SOURCES) | $(VENV)/.build-tools
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) --no-build-isolation --config-settings=build-dir=build/python --editable .
	@touch $@

$(VENV)/.tools: pyproject.toml | $(VENV)/.installed
	@$(call requirements,p["project"]["optional-dependencies"]["test"] + p["project"]["optional-dependencies"]["lint"]) \
	  > $(VENV)/tool-requirements.txt
	$(PIP) -r $(VENV)/tool-requirements.txt
	@touch $@

build/cpp/build.ninja: CMakeLists.txt | $(VENV)/.tools gtest
	$(BIN)/cmake -S . -B build/cpp -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) --log-level=WARNING \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_COMPILE_WARNING_AS_ERROR=ON \
	  -DMOEPACK_BUILD_TESTS=ON -DMOEPACK_BUILD_EXECUTORCH=ON -DMOEPACK_BUILD_RUNNER=ON

gtest:
	@test -f /usr/include/gtest/gtest.h || pkg-config --exists gtest 2> /dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then export DEBIAN_FRONTEND=noninteractive; \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends libgtest-dev > /dev/null; \
	  else echo "The C++ tests need GoogleTest (Debian: libgtest-dev)"; exit 1; fi; }
