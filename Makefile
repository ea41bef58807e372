# Each target works alone on a machine with Python 3.11 and no packages.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: replay test lint types bench gpu wheel

replay: $(READY)
	@$(BIN)/equivalence replay fixtures/cases

test: $(READY)
	$(BIN)/pytest -n 2 --dist loadgroup --cov --cov-report=term

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	@mkdir -p build
	OMP_NUM_THREADS=$$(nproc) $(BIN)/pytest benchmarks --benchmark-only --benchmark-json=build/bench.json

# On a machine with a Hopper GPU, nvcc, triton, sgl-deep-gemm, a library EQUIVALENCE_SGL_KERNEL
# names and vLLM 0.33.0's qsa_indexer.py, which EQUIVALENCE_VLLM_QSA names.
# GPUPYTHON is a Python with a CUDA torch and the packages of requirements.txt.
GPUPYTHON ?= python3
gpu:
	$(GPUPYTHON) -m pytest tests -m gpu
	$(GPUPYTHON) -m benchmarks.hopper compose exchange qsa probe masks transient sweep invariance table --to benchmarks/results
	$(GPUPYTHON) -m benchmarks.page

# Builds the wheel, installs it in an empty environment, and replays the cases it ships.
wheel: $(READY)
	@rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/empty
	build/wheel/empty/bin/python $(PIP) -c requirements.txt build/wheel/*.whl
	cd build/wheel && empty/bin/equivalence replay --shipped

$(READY): requirements.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) -r requirements.txt
	$(BIN)/python $(PIP) --no-deps --no-build-isolation --editable .
	@touch $@
