# Two commands do everything on a fresh Linux machine with Python 3.11 or newer:
#   make demo   a real model answering with and without speculation
#   make test   the test suite
# Variables: PYTHON (interpreter), TORCH (requirement), TORCH_INDEX (a wheel index for PyTorch alone).

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
ifeq ($(HAS_GPU),yes)
TORCH  ?= torch==2.11.*
EXTRAS := cuda,grammar,bench,dev
else
TORCH  ?= torch==2.13.0
EXTRAS := grammar,bench,dev
endif
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: install demo test lint format clean test-all docs

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(PIP) install --quiet --editable ".[$(EXTRAS)]"
	touch $@

# At a terminal the endpoints stay open until Ctrl-C; elsewhere the demo ends when it is done.
demo: install
	$(BIN)/specengine demo $$(test -t 0 && echo --stay) $(DEMO_FLAGS)

# Three processes of one thread each, for two cores: a quarter of the time tests wait for processes of their
# own. The suite measures nothing.
# Bytecode is kept, whatever the environment says: without it each process compiles all tests anew.
# Memory of tensors is kept for the next ones, a twentieth of the time: by default the C library gives it
# back at once, and the kernel clears it anew.
KEEP_MEMORY = MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(KEEP_MEMORY) \
	$(BIN)/python -m pytest -n 3 --dist worksteal

test: install
	$(PYTEST) -m "not slow or model"

# With the long proofs: every planted mistake, sampled drafts by chi-squared, replays against runs.
test-all: install
	$(PYTEST)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p specengine

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation, as pages in build/site.
docs: install
	$(PIP) install --quiet --editable ".[docs]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
