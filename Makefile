# Verbs only; every choice is made in src/zerofit. User values reach the shell as environment variables in double
# quotes, so spaces and quotes in them are safe.
SHELL := bash
.DEFAULT_GOAL := help

# --- what you can set (make sft GPUS=4 ZERO=3 ...) ---
GIVEN_GPUS := $(filter-out undefined,$(origin GPUS))
GIVEN_RECIPE := $(filter command% environment%,$(origin RECIPE))
GPUS ?= 1
ZERO ?=
OFFLOAD ?=
SP ?=
TP ?=
PP ?=
MODEL ?=
DATA ?=
CONFIG ?=
OUT ?=
ARGS ?=
PORT ?=
LAUNCHER ?= torchrun
RECIPE ?= sft
PYTHON ?= python3
ENV ?= .venv
EXTRAS ?=
SEQ ?=
GPU_TYPE ?=
METHOD ?=
HOST_MEMORY ?=
SBATCH ?=
SWEEP ?=
SETUP ?=
IMAGE ?=
NODE_RANK ?=
MASTER_ADDR ?=
JOIN_TIMEOUT ?=
INTERFACE ?=
HOSTS ?=
INCLUDE ?=
EXCLUDE ?=
NODES ?=
RUN ?=
TASKS ?=
FILE ?=
MERGE ?=
DTYPE ?=
FOR ?=
LLAMA_CPP ?=
VARIABLES := NODE_RANK MASTER_ADDR JOIN_TIMEOUT INTERFACE HOSTS INCLUDE EXCLUDE NODES SBATCH SWEEP SETUP IMAGE RUN TASKS FILE MERGE DTYPE FOR LLAMA_CPP GPUS ZERO OFFLOAD SP TP PP MODEL DATA CONFIG OUT ARGS PORT LAUNCHER EXTRAS SEQ GPU_TYPE METHOD HOST_MEMORY RECIPE
ON_COMMAND_LINE := $(foreach v,$(.VARIABLES),$(if $(filter command%,$(origin $v)),$v))
IN_ENVIRONMENT := $(foreach v,$(VARIABLES) PYTHON ENV,$(if $(filter environment%,$(origin $v)),$v))
# taken literally: a $ in a value stays a $
$(foreach v,$(VARIABLES),$(eval override $(v) := $$(value $(v))))
export $(VARIABLES)
export ZEROFIT_GOALS := $(MAKECMDGOALS)

# What each verb reads, with the other variables as given. A name on the command line that no verb, or none of those
# asked for, reads would leave its setting at the default, so it is refused.
OF_RECIPE := ZERO OFFLOAD SP TP PP MODEL DATA CONFIG OUT ARGS
OF_NODES := NODES $(if $(NODES),NODE_RANK MASTER_ADDR JOIN_TIMEOUT INTERFACE)
OF_HOSTS := INCLUDE EXCLUDE MASTER_ADDR JOIN_TIMEOUT INTERFACE
OF_PLACE := GPUS PORT HOSTS $(if $(HOSTS),$(OF_HOSTS),LAUNCHER $(OF_NODES))
READS_sft := $(OF_RECIPE) $(OF_PLACE)
READS_lora := $(READS_sft)
READS_dpo := $(READS_sft)
READS_pipeline := $(READS_sft)
READS_launch := $(READS_sft) RECIPE
READS_resume := RUN GPUS RECIPE ZERO OFFLOAD SP TP PP ARGS PORT LAUNCHER $(OF_NODES)
READS_export := RUN MERGE DTYPE FOR LLAMA_CPP OUT ARGS
READS_chat := RUN ARGS
READS_eval := RUN TASKS GPUS ARGS
READS_convert := FILE OUT ARGS
READS_report := RUN ARGS
READS_watch := RUN ARGS
READS_slurm := $(OF_RECIPE) RECIPE GPUS NODES SBATCH SWEEP SETUP IMAGE JOIN_TIMEOUT INTERFACE PORT
READS_status := RUN
READS_cancel := RUN ARGS
SHOWN := sft lora dpo pipeline launch data slurm
READS_show := $(if $(filter $(SHOWN),$(MAKECMDGOALS)),,$(READS_launch))
READS_doctor := GPUS NODES PORT OUT ARGS
READS_plan := $(OF_RECIPE) RECIPE GPUS NODES GPU_TYPE METHOD HOST_MEMORY
READS_batch-size := $(OF_RECIPE) RECIPE GPUS
READS_data := RECIPE MODEL DATA CONFIG OUT ARGS
READS_reproduce := RECIPE GPUS OUT ARGS
READS_install := EXTRAS
READS_ledger := MODEL GPUS SEQ ARGS
READS_plan-validate := ARGS
READS_reliability := ARGS
READS_test-versions := ARGS
READS_models := ARGS
READS_image := IMAGE
READS_image-cpu := IMAGE ARGS
READS_bench-peers := ARGS
# those that read nothing; `help` and files are not asked
$(foreach verb,calibrate gpu-first lint test test-gpu test-cluster test-all docs docs-serve examples clean wheelhouse sbom audit site,$(eval READS_$(verb) :=))
ASKED := $(foreach verb,$(MAKECMDGOALS),$(if $(filter undefined,$(flavor READS_$(verb))),,$(verb)))

