# Tidemill's two commands are `make serve` and `make test`; `make help` lists the rest.

# Outside the tree, so that a fresh clone finds what an earlier one fetched.
export TIDEMILL_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tidemill
export PYTHONPATH := $(TIDEMILL_CACHE)/python:$(PYTHONPATH)

# Of `make serve`: the address, a model of your own, and more flags of `tidemill serve`.
LISTEN ?= 127.0.0.1:8000
MODEL ?=
SERVE_FLAGS ?=
NUMPY := numpy==2.4.6
DEFAULT_MODEL := $(TIDEMILL_CACHE)/models/SmolLM2-135M-Instruct.Q4_1.gguf
FLOAT_MODEL := $(TIDEMILL_CACHE)/models/SmolLM2-135M-f32

.PHONY: help serve model test-needs test soak bench bench-peer fuzz lint clean

help: ## this list; `make serve` takes MODEL=path LISTEN=host:port SERVE_FLAGS='--decode 2'
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1	/' | expand -t 24

serve: ## get the default model, build, start router + prefill + decode on LISTEN, print a curl to paste
	@tests/scripts/need.sh cargo python3 pip
	@[ -z "$(MODEL)" ] || [ -e "$(MODEL)" ] || { echo "MODEL=$(MODEL): no such file or directory" >&2; exit 64; }
	@if [ -z "$(MODEL)" ]; then echo "== 1/3 model"; python3 cli/src/pull/fetch_default_model.py "$(TIDEMILL_CACHE)/models"; \
	 else echo "== 1/3 model: $(MODEL)"; fi
	@echo "== 2/3 build (release; the first time takes 5 to 10 minutes on 2 cores)"
	@cargo build --release --locked -p tidemill-cli
	@echo "== 3/3 serve"
	@exec target/release/tidemill serve --model "$(or $(MODEL),$(DEFAULT_MODEL))" --listen "$(LISTEN)" $(SERVE_FLAGS)

model: ## fetch the default model into the cache
	@tests/scripts/need.sh python3 pip
	@python3 cli/src/pull/fetch_default_model.py "$(TIDEMILL_CACHE)/models"

test-needs: model
	@tests/scripts/need.sh cargo
	@python3 -c 'import numpy' 2>/dev/null || python3 -m pip install --quiet --target "$(TIDEMILL_CACHE)/python" "$(NUMPY)"
	@[ -f "$(FLOAT_MODEL)/model.safetensors" ] || { echo "deriving the f32 model"; \
	 python3 tests/scripts/gguf_to_safetensors.py "$(DEFAULT_MODEL)" "$(FLOAT_MODEL)"; }

test: test-needs ## every test, sampled to fit about 20 minutes on 2 cores
	cargo build --workspace --locked --bins --tests
	cargo test --workspace --locked --no-fail-fast
	@cat "$${CARGO_TARGET_DIR:-target}/tmp/sim-coverage.txt"

soak: test-needs ## the long form of every sampled check; writes docs/soak.md
	cargo build --workspace --locked --bins --tests
	tests/scripts/soak.sh

bench: model ## kernel and model speed beside their limits
	cargo bench -p tidemill-kernels
	cargo bench -p tidemill-engine --bench model -- "$(DEFAULT_MODEL)"

bench-peer: model ## the engine beside llama.cpp in one run (builds llama.cpp the first time); MODEL=path for another file
	@tests/scripts/need.sh cargo python3 pip cmake
	python3 engine/benches/beside_llama_cpp.py "$(or $(MODEL),$(DEFAULT_MODEL))"

fuzz: ## fuzz one parser: make fuzz TARGET=gguf|safetensors|kv_frame|request_json (needs nightly and cargo-fuzz)
	cd tests/fuzz && cargo +nightly fuzz run $(or $(TARGET),gguf) -- -max_total_time=300

lint: ## what CI checks besides the tests
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked
	cargo deny check bans licenses sources

clean: ## remove build output (the model cache stays)
	cargo clean
