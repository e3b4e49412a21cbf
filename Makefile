# `make demo` and `make test` need Python 3.10 or newer, a C++20 compiler and make. Everything else
# goes into $(VENV). Each target can be run again; what is up to date is not done twice.
#
#   make demo        train a small GPT in a third of the device memory it needs (compiles for some minutes)
#   make test        the fast tests            make test-slow   the slow ones
#   make lint        ruff, mypy, clang-format  make format      let ruff and clang-format rewrite
#   make docs        the site, in build/site
#   make dist        a source archive and a manylinux wheel for this torch, in dist/
#   make build       the native modules, in place          make clean   remove what make made
#
# PYTHON=python3.12 chooses the interpreter, VENV=dir the environment, TORCH="torch==2.14.*" the
# torch that is installed where the environment has none, ARGS="..." goes to the demo or pytest.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
STAMPS := $(VENV)/.stamps
NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.h') $(wildcard buildtools/*.py) setup.py
# pip writes this file anew when another torch is installed: then the build is out of date.
TORCH_INSTALLED = $(wildcard $(VENV)/lib/python*/site-packages/torch/version.py)
CPP_FILES = $(shell git ls-files '*.cpp' '*.h')

.PHONY: demo test test-slow lint format stubs docs dist build clean
.DELETE_ON_ERROR:

demo: build
	$(VENV)/bin/autohete demo $(ARGS)
	@echo "for the autohete command and the examples: . $(VENV)/bin/activate" >&2

test: build $(STAMPS)/test
	$(PY) -m pytest -n auto -m "not slow and not gpu" $(ARGS)

test-slow: build $(STAMPS)/test
	$(PY) -m pytest -n auto -m "slow and not gpu" $(ARGS)

lint: build $(STAMPS)/test $(STAMPS)/dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)

format: $(STAMPS)/dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

stubs: build $(STAMPS)/dev
	$(PY) buildtools/stubs.py

docs: build $(STAMPS)/docs
	$(PY) -m sphinx -q -W --keep-going -b html docs build/site
	@echo "build/site/index.html"

dist: build $(STAMPS)/package
	$(PY) buildtools/dist.py

build: $(STAMPS)/installed

clean:
	rm -rf $(VENV) build dist *.egg-info autohete/_build_info.py
	rm -f autohete/*.so

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; sys.exit(None if sys.version_info >= (3, 10) else "autohete: Python is " + v + ", expected 3.10 or newer; choose one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# pip looks at what is there already: a torch of the user's own choice stays.
$(STAMPS)/deps: $(STAMPS)/venv buildtools/requirements.txt
	@$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || { echo "installing $(TORCH)"; $(PIP) install "$(TORCH)"; }
	@echo "installing what the build needs"
	@$(PIP) install --upgrade -r buildtools/requirements.txt
	@touch $@

# Through setup.py, not pip: pip hides the compiler's progress.
$(STAMPS)/native: $(STAMPS)/deps $(NATIVE) $(TORCH_INSTALLED)
	$(PY) setup.py --quiet build_ext --inplace
	@touch $@

$(STAMPS)/installed: $(STAMPS)/native pyproject.toml autohete/_version.py
	@[ $@ -nt pyproject.toml ] || { echo "installing autohete into $(VENV)"; $(PIP) install --no-build-isolation --editable '.[report]'; }
	@touch $@

$(STAMPS)/test: $(STAMPS)/installed
	@[ $@ -nt pyproject.toml ] || { echo "installing what the tests need"; $(PIP) install --no-build-isolation --editable '.[test]'; }
	@touch $@

$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml
	@echo "installing the linters"
	@$(PIP) install $(shell sed -n 's/^dev = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	@touch $@

$(STAMPS)/docs $(STAMPS)/package: $(STAMPS)/installed
	@[ $@ -nt pyproject.toml ] || { echo "installing what $(@F) needs"; $(PIP) install --no-build-isolation --editable '.[$(@F)]'; }
	@touch $@