INTERNAL := PYTHON ENV PY PIP PREFIX STAMP DEV_STAMP PEERS_STAMP
OF_MAKE := SHELL .SHELLFLAGS MAKE MAKEFLAGS MFLAGS MAKEFILES MAKESHELL VPATH CURDIR PATH
UNKNOWN_VARIABLES := $(filter-out $(VARIABLES) $(INTERNAL) $(OF_MAKE),$(ON_COMMAND_LINE))
UNREAD_VARIABLES := $(if $(ASKED),$(filter-out $(foreach verb,$(ASKED),$(READS_$(verb))),$(filter $(VARIABLES),$(ON_COMMAND_LINE))))
MAKE_VARIABLES := $(or $(wildcard src/zerofit/launch/make_variables.py),-m zerofit.launch.make_variables)
ifneq ($(UNKNOWN_VARIABLES)$(UNREAD_VARIABLES),)
$(foreach v,$(UNKNOWN_VARIABLES),$(eval override $(v) := $$(value $(v))))
# verb:variable for every variable that a verb reads, so that a refusal can say who does
READ_BY := $(foreach reads,$(filter READS_%,$(.VARIABLES)),$(addprefix $(reads:READS_%=%):,$($(reads))))
export ASKED READ_BY VARIABLES UNKNOWN_VARIABLES UNREAD_VARIABLES $(UNKNOWN_VARIABLES)
.PHONY: $(or $(MAKECMDGOALS),help)
$(or $(MAKECMDGOALS),help):
	@"$(PYTHON)" $(MAKE_VARIABLES)
else
# a variable may be exported for something else: each that is read is named
FROM_ENVIRONMENT := $(if $(ASKED),$(filter PYTHON ENV $(foreach verb,$(ASKED),$(READS_$(verb))),$(IN_ENVIRONMENT)))
export ZEROFIT_FROM_ENVIRONMENT := $(FROM_ENVIRONMENT)
$(if $(FROM_ENVIRONMENT),$(if $(shell "$(PYTHON)" $(MAKE_VARIABLES) --environment $(FROM_ENVIRONMENT)),))

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
unexport PYTHONDONTWRITEBYTECODE  # set in many containers; each process would compile all of zerofit again: 3 s

