# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
WORKERS ?= 2
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-medium test-long seconds lint types format docs gpu

demo: $(INSTALLED)
	$(BIN)/python examples/train_decoder.py --plan fsdp --nproc 2

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not medium and not slow and not long"

test-medium: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) -m "medium and not slow and not long"

# The tests of both that take a second and more now, in tests/seconds.json: they are the medium ones.
seconds: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not long" --note-seconds

test-long: $(INSTALLED)
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow or long"
	$(BIN)/python -m pytest -n $(WORKERS) -m hypothesis --hypothesis-profile=long

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

# The pages and the reference as a site, in out/site; a broken link is an error.
docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict

# All that is to be seen on a GPU, in one table and in out/gpu (or $OUT); of the Python that is there, nothing is installed.
gpu:
	$(PYTHON) -m benchmarks.gpu --device cuda --out $(or $(OUT),out/gpu)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch by name first, so that a build of it that is already there or at hand (a CPU build, say) is the one used.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "shardc needs Python 3.10 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@
