# `make run` and `make test` each work first on a fresh Debian or Ubuntu: they install what they need into .venv.
# Set PYTHON to choose an interpreter (3.11 or newer) and TORCH_INDEX to choose where torch comes from.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
TORCH ?= torch==2.13.0
# A pip index URL for torch alone, for a smaller CPU-only build where the default index gives a CUDA one.
TORCH_INDEX ?=
ARGS ?=
# Test processes at once; many tests wait for other processes, so four pay off even on two cores.
TEST_PROCESSES ?= 5
PACKAGES := services gateway engine_core worker proto
# pip compiles what it installs on one core, BYTECODE on all, except for what is seldom imported: that is compiled when it
# is. Some packages bring files that are no Python.
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
SELDOM := /(transformers/models|sympy|matplotlib|fontTools|networkx|mpmath|pip|setuptools|mypy|mypyc|tests|torch/(_inductor|_dynamo|onnx))/
BYTECODE := $(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib $(PACKAGES) || true
# uv needs a tenth of pip's time. Of pip's settings it is told the index; where it fails, for whatever reason, pip installs.
UV := uv==0.13.9
INDEX = $$($(BIN)/pip config list | sed -n "s/.*[.]index-url='\(.*\)'/--default-index \1/p" | tail -n 1)
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python $(INDEX)
PROTO_TOOLS := grpcio-tools==1.78.0
PROTO := proto/pagoda_proto/engine/v1/engine.proto

.PHONY: redis-server browser help install run test test-clients test-containers test-matrix check lint format types arch proto proto-check locks bench chaos-demo soak clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.installed  ## what `pagoda serve` needs, into .venv

run: $(VENV)/.installed  ## serve the bundled demo model; ARGS="MODEL --port 9000" for another
	$(BIN)/pagoda serve $(ARGS)

# Tests start some hundred processes: none is to compile our source anew, as all do where no bytecode is kept.
test: $(VENV)/.installed-dev redis-server browser  ## the whole test suite; ARGS="-k name" for a part
	OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_PROCESSES) $(ARGS)

# Debian's, else the one that playwright downloads. Without any the page's tests fail and say so; others run.
browser: $(VENV)/.installed-dev | redis-server  ## a Chromium for the page's tests, if there is none
	@$(BIN)/python -m tests.e2e.browser 2>/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null && \
	  $(BIN)/python -m tests.e2e.browser; \
	} || $(BIN)/playwright install chromium || echo "no Chromium: run sudo apt-get install chromium" >&2

test-containers: $(VENV)/.installed-dev  ## the images and the compose file on a real Docker daemon
	$(BIN)/python -m tests.containers.check $(ARGS)

test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed  ## programs written against LangChain, LlamaIndex, LiteLLM
	$(BIN)/python -m tests.clients.check $(CLIENTS)/bin/python

test-matrix: $(VENV)/.installed-dev  ## the suite on other processors, Pythons, cores, loads; ARGS="--list" names them
	$(BIN)/python -m tests.matrix $(ARGS)

check: lint types arch proto-check test  ## everything that must pass before a change goes in

lint: $(VENV)/.installed-dev  ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev  ## mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev  ## static types
	$(BIN)/mypy

arch: $(VENV)/.installed-dev  ## who may import whom
	$(BIN)/lint-imports

proto: $(VENV)/.proto  ## generate the gRPC code from engine.proto
	$(VENV)/.proto/bin/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTO)

proto-check: $(VENV)/.proto  ## is the committed gRPC code what engine.proto says?
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && \
	$(VENV)/.proto/bin/python -m grpc_tools.protoc -Iproto --python_out="$$out" --pyi_out="$$out" \
	  --grpc_python_out="$$out" $(PROTO) && \
	for file in $$(cd "$$out" && find . -type f); do \
	  cmp "$$out/$$file" "proto/$$file" || { echo "run: make proto"; exit 1; }; done

locks: $(BIN)/uv  ## lock anew what the images install
	set -e; lock() { out=$$1; shift; $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade \
	  --generate-hashes --no-annotate --custom-compile-command "make locks" -o "deploy/locks/$$out.txt" "$$@"; }; \
	lock build deploy/locks/build.in; \
	lock gateway pyproject.toml --extra gateway --extra redis; \
	lock engine-core pyproject.toml --extra engine-core; \
	lock worker pyproject.toml --extra worker deploy/locks/torch.in --override deploy/locks/without-torch.txt

chaos-demo: $(VENV)/.installed-dev  ## two of everything, a kill -9 every two seconds for a minute, and not a token lost
	@$(BIN)/python bench/chaos.py $(ARGS)

soak: $(VENV)/.installed-dev  ## two hours of random faults under two of everything; ARGS="--minutes 3" for the short form
	@$(BIN)/python bench/faults.py --soak $(ARGS)

bench: $(VENV)/.installed  ## load a running server; ARGS="--rate 4" and so on
	$(BIN)/pagoda bench serve $(ARGS)

clean:  ## remove what was built, the environment too
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .grimp_cache
	find $(PACKAGES) tests demo -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment of its own: what these libraries bring with them is nobody's dependency here.
$(CLIENTS)/.installed:
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check \
	  langchain-openai langchain-anthropic llama-index-llms-openai-like litellm
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check mcp  # LiteLLM's responses import it
	touch $@

# Tests of the store start one of their own, and fail where there is none.
redis-server:
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server; } || \
	  echo "Some tests need redis-server and will fail. Run: sudo apt-get install redis-server" >&2

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed and $(PYTHON) is $$($(PYTHON) --version 2>&1). Use: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  package="python$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$$package"; \
	  else \
	    echo "Python cannot make virtual environments here. Run: sudo apt-get install $$package" >&2; exit 1; \
	  fi; }
	$(PYTHON) -m venv $(VENV)

$(BIN)/uv: | $(BIN)/pip
	-$(PIP_INSTALL) "$(UV)"

# torch first and by itself: it is the one package of which a machine may want another build. Our kernels are compiled
# meanwhile; where that fails, the build hook says so.
$(VENV)/.torch: | $(BIN)/pip
	$(PYTHON) worker/pagoda_worker/kernels/cpu/build.py 2>/dev/null & compiling=$$!; \
	$(PIP_INSTALL) "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) || exit; wait $$compiling || true
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.torch $(BIN)/uv
	@echo 'installing the packages that serving needs'
	@$(INSTALL) -e '.[all]' || $(PIP_INSTALL) -e '.[all]'
	@$(BYTECODE)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.torch $(BIN)/uv
	@echo 'installing the packages that development needs'
	@$(INSTALL) -e '.[dev]' || $(PIP_INSTALL) -e '.[dev]'
	@$(BYTECODE)
	@touch $@ $(VENV)/.installed

# The oldest of all that pyproject.toml says is enough; what only tests need is the newest that goes with it.
.venv-oldest/.installed-dev: pyproject.toml | $(BIN)/uv
	$(PYTHON) -m venv --clear .venv-oldest
	$(BIN)/uv pip compile --quiet --resolution lowest-direct --python .venv-oldest/bin/python pyproject.toml \
	  --extra all --extra gpu --extra redis --extra client -o .venv-oldest/oldest.txt
	$(BIN)/uv pip install --quiet --python .venv-oldest/bin/python -c .venv-oldest/oldest.txt -e '.[dev]'
	@touch $@

$(VENV)/.proto: | $(BIN)/pip
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check "$(PROTO_TOOLS)" || { rm -rf $@; exit 1; }