FROM_SRC = PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}"
# the command behind it gets the words of ARGS at its end, split as the recipes' flags are
WITH_ARGS = $(or $(wildcard $(PY)),"$(PYTHON)") $(MAKE_VARIABLES) --args="$$ARGS"
ZEROFIT = $(FROM_SRC) $(PY) -m zerofit
ZEROFIT_ARGS = $(FROM_SRC) $(WITH_ARGS) $(PY) -m zerofit
# one variable -> one flag of the same name; OUT is transformers' output_dir
KNOBS = $(if $(ZERO),--zero="$$ZERO") $(if $(OFFLOAD),--offload="$$OFFLOAD") $(if $(SP),--sp_size="$$SP") $(if $(TP),--tp_size="$$TP") $(if $(PP),--pp_size="$$PP") $(if $(MODEL),--model="$$MODEL") \
	$(if $(DATA),--data="$$DATA") $(if $(CONFIG),--config="$$CONFIG") $(if $(OUT),--output_dir="$$OUT")
# RECIPE= is a name of recipes/, or a recipe's .py file anywhere
PROGRAM = $(if $(filter %.py,$(RECIPE)),"$$RECIPE","recipes/$$RECIPE.py")
# `make show sft ...` shows what `make sft ...` would run
SHOW = $(if $(filter show,$(MAKECMDGOALS)),--show)
BETWEEN = $(if $(JOIN_TIMEOUT),--join_timeout="$$JOIN_TIMEOUT") $(if $(INTERFACE),--interface="$$INTERFACE")
# where it runs: on the hosts of HOSTS=, as one node of NODES=, or here
PLACE = $(if $(HOSTS),launchers/hostfile.sh --hosts="$$HOSTS" $(if $(INCLUDE),--include="$$INCLUDE") \
	$(if $(EXCLUDE),--exclude="$$EXCLUDE") $(if $(GIVEN_GPUS),--gpus="$$GPUS") $(if $(MASTER_ADDR),--master_addr="$$MASTER_ADDR") $(BETWEEN),\
	$(if $(filter-out 1,$(NODES)),launchers/multinode.sh --nnodes="$$NODES" --node_rank="$$NODE_RANK" --master_addr="$$MASTER_ADDR" $(BETWEEN),\
	launchers/local.sh) --gpus="$$GPUS" --launcher="$$LAUNCHER")
LAUNCH = PYTHON="$(PY)" $(PLACE) --port="$$PORT" --args="$$ARGS" $(SHOW)

.PHONY: help sft lora dpo pipeline launch convert resume export chat eval report watch slurm status cancel show doctor plan calibrate batch-size data reproduce
help: ## this list
	@echo 'zerofit: fine-tune language models with Accelerate and DeepSpeed ZeRO'
	@echo; grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'
	@echo; echo '  GPUS=n  ZERO=0|1|2|3  OFFLOAD=none|optimizer|all  SP=n  TP=n  PP=n  MODEL=folder-or-hub-id  DATA=file-folder-or-hub-id'
	@echo '  CONFIG=file.yaml  OUT=run-folder  ARGS="--any_flag value"  PORT=n  LAUNCHER=torchrun|accelerate|deepspeed'
	@echo '  several nodes: NODES=2 NODE_RANK=0 MASTER_ADDR=host0 on each, or HOSTS=hostfile on one (docs/multinode.md)'
	@echo; echo '  make sft GPUS=4 ZERO=3 MODEL=Qwen/Qwen3-8B DATA=data.jsonl'
	@echo '  flags: make sft ARGS=--help     every flag: make sft ARGS="--help all"'

sft: $(STAMP) ## fine-tune all weights (without MODEL and DATA: the bundled task)
	@$(LAUNCH) recipes/sft.py $(KNOBS)

lora: $(STAMP) ## fine-tune a LoRA adapter
	@$(LAUNCH) recipes/lora.py $(KNOBS)

dpo: $(STAMP) ## tune on preference pairs, after SFT (ARGS="--adapter lora --beta 0.1")
	@$(LAUNCH) recipes/dpo.py $(KNOBS)

