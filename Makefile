# Each target makes the environment that it needs; `make demo` and `make test` are all one has to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
WORKERS ?= $(shell $(PYTHON) -c "import os; print(max(1, min(4, os.cpu_count() or 1)))")

.PHONY: demo test test-slow setup lint docs bench tables clean

demo: $(VENV)/demo.done
	$(BIN)/icnn demo

test: lint docs
	$(BIN)/python -m pytest -n $(WORKERS)

test-slow: setup
	$(BIN)/python -m pytest -n $(WORKERS) -m slow

setup: $(VENV)/all.done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: setup
	$(BIN)/mkdocs build --quiet --strict

bench: setup
	$(BIN)/python -m benchmarks.energies
	$(BIN)/python -m benchmarks.initialisation
	$(BIN)/python -m benchmarks.gradients
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.learning
	$(BIN)/python -m benchmarks.regression
	$(BIN)/python -m benchmarks.control
	$(MAKE) tables

# Every table in README and docs, made anew from results/.
tables: setup
	$(BIN)/python -m icnn.report README.md docs

clean:
	rm -rf $(VENV) site icnn-demo icnn-synthetic icnn-bibtex icnn-olivetti icnn-control

# torch goes in first and pinned, so that nothing later may choose another build of it. Where pip is
# set up (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL) to find a CPU build of that version, it takes that.
$(VENV)/torch.done: constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" \
		|| { echo "icnn needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Making the environment in $(VENV): a minute or two, once ..."
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(PIP) torch
	@touch $@

$(VENV)/demo.done: $(VENV)/torch.done pyproject.toml
	$(PIP) --editable ".[cli,fast,sklearn,viz]"
	@touch $@

$(VENV)/all.done: $(VENV)/demo.done
	$(PIP) --editable ".[cli,data,fast,rl,sklearn,viz]" --group dev --group docs
	@touch $@
