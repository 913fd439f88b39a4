# src/zerofit/launch/make_variables.py defines which variables a verb reads and which flags they become.
SHELL := bash
.DEFAULT_GOAL := help
PYTHON ?= python3
ENV ?= .venv

# --- the environment: .venv, or the active one with ENV=active ---
ifeq ($(ENV),active)
PREFIX := $(shell $(PYTHON) -c 'import sys; print(sys.prefix)')
PY := $(PYTHON)
else
PREFIX := $(ENV)
PY := $(abspath $(ENV))/bin/python
endif
STAMP := $(PREFIX)/.zerofit-installed
DEV_STAMP := $(PREFIX)/.zerofit-dev-installed
PEERS_STAMP := .venv-peers/.installed
export PATH := $(abspath $(PREFIX))/bin:$(PATH)
# Many containers set it, and each process would then spend 3 s compiling zerofit.
unexport PYTHONDONTWRITEBYTECODE

# --- the variables of the command line ---
# They are exported literally: a $ in a value stays a $.
GIVEN := $(sort $(foreach v,$(.VARIABLES),$(if $(filter command%,$(origin $v)),$v)))
$(foreach v,$(filter-out SHELL MAKE%,$(GIVEN)),$(eval override export $v := $$(value $v)))
export ZEROFIT_GIVEN := $(GIVEN)
export ZEROFIT_GOALS := $(MAKECMDGOALS)
ANY_PYTHON = $(or $(wildcard $(PY)),"$(PYTHON)")
KIT = $(ANY_PYTHON) $(or $(wildcard src/zerofit/launch/make_variables.py),-m zerofit.launch.make_variables)
WITH_FLAGS = $(KIT) $@
FROM_SRC = PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}"

# make updates the Makefile before any verb, so this check rejects wrong variables before anything runs.
# `make`, `make help` and `make clean` alone need no Python.
ifneq ($(filter-out help clean,$(MAKECMDGOALS))$(GIVEN),)
Makefile: check-variables
	@$(ANY_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'zerofit: error: Python 3.11 or newer is needed; name one with PYTHON=...' >&2; exit 2; }
	@$(KIT)
check-variables:
endif

VERBS := sft lora dpo pipeline launch resume convert export chat eval report watch slurm status cancel show doctor plan \
	calibrate batch-size data
.PHONY: check-variables help reproduce $(VERBS)
help: ## this list
	@echo 'zerofit: fine-tune language models with Accelerate and DeepSpeed ZeRO'
	@echo; grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'
	@echo; echo '  GPUS=n  ZERO=0|1|2|3  OFFLOAD=none|optimizer|all  SP=n  TP=n  PP=n  MODEL=folder-or-hub-id  DATA=file-folder-or-hub-id'
	@echo '  CONFIG=file.yaml  OUT=run-folder  ARGS="--any_flag value"  PORT=n  LAUNCHER=torchrun|accelerate|deepspeed'
	@echo '  several nodes: NODES=2 NODE_RANK=0 MASTER_ADDR=host0 on each, or HOSTS=hostfile on one (docs/multinode.md)'
	@echo; echo '  make sft GPUS=4 ZERO=3 MODEL=Qwen/Qwen3-8B DATA=data.jsonl'
	@echo '  flags: make sft ARGS=--help     every flag: make sft ARGS="--help all"'

$(VERBS): $(STAMP)
	@$(FROM_SRC) $(WITH_FLAGS) $(PY) -m zerofit