pipeline: $(STAMP) ## fine-tune all weights, the layers cut into PP=2 stages: for slow links between nodes
	@$(if $(GIVEN_GPUS)$(filter-out 1,$(NODES)),,GPUS="$${PP:-2}";) $(LAUNCH) recipes/pipeline.py $(KNOBS)

launch: $(STAMP) ## train with a recipe of your own: RECIPE=my_sft.py (docs/own_recipes.md)
	@$(LAUNCH) $(PROGRAM) $(KNOBS)

resume: $(STAMP) ## resume RUN=runs/x from its latest valid checkpoint (GPUS= ZERO= OFFLOAD= SP= RECIPE= may differ, ARGS="--more flags")
	@test -n "$$RUN" || { echo 'zerofit: error: make resume: name the run folder with RUN=runs/...' >&2; exit 2; }
	@$(ZEROFIT) resume --launcher="$$LAUNCHER" \
		--port="$$PORT" $(if $(GIVEN_GPUS),--gpus="$$GPUS") $(if $(GIVEN_RECIPE),--recipe="$$RECIPE") --args="$$ARGS" $(if $(filter-out 1,$(NODES)),--nnodes="$$NODES" \
		--node_rank="$$NODE_RANK" --master_addr="$$MASTER_ADDR" $(BETWEEN)) "$$RUN" \
		$(if $(ZERO),--zero="$$ZERO") $(if $(OFFLOAD),--offload="$$OFFLOAD") $(if $(SP),--sp_size="$$SP") $(if $(TP),--tp_size="$$TP") \
		$(if $(PP),--pp_size="$$PP")

convert: $(STAMP) ## write FILE=theirs.yaml of axolotl, LLaMA-Factory, ms-swift, TRL ... in our names (OUT= ARGS="--gpus 8")
	@test -n "$$FILE" || { echo 'zerofit: error: make convert: name their YAML file with FILE=...' >&2; exit 2; }
	@$(ZEROFIT_ARGS) convert $(if $(OUT),--output="$$OUT") "$$FILE"

export: $(STAMP) ## write RUN=runs/x as a Hugging Face folder, compared with what was trained (MERGE=1 DTYPE=bf16 FOR=vllm OUT=)
	@test -n "$$RUN" || { echo 'zerofit: error: make export: name what to export with RUN=runs/...' >&2; exit 2; }
	@$(ZEROFIT_ARGS) export $(if $(filter-out 0,$(MERGE)),--merge) \
		$(if $(DTYPE),--dtype="$$DTYPE") $(if $(FOR),--for="$$FOR") $(if $(LLAMA_CPP),--llama_cpp="$$LLAMA_CPP") $(if $(OUT),--output_dir="$$OUT") "$$RUN"

chat: $(STAMP) ## chat with RUN=runs/x in the terminal (ARGS="--temperature 0.7")
	@test -n "$$RUN" || { echo 'zerofit: error: make chat: name what to talk to with RUN=runs/...' >&2; exit 2; }
	@$(ZEROFIT_ARGS) chat "$$RUN"

eval: $(STAMP) ## score RUN=runs/x and its base by lm-evaluation-harness: TASKS=gsm8k,my_tasks/ (GPUS=, EXTRAS=eval installs it)
	@test -n "$$RUN" -a -n "$$TASKS" || { echo 'zerofit: error: make eval: name RUN=runs/... and TASKS=..., names or folders' >&2; exit 2; }
	@$(ZEROFIT_ARGS) eval "$$RUN" --tasks="$$TASKS" $(if $(GIVEN_GPUS),--gpus="$$GPUS")

report: $(STAMP) ## write report.html of RUN=runs/x, or of several side by side: RUN="runs/a runs/b" (ARGS="--every 30")
	@test -n "$$RUN" || { echo 'zerofit: error: make report: name the run folders with RUN="runs/..."' >&2; exit 2; }
	@$(ZEROFIT_ARGS) report "$$RUN"

