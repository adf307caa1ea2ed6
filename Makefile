# Everything runs in an environment that it makes itself: .venv for the tests, .venv-demo for the demo.
PYTHON ?= python3
# The one line about torch: any build >= 2.7 serves, and without a pin pip would fetch gigabytes of CUDA for a CPU.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test lint types unit demo bench clean

test: lint types unit

$(VENV)/.installed: pyproject.toml tests/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --constraint tests/constraints.txt --editable '.[dev]'
	touch $@

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not follow the folders that pyproject.toml maps into the package: give it the layout of the wheel.
types: $(VENV)/.installed
	rm -rf build/types && mkdir -p build/types/rlhf_losses
	ln -s $(CURDIR)/rlhf_losses/*.py $(CURDIR)/kernels $(CURDIR)/benchmarks build/types/rlhf_losses/
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p rlhf_losses

unit: $(VENV)/.installed
	$(BIN)/python -m pytest

demo:
	PYTHON=$(PYTHON) TORCH='$(TORCH)' bash examples/demo.sh

# Needs a GPU, and an environment with torch, Triton and this package; rivals that it has are timed, too.
bench:
	$(PYTHON) -m rlhf_losses.cli bench --out benchmarks/results/$$(date +%F)

clean:
	rm -rf $(VENV) .venv-demo build dist demo-output *.egg-info