sft: ## fine-tune all weights (without MODEL and DATA: the bundled task)
lora: ## fine-tune a LoRA adapter
dpo: ## tune on preference pairs, after SFT (ARGS="--adapter lora --beta 0.1")
pipeline: ## fine-tune all weights, the layers cut into PP=2 stages: for slow links between nodes
launch: ## train with a custom recipe: RECIPE=my_sft.py (docs/extending.md)
resume: ## resume RUN=runs/x from its latest valid checkpoint (GPUS= ZERO= OFFLOAD= SP= RECIPE= may differ, ARGS="--more flags")
convert: ## convert FILE=theirs.yaml of axolotl, LLaMA-Factory, ms-swift, TRL ... for zerofit (OUT= ARGS="--gpus 8")
export: ## export RUN=runs/x as a Hugging Face folder and verify its outputs (MERGE=1 DTYPE=bf16 FOR=vllm OUT=)
chat: ## chat with RUN=runs/x in the terminal (ARGS="--temperature 0.7")
eval: ## score RUN=runs/x and its base with lm-evaluation-harness: TASKS=gsm8k,my_tasks/ (GPUS=, EXTRAS=eval installs it)
report: ## write report.html of RUN=runs/x, or compare several: RUN="runs/a runs/b" (ARGS="--every 30")
watch: ## show RUN=runs/x in the terminal while it trains: loss, speed, memory, failures
slurm: ## submit a SLURM job that saves, requeues and resumes (NODES=4 GPUS=8 RECIPE= SBATCH="--partition=x" SWEEP=file)
status: ## show the status of the job of RUN=runs/x
cancel: ## end the job of RUN=runs/x after a save (ARGS=--now: immediately)
show: ## print command, environment and arguments without starting anything (make show lora GPUS=2 ...)
doctor: ## check this machine for problems that break or slow down a run, with fixes (NODES= ARGS=--json)
plan: ## find the fastest setting that fits, without weights or GPU (MODEL= GPUS= NODES= GPU_TYPE=h100-80g METHOD=auto)
calibrate: ## measure this machine's GPU in three minutes; plans then use the measured rates
batch-size: ## find the largest micro batch that fits by running steps on the longest rows (RECIPE= GPUS= MODEL= DATA= ARGS=)
data: ## show the training rows (DATA= MODEL= ARGS=): lengths, loss spans, repeated rows

reproduce: $(STAMP) ## train and score a published recipe, next to its published scores: RECIPE=zephyr-sft (GPUS= ARGS=--dry)
	@$(FROM_SRC) $(WITH_FLAGS) $(PY) examples/reproduce/run.py

# --- repository only: `zerofit init` copies the part above ---
.PHONY: install gpu-first plan-validate ledger lint test test-gpu test-cluster test-all test-versions models reliability
.PHONY: everything bench-peers clean docs-serve site examples image image-cpu wheelhouse sbom audit
install: ## install into .venv (PYTHON=python3.12) or the active environment (ENV=active); EXTRAS=dev
	@rm -f "$(STAMP)"; $(MAKE) --no-print-directory "$(STAMP)"

plan-validate: $(STAMP) ## compare plans with real runs (GPU: the allocator; CPU: every tensor)
	@$(WITH_FLAGS) $(PY) benchmarks/plan.py

ledger: $(STAMP) ## measure each memory technique against its claim (MODEL= GPUS= SEQ= ARGS="--rounds 5")
	@$(WITH_FLAGS) $(PY) benchmarks/ledger.py

lint: $(DEV_STAMP) ## check code, types, workflows and the Dockerfile
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy && $(PY) tests/wording.py
	@$(PREFIX)/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@! command -v hadolint >/dev/null || hadolint Dockerfile
	@! command -v actionlint >/dev/null || actionlint

test: $(DEV_STAMP) ## run the tests, three files in parallel (real DeepSpeed on two CPU processes)
	@$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-gpu: $(DEV_STAMP) ## run the tests that need a GPU (one is enough; 10 minutes)
	@ZEROFIT_TEST_GPU=1 $(PY) -m pytest

gpu-first: ## print the commands for the first minutes on a GPU machine
	@echo 'benchmarks/gpu/README.md: bash benchmarks/gpu/prepare.sh, then on the GPU machine bash benchmarks/gpu/first.sh'

test-cluster: $(DEV_STAMP) ## run the tests with several nodes and a real SLURM (root, Debian; installs packages)
	@tests/cluster/install.sh && tests/cluster/install_slurm.sh && $(PY) -m pytest -m cluster tests/cluster

test-all: $(DEV_STAMP) ## run all tests including the long matrix (hours)
	@$(PY) -m pytest -m 'not cluster and not gpu'

everything: $(DEV_STAMP) ## run every suite and benchmark on one commit into docs/evidence.md; continues (ARGS=--list)
	@$(WITH_FLAGS) $(PY) tests/everything.py

reliability: $(DEV_STAMP) ## count the faults, bad inputs and attacks in the tests (ARGS="--slow --write": into docs/reliability.md)
	@$(WITH_FLAGS) $(PY) benchmarks/reliability.py

examples: $(STAMP) ## plan every file of examples/ and write the tables of its README.md and of reproduce/
	@$(PY) examples/generate.py && $(PY) examples/reproduce/plans.py