watch: $(STAMP) ## show RUN=runs/x in the terminal while it trains: loss, speed, memory, what broke
	@test -n "$$RUN" || { echo 'zerofit: error: make watch: name the run folder with RUN=runs/...' >&2; exit 2; }
	@$(ZEROFIT_ARGS) watch "$$RUN"

slurm: $(STAMP) ## submit a SLURM job that saves, is requeued and resumes (NODES=4 GPUS=8 RECIPE= SBATCH="--partition=x" SWEEP=file)
	@$(ZEROFIT) slurm --nodes="$${NODES:-1}" --gpus="$$GPUS" \
		--sbatch="$$SBATCH" --sweep="$$SWEEP" --setup="$$SETUP" --image="$$IMAGE" \
		$(if $(JOIN_TIMEOUT),--join_timeout="$$JOIN_TIMEOUT") --interface="$$INTERFACE" --port="$$PORT" --args="$$ARGS" $(if $(SHOW),--print) $(PROGRAM) $(KNOBS)

status: $(STAMP) ## show how the job of RUN=runs/x stands
	@test -n "$$RUN" || { echo 'zerofit: error: make status: name the run folder with RUN=runs/...' >&2; exit 2; }
	@$(ZEROFIT) status "$$RUN"

cancel: $(STAMP) ## end the job of RUN=runs/x after a save (ARGS=--now: at once)
	@test -n "$$RUN" || { echo 'zerofit: error: make cancel: name the run folder with RUN=runs/...' >&2; exit 2; }
	@$(ZEROFIT_ARGS) cancel "$$RUN"

show: $(STAMP) ## print command, environment and arguments (make show lora GPUS=2 ...) without starting anything
	@$(if $(filter $(SHOWN),$(MAKECMDGOALS)),true,$(LAUNCH) $(PROGRAM) $(KNOBS))

doctor: $(STAMP) ## check what would break or slow down a run on this machine, with fixes (NODES= ARGS=--json)
	@$(ZEROFIT_ARGS) doctor \
		$(if $(filter-out 1,$(GPUS)),--gpus="$$GPUS") $(if $(PORT),--port="$$PORT") $(if $(OUT),--output_dir="$$OUT") $(if $(NODES),--nodes="$$NODES")

plan: $(STAMP) ## find the fastest setting that fits, without weights or GPU (MODEL= GPUS= NODES= GPU_TYPE=h100-80g METHOD=auto)
	@$(ZEROFIT) plan --recipe="$$RECIPE" --gpus="$$GPUS" \
		--nodes="$$NODES" --gpu_type="$$GPU_TYPE" --method="$$METHOD" --host_memory="$$HOST_MEMORY" --args="$$ARGS" --output_dir="$$OUT" $(filter-out --output_dir%,$(KNOBS))

calibrate: $(STAMP) ## measure this machine's GPU in three minutes: plans use its rates, kept in the cache folder
	@$(ZEROFIT) calibrate

batch-size: $(STAMP) ## find the largest micro batch that fits, by real steps on the longest rows (RECIPE= GPUS= MODEL= DATA= ARGS=)
	@$(ZEROFIT) batch-size --recipe="$$RECIPE" --gpus="$$GPUS" \
		--args="$$ARGS" $(KNOBS)

data: $(STAMP) ## show what a run would train on (DATA= MODEL= ARGS=): lengths, loss spans, repeated rows
	@$(ZEROFIT) data --recipe="$$RECIPE" --args="$$ARGS" \
		$(if $(MODEL),--model="$$MODEL") $(if $(DATA),--data="$$DATA") $(if $(CONFIG),--config="$$CONFIG") \
		$(if $(OUT),--output_dir="$$OUT") $(SHOW)

reproduce: $(STAMP) ## train and score a published recipe, beside its published scores: RECIPE=zephyr-sft (GPUS= ARGS=--dry)
	@test -n "$(GIVEN_RECIPE)" || { echo 'zerofit: error: make reproduce: name a folder of examples/reproduce with RECIPE=...' >&2; exit 2; }
	@$(FROM_SRC) $(WITH_ARGS) $(PY) examples/reproduce/run.py --gpus="$$GPUS" \
		$(if $(OUT),--output_dir="$$OUT") "$$RECIPE"

