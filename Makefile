# Three commands: `make install` makes .venv, `make test` runs every test, `make train` trains a model
# twice, once with a server killed half way, and shows that the two models are equal.
# Nothing but Python 3.11 and a C++20 compiler is needed beforehand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(shell find cpp -type f) CMakeLists.txt

.PHONY: install test train clean

install: $(VENV)/.installed

# torch is pinned here and not in the package: a looser requirement may pull several gigabytes of CUDA.
$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check "scikit-build-core>=0.10" "nanobind>=2.2" cmake ninja
	@touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml $(NATIVE)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -e ".[test]"
	@touch $@

test: install
	$(BIN)/ruff check src tests examples
	$(BIN)/mypy
	$(BIN)/pytest

train: install
	$(BIN)/regrow demo

clean:
	rm -rf $(VENV) build
