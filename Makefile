# make demo   build, train on real data with two ranks, show the result
# make test   formatting, lints, Rust and Python tests, types, docs
# make test-all   the same, and what takes long: more worlds and layouts, a thousand faults, loom, hostile input
# Both need only Python (3.10 or newer, with venv) and Rust; the rest is installed into .venv.

PYTHON ?= python3
BIN := .venv/bin
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)

.PHONY: help hooks demo test test-all test-long-waiting test-long-computing build wheel dist site bench bench-quick fmt lint lint-rust lint-python test-rust test-python test-gpu gpu-report wheel-gpu test-backend test-peers test-libraries test-integrations test-loom test-hostile test-sanitize clean

build: .venv/built  ## builds the engine and installs trigram into .venv

.venv/ready: requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

.venv/built: .venv/ready pyproject.toml $(RUST_SOURCES) tools/build_backend.py
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: build  ## trains a GPT on real data with two ranks over 200 Mbit/s, next to DDP
	$(BIN)/trigram demo --ranks 2 --out demo-out

bench: build  ## measures all collectives and writes docs/collectives.md
	$(BIN)/python benches/collectives.py --out docs

bench-quick: build  ## compares with gloo, DDP and a copy in two minutes
	$(BIN)/python benches/quick.py --out quick-out

test:  ## what CI runs: formatting, lints, layers, Rust and Python tests, types, docs
	$(MAKE) -j2 .venv/ready lint-rust  # what is downloaded comes beside what is compiled
	$(MAKE) lint-python test-rust test-python

# Of benches only what would fail when they run: a function that has another signature now, or is gone.
BENCHES_TYPES = --explicit-package-bases --follow-imports=silent $(addprefix --disable-error-code=,arg-type \
	assignment func-returns-value import-not-found override return-value union-attr var-annotated)

lint: lint-rust lint-python  ## formatting, lints, layers

lint-rust:  ## formatting, clippy, docs of Rust
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

lint-python: .venv/ready  ## layers, links and prose of pages, formatting and lints of Python
	$(BIN)/python tools/check_layers.py
	$(BIN)/python tools/check_links.py
	$(BIN)/python tools/check_prose.py
	$(BIN)/ruff format --check python tests benches examples tools
	$(BIN)/ruff check python tests benches examples tools

test-rust:  ## Rust tests
	cargo test --workspace --exclude trigram-python --locked --quiet