# --- of the repository; `zerofit init` lays down what stands above ---
.PHONY: install gpu-first plan-validate ledger lint test test-gpu test-cluster test-all test-versions models reliability bench-peers clean docs
.PHONY: docs-serve site examples image image-cpu wheelhouse sbom audit
install: ## install into .venv (PYTHON=python3.12) or the active environment (ENV=active); EXTRAS=dev
	@rm -f "$(STAMP)"; $(MAKE) --no-print-directory "$(STAMP)"

plan-validate: $(STAMP) ## compare plans with real runs (GPU: the allocator; CPU: every tensor)
	@$(WITH_ARGS) $(PY) benchmarks/plan.py

ledger: $(STAMP) ## measure each memory technique beside its claim (MODEL= GPUS= SEQ= ARGS="--rounds 5")
	@$(WITH_ARGS) $(PY) benchmarks/ledger.py $(if $(MODEL),--model="$$MODEL") $(if $(filter-out 1,$(GPUS)),--gpus="$$GPUS") \
		$(if $(SEQ),--seq="$$SEQ")

lint: $(DEV_STAMP) ## ruff; the workflows by their schema, the Dockerfile by hadolint
	@$(PY) -m ruff check . && $(PY) -m ruff format --check .
	@$(PREFIX)/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@! command -v hadolint >/dev/null || hadolint Dockerfile
	@! command -v actionlint >/dev/null || actionlint

test: $(DEV_STAMP) ## run the tests, three files at a time: much of a test waits (real DeepSpeed on two CPU processes)
	@$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-gpu: $(DEV_STAMP) ## run the tests that need a GPU (one is enough; 10 minutes)
	@ZEROFIT_TEST_GPU=1 $(PY) -m pytest

gpu-first: ## name what to run in the first minutes on a GPU machine
	@echo 'benchmarks/gpu/README.md: bash benchmarks/gpu/prepare.sh, then on the GPU machine bash benchmarks/gpu/first.sh'

test-cluster: $(DEV_STAMP) ## run the tests with several nodes and a real SLURM (root, Debian; installs what they need)
	@tests/cluster/install.sh && tests/cluster/install_slurm.sh && $(PY) -m pytest -m cluster tests/cluster

test-all: $(DEV_STAMP) ## run the long matrix too, each recipe in a fresh interpreter
	@$(PY) -m pytest --isolated -m 'not cluster and not gpu'

reliability: $(DEV_STAMP) ## count faults, bad inputs and attacks that the tests try (ARGS="--slow --write": into docs/reliability.md)
	@$(WITH_ARGS) $(PY) benchmarks/reliability.py

docs: $(STAMP) ## write the pages that are made from the code (docs/flags.md, docs/code.md)
	@$(PY) docs/generate.py

examples: $(STAMP) ## plan every file of examples/ and write the tables of its README.md and of reproduce/
	@$(PY) examples/generate.py && $(PY) examples/reproduce/plans.py

docs-serve: $(DEV_STAMP) ## serve the pages at http://127.0.0.1:8000
	@$(PY) docs/generate.py && $(PY) -m mkdocs serve

test-versions: $(DEV_STAMP) ## run the tests with the oldest and the newest allowed packages; writes docs/install.md (ARGS="--sets oldest")
	@$(WITH_ARGS) $(PY) tests/versions.py

models: $(DEV_STAMP) ## try every class of transformers with a tiny model; writes docs/models.md (ARGS="--kinds llama --again")
	@$(WITH_ARGS) $(PY) tests/matrix/matrix.py

image: ## build a container image of this checkout for NVIDIA GPUs (IMAGE=zerofit:0.2.0)
	@docker build --target cuda --tag "$${IMAGE:-zerofit:$(VERSION)}" .

