# Everything happens in .venv, a virtual environment in this folder. Only the targets that say so need root.
# As root, `make test` also installs the Debian packages that packaging/needs.txt names.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
STAMP := .venv/.installed
PYTEST_ARGS ?=
# A third of the tests' time is waiting, so there are two processes more than cores.
PARALLEL ?= -n $(shell n=$$(nproc); echo $$((n < 7 ? n + 2 : 8))) --dist worksteal
# No process takes all cores for itself (waiting threads of OpenMP would spin), and compiled modules are kept:
# the tests start some hundred Python processes.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE=
# Disable the telemetry of ONNX Runtime.
export ORT_DISABLE_TELEMETRY := 1

.PHONY: help
help: ## show this list
	@echo 'usage: make TARGET'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: demo
demo: $(STAMP) ## compile, sign, deploy and query a small classifier over MQTT, on this machine, in a minute
	@$(BIN)/python examples/demo.py

.PHONY: test
test: needs-test $(STAMP) ## run all tests but those below, and install what they need
	$(TEST_ENVIRONMENT) $(BIN)/pytest $(PARALLEL) $(PYTEST_ARGS)

.PHONY: test-fast
test-fast: needs-test $(STAMP) ## run the tests that are not slow, for the inner loop
	$(TEST_ENVIRONMENT) $(BIN)/pytest $(PARALLEL) --fast $(PYTEST_ARGS)

# The tests of what is compiled for the machine that runs them.
FOREIGN = $$(grep -rlE 'resolve\("host"\)|device: DeviceTarget' tests/builder tests/benchmarks --include='test_*.py')

.PHONY: test-foreign
test-foreign: needs-test $(STAMP) ## run the tests that compile for this machine as if it had other cores and caches
	$(TEST_ENVIRONMENT) EDGEBUNDLE_TEST_HOST=small $(BIN)/pytest $(PARALLEL) $(PYTEST_ARGS) $(FOREIGN)

.PHONY: coverage
coverage: needs-test $(STAMP) ## run all tests and count the lines that they run: a third slower, so not in CI
	$(TEST_ENVIRONMENT) $(BIN)/pytest $(PARALLEL) --cov --cov-report=term $(PYTEST_ARGS)

.PHONY: test-models
test-models: needs-test $(STAMP) ## run the tests of the real models in the folder EDGEBUNDLE_MODELS
	@test -n "$$EDGEBUNDLE_MODELS" || { \
	  echo 'make: set EDGEBUNDLE_MODELS to a folder of real models: tests/acceptance/conftest.py lists them' >&2; exit 1; }
	$(TEST_ENVIRONMENT) $(BIN)/pytest $(PARALLEL) --needs-models $(PYTEST_ARGS)

.PHONY: test-frameworks
test-frameworks: $(STAMP) .venv-frameworks/.installed ## run the tests that need PyTorch, Keras and TensorFlow (installs them)
	$(TEST_ENVIRONMENT) EDGEBUNDLE_PYTHON=$(CURDIR)/.venv-frameworks/bin/python \
	  $(BIN)/pytest $(PARALLEL) --needs-frameworks tests/frameworks $(PYTEST_ARGS)

.PHONY: conformance
conformance: $(STAMP) .venv-conformance/.installed ## run thousands of models of other packages' tests, and print one table
	$(BIN)/python -m benchmarks.conformance $(CONFORMANCE_ARGS)

.PHONY: test-home
test-home: needs-root needs-broker $(STAMP) ## run the recipe for Home Assistant in it (installs it; needs root)
	EDGEBUNDLE_HOME_ASSISTANT=$$(packaging/home-assistant.sh) && export EDGEBUNDLE_HOME_ASSISTANT && \
	  $(TEST_ENVIRONMENT) $(BIN)/pytest --needs-home-assistant tests/clients $(PYTEST_ARGS)

.PHONY: test-arm
test-arm: needs-root $(STAMP) ## run the tests that need root: an arm64 system under qemu, and a real systemd
	packaging/test-arm.sh $(PYTEST_ARGS)

.PHONY: lint
lint: $(STAMP) ## run ruff, mypy (strict) and the import contract, and count the lines of each room
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python packaging/line_budget.py

# The other engines get their own virtual environment, because tvm-ffi imports torch if it is installed.
.PHONY: bench
bench: .venv-bench/.installed ## compare speed with ONNX Runtime, OpenVINO, ncnn, PyTorch and LiteRT, and other costs
	.venv-bench/bin/python -m benchmarks.bench $(BENCH_ARGS)

.PHONY: bench-arm
bench-arm: needs-root needs-count .venv-bench/.installed ## count instructions on an emulated Cortex-A72, for ONNX Runtime and ncnn too (needs root)
	.venv-bench/bin/python -m benchmarks.bench_arm $(BENCH_ARGS)

.PHONY: bench-odd
bench-odd: .venv-bench/.installed ## compare 400 operators with odd extents with their smooth neighbours, on one core
	.venv-bench/bin/python -m benchmarks.odd $(BENCH_ARGS)

