# `make install` makes .venv, `make test` runs every test, `make check` a part of them that answers within two minutes,
# `make format` writes files as the checks want them, `make train` trains a model twice, once with a server killed
# half way, and shows that the two models are equal. `make sim-night` runs a million schedules of the simulator.
# Nothing but Python 3.11 and a C++20 compiler is needed beforehand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(shell find cpp -type f) CMakeLists.txt
FORMATTED := $(shell find cpp -name '*.cpp' -o -name '*.hpp' -o -name '*.inl')
# Tests at a time. More than there are cores: tests that start many processes wait for each other.
JOBS ?= 2
# Each process takes tests from the other's end of the list when its own is done: those with many processes stand at
# one end, so that they seldom run two at a time.
PYTEST := $(BIN)/pytest -n $(JOBS) --dist worksteal

.PHONY: install test check lint format fuzz sanitize wheel diagrams sim-night sim-table train clean

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

# A few that need processes may fail on a machine that stands still for seconds; they are tried again alone.
test: lint
	rm -f .pytest_cache/v/cache/lastfailed
	$(PYTEST) || $(BIN)/python tools/again.py $(BIN)/pytest

# The daily loop. What it leaves out needs processes, storage or torch, and is in `make test`.
check: lint
	$(PYTEST) tests/unit/core tests/unit/test_tidy.py tests/unit/test_glossary.py
	$(BIN)/regrow sim --seeds 200 --jobs $(JOBS)

lint: install
	$(BIN)/ruff check src tests examples tools
	$(BIN)/ruff format --check --quiet src tests examples tools
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix-only --quiet src tests examples tools
	$(BIN)/ruff format src tests examples tools
	$(BIN)/clang-format -i $(FORMATTED)

# Wrong messages for the real machines, until stopped or for so long: `make fuzz MINUTES=60`.
MINUTES ?= 1
fuzz: install
	$(BIN)/python tools/fuzz.py --minutes $(MINUTES)

# The same, and the tests of the store, with a store that was built under the address and undefined-behaviour
# sanitizers, in build/sanitize. Not part of `make test`: it takes minutes.
sanitize: install
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/sanitize.py --minutes $(MINUTES)

# A wheel in dist, which is installed into an environment of its own and used from outside of this directory.
wheel: install
	$(BIN)/python tools/wheel.py

# The lives in docs/protocol.md, from the tables in core/states.py.
diagrams: install
	$(BIN)/python tools/diagrams.py

# A million schedules that nobody has run, added to the record; the table in docs/simulator.md is made from it. The
# busiest modules are compiled for it.
RECORD := docs/simulator-record.json
SCHEDULES ?= 1000000
sim-night: install
	$(BIN)/python tools/sim_compiled.py --seeds $(SCHEDULES) --jobs $(JOBS) --record $(RECORD); found=$$?; \
		$(BIN)/python tools/sim_table.py && exit $$found

sim-table: install
	$(BIN)/python tools/sim_table.py

train: install
	$(BIN)/regrow demo

clean:
	rm -rf $(VENV) build
