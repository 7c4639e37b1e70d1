# make demo   trains a real network through the box, on this machine, from nothing
# make test   everything that must hold; what CI runs
# make verbs  the RDMA transport on real or soft devices, in a virtual machine where there are none
# make fault  kills, cuts and slow clients for long; make fuzz, make model, make sanitized: likewise (tests/README.md)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
SOURCES := pyproject.toml setup.cfg smb/proto/control.proto csrc/build_engine.py $(wildcard csrc/*.[ch]) $(wildcard csrc/*.inc)

.PHONY: demo test lint c-test fuzz-short verbs fault fuzz model sanitized promises spin chromium prometheus fuse3 metrics-page perf scaling systemd docs container-test bare install clean

demo: $(VENV)/demo-installed
	$(BIN)/smb demo $(DEMO)

test: lint c-test fuzz-short
	-@$(MAKE) --no-print-directory spin systemd chromium prometheus fuse3
	$(BIN)/pytest --numprocesses 2 --dist loadfile --durations 12 $(TESTS)

lint: $(VENV)/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The engine by itself, with -Werror: plain, under address and undefined-behaviour checks, under thread checks.
c-test:
	$(MAKE) --no-print-directory -C tests/c check

# Arbitrary bytes for the frame parser, the server, and recovery; 10 million with `make fuzz RUNS=10000000` and clang.
RUNS ?= 1000000
fuzz-short:
	@$(MAKE) --no-print-directory -C tests/fuzz check RUNS=4000

fuzz:
	@command -v clang >/dev/null || { apt-get update -q && apt-get install -y -q clang; }
	@$(MAKE) --no-print-directory -C tests/fuzz long RUNS=$(RUNS)

# The tests of verbs, and those of every transport over verbs. Where there is no RDMA device (or VM=1) in a virtual machine with two
# soft ones; it installs what it needs (Debian packages, root or sudo). LONG=1: all of the latter, not just what covers each
# operation. One of them: make verbs TESTS=tests/verbs/test_device.py
verbs: $(VENV)/test-installed
	$(if $(LONG),SMB_LONG=1) $(BIN)/python -m tests.verbs.run $(if $(VM),--vm) $(TESTS)

# The fault tests with large numbers: hours on a small machine. One of them: make fault TESTS=tests/fault/test_random_kills.py
fault: $(VENV)/test-installed
	SMB_LONG=1 $(BIN)/pytest -s $(or $(TESTS),tests/fault tests/model)

model: $(VENV)/test-installed spin
	$(BIN)/python tests/model/run_models.py

# What no package index has: a model checker. Without it its test is reported as not run.
spin:
	@command -v spin >/dev/null || { apt-get update -q && apt-get install -y -q spin; } >/dev/null 2>&1 || \
		echo "spin is not here and could not be installed: the models are not run"

# A browser for the tests of the coordinator's page. Without it they are reported as not run.
chromium:
	@command -v chromium >/dev/null || { apt-get update -q && apt-get install -y -q --no-install-recommends chromium; } \
		>/dev/null 2>&1 || echo "chromium is not here and could not be installed: the page is not tested"

# What checks units. Without it these tests are reported as not run.
systemd:
	@command -v systemd-analyze >/dev/null || { apt-get update -q && apt-get install -y -q systemd; } >/dev/null 2>&1 || \
		echo "systemd is not here and could not be installed: units are not checked"

# The API reference from the docstrings, into build/reference; warnings are errors.
docs: $(VENV)/test-installed
	$(BIN)/python -W error -m pdoc --no-show-source --output-directory $(or $(REFERENCE),build/reference) smb smb.train smb.torch

# The container file's steps in a chroot of Debian's, and the daemons in it as the file's user. As root, about 5 minutes.
container-test: $(VENV)/test-installed
	@command -v mmdebstrap >/dev/null || { apt-get update -q && apt-get install -y -q mmdebstrap; }
	$(BIN)/python -m tests.deploy.chroot

# `make demo` of HEAD on bare Debians (and Ubuntus, where this machine's apt has their keys), in chroots with README's packages alone. As
# root, 10 to 20 minutes; one of them: make bare SUITES=trixie
bare:
	@command -v mmdebstrap >/dev/null || { apt-get update -q && apt-get install -y -q mmdebstrap; }
	$(PYTHON) -m tests.deploy.bare $(SUITES)

# The real Prometheus, with promtool. Without it its tests are reported as not run.
prometheus:
	@command -v promtool >/dev/null || tests/support/install-prometheus.sh >/dev/null 2>&1 || \
		echo "prometheus is not here and could not be installed: what needs it is not run"

# docs/metrics.md and the dashboards, from smb/metric_names.py and deploy/grafana/make_dashboards.py.
metrics-page: $(VENV)/installed
	$(BIN)/python docs/make_metrics.py
	$(BIN)/python deploy/grafana/make_dashboards.py

# What smb mount needs of the system. Without it, or without /dev/fuse, its tests are reported as not run.
fuse3:
	@command -v fusermount3 >/dev/null || { apt-get update -q && apt-get install -y -q fuse3; } >/dev/null 2>&1 || \
		echo "fuse3 is not here and could not be installed: nothing is mounted"

# The tests of the wire and of the public API, daemons and clients alike under address and undefined-behaviour checks. Not those of
# fork: the checker's allocator may be locked by another thread when a process forks, and the child then hangs in it.
sanitized: $(VENV)/test-installed
	$(BIN)/python -m tests.support.builds sanitized $(or $(TESTS),tests/wire tests/integration --ignore=tests/integration/test_fork.py)

# The figures of docs/promises.md that are ratios.
promises: $(VENV)/installed
	$(BIN)/python perf/promises.py

# Us beside the physical limits and the peers, into perf/results, in about 20 minutes; make perf PERF="--quick" for a look, LARGE=1
# to install the peers too that bring hundreds of megabytes (perf/README.md).
perf: $(VENV)/perf-installed $(if $(LARGE),$(VENV)/perf-large-installed)
	$(BIN)/python -m perf.run $(PERF)

# One machine as many: how the box scales over servers behind links of their own, over clients and connections. As root.
# About 6 minutes; ARGS=--quick: one. Results in perf/results.
scaling: $(VENV)/demo-installed
	$(BIN)/python -m perf.scaling $(ARGS)

install: $(VENV)/installed

$(VENV)/bin/python:
	@csrc/check-build-needs.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)

# Editable, so that a change to a Python file needs no new installation; a change to the engine rebuilds it.
$(VENV)/installed: $(VENV)/bin/python $(SOURCES)
	@echo "installing Soft Memory Box into $(VENV)"
	$(PIP) install --editable ".[certs]"
	@touch $@

$(VENV)/demo-installed: $(VENV)/installed examples/demo-requirements.txt
	@echo "installing what the demo needs (PyTorch among it: minutes on a slow line)"
	$(PIP) install --requirement examples/demo-requirements.txt
	@touch $@

$(VENV)/test-installed: $(VENV)/demo-installed tests/requirements.txt examples/transformer-requirements.txt
	$(PIP) install --requirement tests/requirements.txt
	$(PIP) install --no-deps --requirement examples/transformer-requirements.txt
	@touch $@

# Some have no build for some machines: what can't be had is a footnote of the table, not an error. PyTorch brings gloo.
$(VENV)/perf-installed: $(VENV)/demo-installed perf/requirements.txt perf/peers/requirements.txt
	@echo "installing what the measurements need, and the peers"
	$(PIP) install --requirement perf/requirements.txt
	-$(PIP) install --requirement perf/peers/requirements.txt
	-@command -v redis-server >/dev/null || { apt-get update -q && apt-get install -y -q redis-server; }
	@touch $@

$(VENV)/perf-large-installed: $(VENV)/perf-installed perf/peers/requirements-large.txt
	-@ldconfig -p | grep -q libibverbs.so.1 || { apt-get update -q && apt-get install -y -q libibverbs1; } # Mooncake's
	-$(PIP) install --requirement perf/peers/requirements-large.txt
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info smb/_engine*.so smb/proto/*_pb2*
