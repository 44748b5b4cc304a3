# Two commands on a fresh machine: `make demo` shows it working, `make test` tests it all.
.PHONY: help test repeat check model interop port-snippets matrix bench torture torture-ci torture-kept demo programs npm pip

# Most tests wait for something most of the time, so several run for each core.
export RUST_TEST_THREADS ?= $(shell echo $$((3 * $$(getconf _NPROCESSORS_ONLN))))

help: ## What can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

test: programs ## Run the whole test suite, on a private PostgreSQL
	scripts/run-tests --features graphile_worker/tokio-postgres

# TIMES=10 BUSY=6 make repeat: ten times, beside six busy loops.
repeat: ## Run the whole test suite 20 times in a row and list what failed
	@scripts/repeat-tests

check: ## Formatting, lints, documentation; dependencies too where cargo-deny is installed
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --all-features
	@if command -v cargo-deny >/dev/null; then cargo deny check licenses bans sources; else echo "cargo-deny is not installed: skipped"; fi

model: ## Check the model of the protocol between workers and database, in every order of events
	cargo test --locked -p graphile_worker_model

interop: programs npm pip ## Test beside the real Node package, Rust port and Python drivers (needs npm and pip)
	cargo build --locked --manifest-path bench/rust_port/Cargo.toml --bin rust_port
	scripts/run-tests -p graphile_worker_interop

port-snippets: ## Count the snippets of the Rust port's guide that compile against this library
	python3 interop/port_snippets.py --keep 207

matrix: npm ## Run the library's tests on the lowest and the newest PostgreSQL (Linux x64, needs npm)
	failed=; for version in 12 18; do \
	  PGBIN=$(CURDIR)/interop/node_modules/postgres-$$version/native/bin \
	    scripts/run-tests -p graphile_worker || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed on PostgreSQL$$failed" >&2; exit 1; fi

# BENCH="drain latency --rounds 5" chooses, BENCH=--help says what there is.
bench: programs npm ## Measure beside the limit and the peers (about an hour, needs npm)
	cargo build --release --locked --manifest-path bench/rust_port/Cargo.toml
	cargo run --release --locked -p graphile_worker_bench -- $(BENCH)

# TORTURE="--minutes 30 --seed 7" chooses, TORTURE=--help lists all options.
torture: programs ## Break workers, connections and the server under load, then check every promise
	cargo run --locked --quiet -p graphile_worker_torture -- $(TORTURE)

torture-ci: programs npm ## The same with some kept seeds, and once beside Node's workers, in about 100 seconds (needs npm)
	cargo run --locked --quiet -p graphile_worker_torture -- --short

torture-kept: programs npm ## The same with every seed that ever failed (a quarter of an hour, needs npm)
	cargo run --locked --quiet -p graphile_worker_torture -- --kept

demo: programs ## A worker on a private PostgreSQL runs a folder of tasks, for twenty seconds
	cargo build --locked -p graphile_worker_cli --bins --examples
	cargo run --locked --quiet -p graphile_worker_cli --example demo

# A PostgreSQL server, PgBouncer and shells, from the system's package manager if they are missing.
programs:
	@scripts/install-test-programs

# The pinned packages of interop/, from npm.
npm: interop/node_modules/.installed

interop/node_modules/.installed: interop/package-lock.json
	@command -v npm >/dev/null || { echo "this needs npm: install Node.js and try again" >&2; exit 1; }
	npm ci --prefix interop --no-audit --no-fund
	@touch $@

# The pinned packages of interop/, from PyPI.
pip: interop/python_modules/.installed

interop/python_modules/.installed: interop/requirements.txt
	@python3 -m pip --version >/dev/null 2>&1 || { echo "this needs pip: install it (on Debian, python3-pip) and try again" >&2; exit 1; }
	rm -rf interop/python_modules
	python3 -m pip install --quiet --disable-pip-version-check --target interop/python_modules --requirement interop/requirements.txt
	@touch $@