.PHONY: soak
soak: needs-broker $(STAMP) ## inject faults under 100,000 requests each, a steady load, a year in an hour (three hours)
	$(BIN)/python -m tests.nightly.soak $(SOAK_ARGS)

.PHONY: hostile
hostile: needs-broker $(STAMP) ## send 100,000 hostile messages to an agent, while an honest client asks (half an hour)
	$(BIN)/python -m tests.nightly.hostile $(HOSTILE_ARGS)

.PHONY: herd
herd: needs-broker $(STAMP) ## restart a broker under 1000 agents: at most 150 connects in any second, all back in 30 s
	$(BIN)/python -m tests.nightly.herd $(HERD_ARGS)

.PHONY: bench-agent
bench-agent: needs-broker $(STAMP) ## measure latency, throughput, overload and version changes of the agent and a bare echo
	$(BIN)/python -m benchmarks.agent --picture docs/pictures/agent-latency.png $(BENCH_ARGS)

.PHONY: deb
deb: $(STAMP) ## build the Debian packages of the agent in dist/
	$(BIN)/python packaging/build_deb.py

.PHONY: client
client: $(STAMP) ## build the client for other computers in dist/: a wheel for pip, a package for npm
	$(BIN)/python packaging/build_client.py

.PHONY: release
release: deb client ## build all packages, and sign their checksums with the key in KEY
	@test -n "$(KEY)" || { echo 'make: name the key: make release KEY=release.key (edgebundle keygen)' >&2; exit 1; }
	$(BIN)/python packaging/sign_release.py --key $(KEY)

.PHONY: lock
lock: $(STAMP) ## resolve the dependencies in pyproject.toml again, and write packaging/locks
	packaging/lock.sh

.PHONY: docs
docs: $(STAMP) ## make the site of the documentation in dist/docs, with search; every warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs/reference . dist/docs
	@echo 'dist/docs/index.html'

.PHONY: man
man: $(STAMP) ## write the manual pages of edgebundle and edge-agent to dist/man
	$(BIN)/python packaging/man_pages.py

.PHONY: install
install: $(STAMP) ## only set up the virtual environment

.PHONY: clean
clean: ## remove all build outputs and the virtual environments
	rm -rf .venv .venv-bench .venv-frameworks .venv-conformance build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# By path: a program in the folder that has the clone, named edgebundle like the package, would find the clone first.
EDITABLE := --config-settings editable_mode=compat --editable

# What compiles, signs and builds is installed as packaging/locks/workstation.txt names it, with digests.
LOCK := packaging/locks/workstation.txt

# The stamp is newer than the lock if the dependencies in that file are installed.
$(STAMP): pyproject.toml $(LOCK)
	@python=; for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo 'make: Python 3.11 or newer is needed and was not found (apt-get install python3 python3-venv)' >&2; \
	  exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "make: $$python has no venv module (apt-get install python3-venv)" >&2; \
	  exit 1; \
	fi; \
	echo "make: installing the packages of $(LOCK) into .venv (a few minutes, once)"; \
	test -x $(BIN)/python || "$$python" -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $(LOCK)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(EDITABLE) .
	@touch $@

.venv-bench/.installed: $(STAMP)
	@echo 'make: installing the other engines into .venv-bench (a few minutes, once)'
	@test -x .venv-bench/bin/python || $(BIN)/python -m venv .venv-bench
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check $(EDITABLE) '.[builder,bench]'
	@# A dependency of litert-torch requires a typing-extensions that is too old for tvm-ffi; it works with a newer one.
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check 'litert-torch==0.10.*'
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'typing-extensions>=4.13' 2>/dev/null
	@touch $@

.venv-frameworks/.installed: $(STAMP)
	@echo 'make: installing PyTorch, Keras and TensorFlow into .venv-frameworks (a few minutes, once)'
	@test -x .venv-frameworks/bin/python || $(BIN)/python -m venv .venv-frameworks
	@.venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check $(EDITABLE) '.[builder,frameworks]'
	@touch $@

# The packages whose tests are the cases, without the builder: tvm-ffi imports torch if it is installed.
.venv-conformance/.installed: pyproject.toml $(STAMP)
	@echo 'make: installing the packages whose tests are run into .venv-conformance (a few minutes, once)'
	@test -x .venv-conformance/bin/python || $(BIN)/python -m venv .venv-conformance
	@.venv-conformance/bin/python -m pip install --quiet --disable-pip-version-check $(EDITABLE) '.[conformance]'
	@touch $@

# What a target needs comes first, before some minutes of pip. Tests that need what is missing are left out, and the
# end of the run says so once more; everything else stops here.
.PHONY: needs-test needs-broker needs-count
needs-test:
	@packaging/install-needs.sh test
	@for suite in bookworm trixie; do \
	  if ! command -v apt-get >/dev/null || ! packaging/debian-mosquitto.sh $$suite >/dev/null; then \
	    echo "make: left out: tests with the broker of Debian $$suite"; fi; done

.PHONY: needs-root
needs-root:
	@test "$$(id -u)" = 0 || { echo 'make: $(MAKECMDGOALS) must be run as root' >&2; exit 1; }

needs-broker needs-count: needs-%:
	@packaging/install-needs.sh --required $*
