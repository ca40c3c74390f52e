# Every target sets up its own virtual environment in .venv and then does its job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `run` needs the package alone; tests and lint also need the tools, torch, triton and SGLang.
SGLANG := tests/sglang_cpu
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev

.PHONY: run test test-long lint docs clean

run: $(READY)
	$(BIN)/kvtier replay --profile coding-autonomous --gpu H200-80GB --programs 80 \
		--duration 10m --seeds 2 --out build/replay

test: $(READY_DEV)
	$(BIN)/python -m pytest -q -n auto -m "not long and not server"
	$(BIN)/python -m pytest -q -m "server and not long"

test-long: $(READY_DEV)
	$(BIN)/python -m pytest -q -n auto -m "not server"
	$(BIN)/python -m pytest -q -m server

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p kvtier
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/kvtier config reference > docs/config.md

clean:
	rm -rf $(VENV) build dist kvtier.egg-info

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("kvtier needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(READY_DEV): $(READY) $(SGLANG)/requirements.txt $(SGLANG)/requirements-nodeps.txt
	$(BIN)/python -m pip install --quiet --editable '.[dev,kernels-test]'
	$(BIN)/python -m pip install --quiet --requirement $(SGLANG)/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement $(SGLANG)/requirements-nodeps.txt
	touch $@
