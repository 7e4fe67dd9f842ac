# make demo       set up, and train the built-in model to a risen reward
# make test       set up, lint, check types, run the tests (under 15 minutes on 2 cores)
# make test-long  the longer proofs
# make clean      remove what these made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install demo check test test-long clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "EasyRL needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@echo "Installing EasyRL into $(VENV) (torch and transformers: some minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e .
	@touch $@

$(VENV)/test-installed: $(VENV)/installed
	@$(PIP) -e '.[test]'
	@touch $@

demo: install
	$(BIN)/easyrl grpo

check: $(VENV)/test-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest --durations=15

test-long: $(VENV)/test-installed
	$(BIN)/python -m pytest -m long

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