docs-serve: $(DEV_STAMP) ## serve the docs at http://127.0.0.1:8000
	@$(PY) -m mkdocs serve

test-versions: $(DEV_STAMP) ## run the tests with the oldest and the newest allowed packages; writes docs/install.md (ARGS="--sets oldest")
	@$(WITH_FLAGS) $(PY) tests/versions.py

models: $(DEV_STAMP) ## test every class of transformers with a tiny model (ARGS="--kinds llama --again")
	@$(WITH_FLAGS) $(PY) tests/matrix/matrix.py

image: ## build a container image of this checkout for NVIDIA GPUs (IMAGE=zerofit:0.2.0)
	@docker build --target cuda --tag "$${IMAGE:-zerofit:$(VERSION)}" .

image-cpu: ## build an image for machines without a GPU (IMAGE=zerofit:0.2.0-cpu ARGS="--build-arg TORCH_INDEX=...")
	@$(WITH_FLAGS) docker build --target cpu --tag "$${IMAGE:-zerofit:$(VERSION)-cpu}" .

wheelhouse: $(DEV_STAMP) ## collect the wheels of zerofit and the tested set in wheelhouse/ for an offline installation
	@$(WHEEL) torch setuptools wheel && $(WHEEL) --no-build-isolation --find-links wheelhouse .

sbom: $(DEV_STAMP) ## write sbom.json (CycloneDX) of the tested set
	@$(PREFIX)/bin/uvx --from cyclonedx-bom==7.5.0 cyclonedx-py requirements constraints.txt --output-file sbom.json

audit: $(DEV_STAMP) ## check the tested set for known vulnerabilities
	@$(PREFIX)/bin/uvx pip-audit@2.10.1 --requirement constraints.txt --no-deps --disable-pip

site: $(DEV_STAMP) ## build the pages into site/, links checked
	@$(PY) -m mkdocs build --strict --quiet

bench-peers: $(STAMP) $(PEERS_STAMP) ## compare SFT and DPO losses and the data preparation speed with TRL in .venv-peers (ARGS=)
	@peers=.venv-peers/bin/python; $(PY) benchmarks/trl_parity.py --peers $$peers \
		&& $(PY) benchmarks/trl_dpo.py --peers $$peers && $(WITH_FLAGS) $(PY) benchmarks/data.py --peers $$peers

clean: ## remove .venv, .venv-peers and caches (runs/ stays)
	rm -rf .venv .venv-peers .venv-versions .pytest_cache .ruff_cache src/*.egg-info wheelhouse site

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/zerofit/__init__.py)

# --- installation: once, and again when the pins change ---
# Without it DeepSpeed's setup.py fails with MissingCUDAException on machines with a GPU driver but no CUDA toolkit.
WHEEL = DS_IGNORE_CUDA_DETECTION=1 $(PY) -m pip wheel --quiet --disable-pip-version-check -c constraints.txt --wheel-dir wheelhouse
# The active environment is not pinned: packages above the minimum versions are kept.
PIP = DS_IGNORE_CUDA_DETECTION=1 $(PY) -m pip install --quiet --disable-pip-version-check $(if $(filter active,$(ENV)),,-c constraints.txt)

$(STAMP): pyproject.toml constraints.txt
	@test "$(ENV)" = active || test -x "$(PY)" || $(PYTHON) -m venv "$(ENV)"
	@echo 'installing $(if $(filter active,$(ENV)),missing and outdated packages,the tested set from constraints.txt) into $(PREFIX)' \
		'(2.4 GB at most, more with CUDA; a few minutes, once)'
	@# torch goes first: DeepSpeed's build needs it, and its pin keeps the resolver from fetching another version.
	@echo '  1 of 2: torch, the largest part'
	@$(PIP) torch setuptools wheel
	@echo "  2 of 2: transformers, DeepSpeed, peft and their dependencies$${EXTRAS:+, with $$EXTRAS}"
	@$(PIP) -e ".$${EXTRAS:+[$$EXTRAS]}"
	@touch "$@"

$(DEV_STAMP): $(STAMP)
	@echo 'installing the test tools (pytest, ruff, ...)'
	@$(PIP) -e '.[dev]'
	@touch "$@"

# The peers use the same pins in a separate environment.
$(PEERS_STAMP): constraints.txt
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@echo 'installing TRL into .venv-peers (a few minutes, once)'
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch 'trl==1.16.*' transformers peft deepspeed
	@touch "$@"