image-cpu: ## build one for machines without a GPU (IMAGE=zerofit:0.2.0-cpu ARGS="--build-arg TORCH_INDEX=...")
	@$(WITH_ARGS) docker build --target cpu --tag "$${IMAGE:-zerofit:$(VERSION)-cpu}" .

wheelhouse: $(DEV_STAMP) ## gather the wheels of the tested set and of zerofit in wheelhouse/, to install without a network
	@$(WHEEL) torch setuptools wheel && $(WHEEL) --no-build-isolation --find-links wheelhouse .

sbom: $(DEV_STAMP) ## write sbom.json (CycloneDX) of the tested set
	@$(PREFIX)/bin/uvx --from cyclonedx-bom==7.5.0 cyclonedx-py requirements constraints.txt --output-file sbom.json

audit: $(DEV_STAMP) ## look up known vulnerabilities of the tested set
	@$(PREFIX)/bin/uvx pip-audit@2.10.1 --requirement constraints.txt --no-deps --disable-pip

site: $(DEV_STAMP) ## build the pages into site/, links checked
	@$(PY) docs/generate.py && $(PY) -m mkdocs build --strict --quiet

bench-peers: $(STAMP) $(PEERS_STAMP) ## compare losses of SFT and DPO, then the speed of preparing data (ARGS=), with TRL in .venv-peers
	@peers=.venv-peers/bin/python; $(PY) benchmarks/trl_parity.py --peers $$peers \
		&& $(PY) benchmarks/trl_dpo.py --peers $$peers && $(WITH_ARGS) $(PY) benchmarks/data.py --peers $$peers

clean: ## remove .venv, .venv-peers and caches (runs/ stays)
	rm -rf .venv .venv-peers .venv-versions .pytest_cache .ruff_cache src/*.egg-info wheelhouse site

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/zerofit/__init__.py)

# --- installation: once, and again when the pins change ---
# DeepSpeed's sdist is pure Python here, but its setup.py would look for the CUDA toolkit wherever a GPU is visible and end
# in MissingCUDAException on a machine that has a driver only.
WHEEL = DS_IGNORE_CUDA_DETECTION=1 $(PY) -m pip wheel --quiet --disable-pip-version-check -c constraints.txt --wheel-dir wheelhouse
# into the active environment without pins: what is there and above the floors stays
PIP = DS_IGNORE_CUDA_DETECTION=1 $(PY) -m pip install --quiet --disable-pip-version-check $(if $(filter active,$(ENV)),,-c constraints.txt)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'zerofit: error: Python 3.11 or newer is needed; name one with PYTHON=...' >&2; exit 2; }
	@test "$(ENV)" = active || test -x "$(PY)" || $(PYTHON) -m venv "$(ENV)"
	@echo 'installing $(if $(filter active,$(ENV)),what is missing or below its floor,the tested set from constraints.txt) into $(PREFIX) (2.4 GB at most, more with CUDA; a few minutes, once)'
	@# torch first: DeepSpeed's build looks for it, and a pinned torch keeps the resolver from fetching another
	@echo '  1 of 2: torch, the largest part'
	@$(PIP) torch setuptools wheel
	@echo "  2 of 2: transformers, DeepSpeed, peft and what they need$${EXTRAS:+, with $$EXTRAS}"
	@$(PIP) -e ".$${EXTRAS:+[$$EXTRAS]}"
	@touch "$@"

$(DEV_STAMP): $(STAMP)
	@echo 'installing what the tests need (pytest, ruff, ...)'
	@$(PIP) -e '.[dev]'
	@touch "$@"

# what zerofit is measured against: the same pins, and never in zerofit's own environment
$(PEERS_STAMP): constraints.txt
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@echo 'installing TRL into .venv-peers (a few minutes, once)'
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch 'trl==1.16.*' transformers peft
	@touch "$@"
endif
