# `make` alone lists the targets. Everything is installed into .venv, the demo's model into .demo.

PYTHON ?= python3
MINUTES ?= 30
TORCH  ?= torch==2.13.0

BIN    := .venv/bin
MODEL  := .demo/model
GEMMA  := .demo/gemma
BASE   := .venv/.installed-dev
MODELS := .venv/.installed-$(subst =,,$(TORCH))
FUZZ   := .venv/.installed-fuzz

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help venv models-venv model check test faults mutants fuzz soak demo announce gemma bench schema wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(BASE) ## create .venv with warmkv (editable) and the development tools

$(BASE): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $@

models-venv: $(MODELS) ## add PyTorch (CPU) and transformers to .venv

$(MODELS): $(BASE) examples/agent_demo/install_torch.py
	$(BIN)/python examples/agent_demo/install_torch.py '$(TORCH)'
	$(BIN)/python -m pip install -e '.[dev,demo]'
	@touch $@

$(FUZZ): $(BASE)
	$(BIN)/python -m pip install -e '.[dev,fuzz]'
	@touch $@

model: models-venv ## download SmolLM2-135M (93 MB) and convert it once
	$(BIN)/python examples/agent_demo/fetch_model.py --out $(MODEL)

check: venv ## lint, format, types and the import-direction tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest tests/meta -m "not wheel"

test: models-venv model ## run all tests, real model included
	$(BIN)/pytest -n auto --dist loadfile --durations=20

faults: venv ## kill, fill and damage stores at thousands of points (minutes)
	$(BIN)/pytest tests/faults -m faults -ra --durations=10

mutants: venv ## plant faults in a copy of kernels and live layers: tests must notice each (minutes)
	$(BIN)/python tests/kernels/mutation.py

fuzz: $(FUZZ) ## feed 1,000,000 hostile inputs to each reader (an hour; WARMKV_FUZZ_RUNS for fewer)
	$(BIN)/python tests/fuzz/run_fuzz.py

demo: announce model ## one agent, cold and warm: writes .demo/report
	$(BIN)/python examples/agent_demo/demo.py --model $(MODEL) --out .demo/report

announce:
	@test -e $(MODELS) || echo "First run downloads about 380 MB: PyTorch for CPU 200 MB," \
	  "transformers and friends 30 MB, NumPy and development tools 55 MB, SmolLM2-135M 93 MB"

gemma: models-venv ## resume Gemma 3 270M in another process (downloads 238 MB, Gemma terms of use)
	$(BIN)/python examples/gemma/fetch_gemma.py --out $(GEMMA)
	$(BIN)/python examples/gemma/resume.py --model $(GEMMA)

soak: venv ## a daemon under 64 clients for MINUTES (30): flat, within budgets, nothing wrong
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES)

bench: venv ## run the benchmarks
	$(BIN)/python benchmarks/run.py

schema: venv ## regenerate the FlatBuffers code (needs flatc)
	$(BIN)/python schema/regenerate.py

wheel: venv ## build sdist and wheel into dist/
	rm -rf build
	$(BIN)/python -m build

clean: ## remove build products and caches; keeps .venv and .demo/model
	rm -rf build dist *.egg-info .demo/report .fuzz .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -path ./.venv -prune -o -path ./.git -prune -o -type d -name __pycache__ -exec rm -rf {} +
