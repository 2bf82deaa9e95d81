# Everything is done inside .venv, a virtual environment of this folder; nothing here needs root.
# `make test` also installs Debian packages where it may (as root, with apt-get).

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
STAMP := .venv/.installed
PYTEST_ARGS ?=
# Some tests wait more than they compute, so there is one process more than cores.
PARALLEL ?= -n $(shell n=$$(nproc); echo $$((n < 7 ? n + 1 : 8))) --dist worksteal
# ONNX Runtime reports to its maker unless this is set before it is loaded.
export ORT_DISABLE_TELEMETRY := 1

.PHONY: help
help: ## this list
	@echo 'usage: make TARGET'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

.PHONY: demo
demo: $(STAMP) ## compile, sign, deploy and run a small classifier over MQTT, on this machine, in a minute
	@$(BIN)/python examples/demo.py

.PHONY: test
test: $(STAMP) broker ## all tests but those that need root (PYTEST_ARGS adds options, such as '-k tuning')
	$(WITHOUT_MOSQUITTO) $(BIN)/pytest $(PARALLEL) $(PYTEST_ARGS)

.PHONY: test-fast
test-fast: $(STAMP) broker ## the tests that are not slow, for the inner loop
	$(WITHOUT_MOSQUITTO) $(BIN)/pytest $(PARALLEL) --fast $(PYTEST_ARGS)

.PHONY: test-arm
test-arm: $(STAMP) ## the agent in an arm64 root under qemu, and under a real systemd (needs root)
	packaging/test-arm.sh $(PYTEST_ARGS)

.PHONY: lint
lint: $(STAMP) ## ruff, mypy (strict), and the rooms that may import each other
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The other engines have a virtual environment of their own: tvm-ffi imports torch wherever it finds it.
.PHONY: bench
bench: .venv-bench/.installed ## speed against ONNX Runtime, OpenVINO, ncnn, PyTorch and LiteRT, and what else it costs
	.venv-bench/bin/python -m benchmarks.bench $(BENCH_ARGS)

.PHONY: bench-arm
bench-arm: .venv-bench/.installed ## executed instructions on an emulated Cortex-A72, against ONNX Runtime and ncnn (root)
	.venv-bench/bin/python -m benchmarks.bench_arm $(BENCH_ARGS)

.PHONY: soak
soak: $(STAMP) broker ## faults with a hundred thousand requests each, and half an hour of even load (two hours)
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)

.PHONY: bench-agent
bench-agent: $(STAMP) broker ## latency, throughput, overload and swaps of the agent over a real mosquitto, beside a bare echo
	$(BIN)/python -m benchmarks.agent --picture docs/pictures/agent-latency.png $(BENCH_ARGS)

.PHONY: deb
deb: $(STAMP) ## the agent as a Debian package, in dist/
	$(BIN)/python packaging/build_deb.py

.PHONY: install
install: $(STAMP) ## the virtual environment alone

.PHONY: clean
clean: ## remove what was built, and the virtual environment
	rm -rf .venv .venv-bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is newer than pyproject.toml when what that file asks for is installed.
$(STAMP): pyproject.toml
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
	echo "make: installing the packages of pyproject.toml into .venv (some minutes, once)"; \
	test -x $(BIN)/python || "$$python" -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[builder,demo,dev]'
	@touch $@

.venv-bench/.installed: $(STAMP)
	@echo 'make: installing the other engines into .venv-bench (some minutes, once)'
	@test -x .venv-bench/bin/python || $(BIN)/python -m venv .venv-bench
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[builder,bench]'
	@# What litert-torch depends on asks for a typing-extensions that is too old for tvm-ffi; it runs with a newer one.
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check 'litert-torch==0.10.*'
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'typing-extensions>=4.13' 2>/dev/null
	@touch $@

# The tests want a broker that speaks MQTT 5. Where it is missing and may not be installed, those that need it say
# so and are skipped; without this variable they fail.
WITHOUT_MOSQUITTO = $(shell PATH=$$PATH:/usr/sbin command -v mosquitto >/dev/null || echo EDGEBUNDLE_WITHOUT_MOSQUITTO=1)

.PHONY: broker
broker:
	@if PATH=$$PATH:/usr/sbin command -v mosquitto >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'make: installing mosquitto'; \
	  apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends mosquitto >/dev/null; \
	else \
	  echo 'make: mosquitto is not installed (apt-get install mosquitto): tests that need MQTT 5 are skipped'; \
	fi
