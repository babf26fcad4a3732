# Needs Python 3.11 or later, make, and pip that reaches an index; gcc where there is one, for the native kernels.
PYTHON ?= python3
BIN := .venv/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq -c constraints.txt
INSTALLED := .venv/installed
# for kernels in the interpreter; a CUDA build of torch has brought its own by then
TRITON := triton==3.9.0
SOURCES := pyproject.toml constraints.txt $(wildcard setup.py src/gradsieve/ops/*.c src/gradsieve/ops/*.h)

.DEFAULT_GOAL := help
.PHONY: help install demo test check bench sanitize clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

install: $(INSTALLED)  ## make .venv and install gradsieve with all that its tests need

demo: $(INSTALLED)  ## train three rules on digits, 4 virtual workers; table here, report in runs/demo
	$(BIN)/gradsieve compare --task digits --workers 4 --rule dense --rule topk:0.01 --rule threshold:auto \
	  --epochs 20 --seed 0 --out runs/demo

test: $(INSTALLED)  ## all tests, the README's code blocks and the docstrings' examples included
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(INSTALLED)  ## lint, format, types, and the direction of the imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports.py

bench: $(INSTALLED)  ## time the operators against the floor that memory sets
	$(BIN)/python benchmarks/ops.py $(ARGS)

sanitize: $(INSTALLED)  ## the op tests on a build of the C kernels that checks addresses and undefined behaviour
	@mkdir -p build
	gcc -std=gnu11 -g -O1 -ffp-contract=off -fno-omit-frame-pointer -fsanitize=address,undefined \
	  -fno-sanitize-recover=undefined -fPIC -shared -pthread src/gradsieve/ops/native*.c \
	  -o build/native-sanitized.so -lm
	LD_PRELOAD="$(foreach l,asan ubsan stdc++,$(shell gcc -print-file-name=lib$(l).so))" ASAN_OPTIONS=detect_leaks=0 \
	  OMP_NUM_THREADS=1 GRADSIEVE_NATIVE=$(CURDIR)/build/native-sanitized.so \
	  $(BIN)/python -m pytest tests/ops -x -k "not triton" -p no:cacheprovider -s

clean:  ## remove .venv, builds, caches and runs
	rm -rf .venv build dist runs .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
	rm -f src/gradsieve/ops/*.so

# torch comes first: what follows then finds it there, whichever build it is. The stamp comes last, so that an
# installation that broke off is taken up again.
$(INSTALLED): $(SOURCES)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "making .venv"; rm -rf .venv; $(PYTHON) -m venv .venv; }
	@echo "installing (once; some minutes where torch is yet to be fetched)"
	@$(PIP) setuptools wheel
	@$(PIP) torch
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) $(TRITON)
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@
