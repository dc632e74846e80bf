# One environment in .venv of the checkout; the base model in a cache outside it.
#   make demo            the whole story, from an empty machine to a live endpoint
#   make demo QUICK=1    the same parts, fewer steps
#   make demo DEVICE=cuda
#   make test            every test, the slow ones included
#   make test FAST=1     without the slow ones
PYTHON ?= python3
DEVICE ?= cpu
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(DEVICE)
TORCH  := torch==2.13.0

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test check format up install base-model lock clean

$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(DEVICE),cuda)
	$(BIN)/python -m pip install -q -e '.[vllm-gpu,demo,dev]'
else
	$(BIN)/python -m pip install -q setuptools==78.1.1 $(TORCH)
	$(BIN)/python -m pip install -q --no-deps -r requirements.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
endif
	touch $@

install: $(STAMP)

base-model: $(STAMP)
	$(BIN)/python scripts/fetch_base_model.py

demo: base-model
	$(BIN)/python scripts/demo.py --device $(DEVICE) $(if $(QUICK),--quick)

up: base-model
	$(BIN)/slipway up --device $(DEVICE)

test: base-model
	$(BIN)/python -m pytest $(if $(FAST),-m 'not slow')

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Resolves the extras afresh in a scratch environment and pins what came out.
lock:
	$(PYTHON) scripts/lock.py

clean:
	rm -rf $(VENV) build dist *.egg-info demo-out demo-report.html demo-report.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
