# Each target does its own set-up, in .venv. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help setup demo test cluster-test lint types clean

PYTHON ?= python3
# An environment that was set up for GPUs stays one.
DEVICE ?= $(if $(wildcard .venv/.ready-gpu),gpu,cpu)
PYTEST_ARGS ?=
# Processes that tests are spread over, file by file; tests with real ranks start two more each.
WORKERS ?= 2

ifeq ($(filter cpu gpu,$(DEVICE)),)
$(error DEVICE is '$(DEVICE)'; it may be cpu or gpu)
endif

BIN := .venv/bin
READY := .venv/.ready-$(DEVICE)
LOG := .setup.log
CPU_INDEX := https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(READY)  ## install the pinned stack into .venv (DEVICE=cpu or gpu, PYTHON=python3.12, ...)
	@echo ".venv is set up for $(DEVICE)."

demo: $(READY)  ## MovieLens-100K, DIN and DeepFM on two ranks, one table of results
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m scripts.demo

test: $(READY)  ## all tests that one machine can run (PYTEST_ARGS="-k din", WORKERS=1)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

cluster-test: $(READY)  ## jobs on two nodes of a real Slurm, here (root; apt-get install slurm-wlm munge iproute2)
	@$(BIN)/python -m pytest -m cluster $(PYTEST_ARGS)

lint: $(READY)  ## ruff: rules and format
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy
	@$(BIN)/mypy

clean:  ## remove .venv and everything that was built; keeps runs/
	@rm -rf .venv build dist *.egg-info $(LOG) .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted set-up is repeated. Output goes to a log, shown only when a step fails.
define CHECK_PYTHON
import configparser, re, sys
config = configparser.ConfigParser()
config.read("setup.cfg")
span = config["options"]["python_requires"]
low, high = (tuple(map(int, version.split("."))) for version in re.findall(r"3\.\d+", span))
name = "python%d.%d" % sys.version_info[:2]
if not low <= sys.version_info[:2] < high:
    sys.exit(f"{sys.executable} is {name}; needed is {span}. Run: make setup PYTHON=python3.12")
try:
    import ensurepip, venv
except ImportError:
    sys.exit(f"{name} has no venv module. Run: sudo apt-get install -y {name}-venv")
endef
export CHECK_PYTHON

$(READY): requirements/$(DEVICE).txt requirements/dev.txt setup.cfg
	@command -v $(PYTHON) > /dev/null || {
	    echo "$(PYTHON) was not found. Run: sudo apt-get install -y python3 python3-venv" >&2; exit 2; }
	$(PYTHON) -c "$$CHECK_PYTHON"
	step() { echo "  $$1"; shift; "$$@" >> $(LOG) 2>&1 || { tail -n 25 $(LOG); echo "Set-up failed; all of it is in $(LOG)" >&2; exit 1; }; }
	: > $(LOG)
	# The two FBGEMM builds share a folder, so an environment is never turned from one device to the other.
	if compgen -G ".venv/.ready-*" > /dev/null && [ ! -e $(READY) ]; then rm -rf .venv; fi
	[ -x $(BIN)/pip ] || $(PYTHON) -m venv --clear .venv
	echo "Setting up .venv for $(DEVICE) with $$($(BIN)/python --version)"
	if [ $(DEVICE) = gpu ]; then
	    step "torch, FBGEMM, TorchRec (CUDA builds, several GB)" $(BIN)/python -m pip install -r requirements/gpu.txt
	else
	    # PyPI's torch is a CUDA build; the +cpu build on PyTorch's index sorts above it. Where that host cannot be
	    # reached, pip's own configuration must offer a CPU build, which the last step checks.
	    index=""
	    if $(BIN)/python -c "import urllib.request as u; u.urlopen('$(CPU_INDEX)/torch/', timeout=10)" >> $(LOG) 2>&1
	    then index="--extra-index-url $(CPU_INDEX)"; fi
	    step "torch, FBGEMM, TorchRec (CPU builds, about 200 MB)" $(BIN)/python -m pip install --no-deps $$index -r requirements/cpu.txt
	fi
	step "everything else" $(BIN)/python -m pip install -c requirements/$(DEVICE).txt -e ".[dev]"
	echo "  check"
	$(BIN)/python -c "from recsys import doctor; text, ok = doctor.report('$(DEVICE)', strict=True); ok or exit(text)"
	touch $(READY)