test-python: build  ## types and Python tests
	$(BIN)/mypy
	MYPYPATH=python:benches $(BIN)/mypy $(BENCHES_TYPES) benches/*.py
	$(BIN)/python tools/run_tests.py

# What `make test` leaves out: tests marked `long`, see CONTRIBUTING.md.
test-all: test  ## make test, and what it leaves out: tests marked long, 1,000 faults, loom, hostile input
	$(MAKE) -j2 test-long-waiting test-long-computing
	TRIGRAM_FAULTS=1000 cargo test -p trigram-engine --test faults --locked --quiet
	$(MAKE) test-loom test-hostile

test-long-waiting: build
	$(BIN)/python -m pytest tests -m "waits and long"

test-long-computing: build
	$(BIN)/python -m pytest tests -m "not waits and long"

# What proves the unsafe parts, see CONTRIBUTING.md. Each builds into a directory of its own.
NIGHTLY ?= nightly
# With rust-src (rustup component add rust-src) the standard library is instrumented too.
RUST_SRC = $(wildcard $(shell rustc +$(NIGHTLY) --print sysroot)/lib/rustlib/src)
SANITIZED = $(if $(RUST_SRC),-Zbuild-std) --target x86_64-unknown-linux-gnu --locked -p trigram-engine --lib --test ranks_as_threads

test-loom:  ## memory orders of the shared-memory protocols
	CARGO_TARGET_DIR=target/loom RUSTFLAGS="--cfg trigram_loom" \
		cargo test -p trigram-engine --release --locked --test loom

# Ten million inputs for each decoder, with every overflow and assertion checked.
test-hostile: export CARGO_TARGET_DIR = target/hostile
test-hostile: export CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS = true
test-hostile: export CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS = true
test-hostile: export TRIGRAM_FUZZ = 10000000
test-hostile: said = target/hostile/said.log
test-hostile:  ## ten million hostile inputs for each decoder
	cargo test -p trigram-core -p trigram-engine --release --locked --test hostile --no-run
	# Not captured, for that would count as memory; each rank that is given up is a line.
	cargo test -p trigram-core -p trigram-engine --release --locked --test hostile -- --nocapture --test-threads=1 \
		2> $(said) || { tail -n 30 $(said); exit 1; }
	cargo test -p trigram-net-plugin --release --locked --lib hostile -- --nocapture

# Needs a nightly toolchain. Without miri and rust-src only AddressSanitizer runs: ThreadSanitizer takes locks of a standard
# library that is not instrumented for races.
# Without optimization a reduction under ThreadSanitizer lasts as long as the tests wait.
test-sanitize: export CARGO_PROFILE_DEV_OPT_LEVEL = 2
test-sanitize:  ## miri, AddressSanitizer, ThreadSanitizer; needs nightly Rust
	CARGO_TARGET_DIR=target/address RUSTFLAGS=-Zsanitizer=address cargo +$(NIGHTLY) test $(SANITIZED) --test hostile
	@test -n "$(RUST_SRC)" || { echo "left out, for want of miri and rust-src: miri, ThreadSanitizer" >&2; exit 1; }
	CARGO_TARGET_DIR=target/thread RUSTFLAGS=-Zsanitizer=thread cargo +$(NIGHTLY) test $(SANITIZED)
	CARGO_TARGET_DIR=target/miri PROPTEST_CASES=2 MIRIFLAGS=-Zmiri-disable-isolation \
		cargo +$(NIGHTLY) miri test -p trigram-core --lib --locked

# On a machine with a GPU, which needs torch with Triton and a C compiler, and nothing else: carry the tree with
# dist/ made by `make wheel-gpu` elsewhere, and name the Python that has torch.
GPU_PYTHON ?= python3

wheel: .venv/ready  ## builds a wheel into dist/
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist .

# Each of these two has a virtual environment of its own, as neither needs torch.
.venv-dist/ready: requirements-dist.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install --quiet --disable-pip-version-check -r requirements-dist.txt
	touch $@

dist: .venv-dist/ready  ## builds and audits the wheels of a release, for x86_64 and aarch64, into dist/
	rustup target add x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
	PATH="$(CURDIR)/.venv-dist/bin:$$PATH" .venv-dist/bin/python tools/make_wheels.py

.venv-docs/ready: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

site: .venv-docs/ready  ## builds the documentation site into site-out/html
	.venv-docs/bin/python tools/build_site.py

wheel-gpu: wheel  ## what a machine with a GPU needs, into dist/: the wheel, and pytest's
	$(BIN)/pip download --quiet --disable-pip-version-check --only-binary :all: -d dist $(shell grep '^pytest==' requirements-dev.txt)

# STAGES=kernels,codecs runs some of them; REHEARSE=--rehearse all of them without a GPU.
STAGES ?= machine,collectives,faults,kernels,codecs,overlap,training,training-host,network,plugin,elastic
GPU_OUT ?= gpu-report-out

gpu-report:  ## tests and measurements on a GPU, in stages, and a page of what they found: needs dist/ from make wheel-gpu
	$(GPU_PYTHON) tools/gpu_report.py --stages "$(STAGES)" --out $(GPU_OUT) $(REHEARSE)

test-gpu:  ## the tests of gpu-report
	$(GPU_PYTHON) tools/gpu_report.py --stages machine,collectives,faults,kernels,training,training-host --out $(GPU_OUT) $(REHEARSE)

# Scripts on transformers, PEFT, timm, torchvision and libraries of optimizers; no weights are downloaded.
.venv/libraries: .venv/ready requirements-libraries.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-libraries.txt
	touch $@

test-backend: build  ## torch's tests of c10d over our backend at 2, 3 and 4 ranks, and our own of it
	$(BIN)/python -m pytest tests/backend

# Those of torch, Accelerate and torchft are in their wheels; of the others a clone is named.
PEERS = torch accelerate torchft $(foreach name,horovod deepspeed lightning,$(addprefix $(name)=,$(PEER_$(shell echo $(name) | tr a-z A-Z))))
.venv/peers: .venv/integrations requirements-peers.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-peers.txt
	touch $@

test-peers: build .venv/peers  ## suites of other libraries, into docs/conformance.md; PEER_HOROVOD=PATH: also that of a clone
	$(BIN)/python -m tools.peers $(PEERS)

test-libraries: build .venv/libraries  ## scripts on public libraries, next to DDP; installs requirements-libraries.txt
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/libraries

# The Trainer of transformers, Ray Train, and examples on them and on torchvision; no weights are downloaded.
.venv/integrations: .venv/ready requirements-integrations.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-integrations.txt
	touch $@

test-integrations: build .venv/integrations  ## all integrations; installs requirements-integrations.txt
	HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest tests/integrations tests/frameworks

fmt: .venv/ready  ## formats Rust and Python
	cargo fmt --all
	$(BIN)/ruff format python tests benches examples tools

clean:  ## removes what was built
	rm -rf target .venv .venv-dist .venv-docs demo-out site-out python/trigram/*.so

hooks: .venv/ready  ## installs the git hooks of .pre-commit-config.yaml
	$(BIN)/pip install --quiet --disable-pip-version-check "pre-commit>=4,<5"
	$(BIN)/pre-commit install

help:  ## lists these targets
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
