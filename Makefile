# Everything runs in .venv, which the first target that needs it makes; later runs find it ready.
#
#   make demo                                   form a group, kill a rank under traffic, show how it healed
#   make test    PYTEST_ARGS="-k placement"     the tests
#   make chaos   SUBSET=ci                       every fear as a scenario, under load; SUBSET=ci: 3 minutes of them
#   make chaos-long HOURS=1 SEED=1              random faults for hours, minimised where one does harm
#   make bench                                  20 faults measured, written to docs/results/bench-cpu.json
#   make bench-gpu                              kills, refills, scaling and baselines on NVIDIA GPUs; see docs/results
#   make mutants                                faults put into copies of the code, each to be caught by a scenario
#   make bench-vllm                             a real vLLM with NIXL EP under healer, on two NVIDIA GPUs
#   make bench-inplace                          the same where a dead rank's slot is healed in place, without a restart
#   make bench-autoscale                        load rules in a closed loop, written to docs/results/autoscale.md
#   make bench-placement VLLM_PYTHON=/a/venv/with/vllm/bin/python
#                                               the placement planner beside DeepSeek's, written to docs/results/placement.md
#   make test-vllm VLLM_TESTS=slow              healing of vLLM 0.33's own servers on this CPU; without VLLM_TESTS the
#                                               shorter part. The first time it makes their environment, 2.6 GB
#   make lint    make clean
#
# Settings, for the run that makes .venv (after a change: make clean):
#   PYTHON=python3.12                                     an interpreter, 3.11 or newer
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu      an index with a smaller torch for machines without a GPU;
#                                                         by default torch comes from where pip takes all else

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help demo test test-vllm vllm-env lint chaos chaos-long mutants bench bench-autoscale bench-gpu bench-vllm bench-inplace \
	bench-placement clean
.NOTPARALLEL:

help:
	@sed -n 's/^#  *make /make /p' Makefile

demo: $(VENV)/.embedded
	@$(BIN)/healer demo $(DEMO_ARGS)

# What takes too long for every change, or needs a GPU or vLLM, is asked for by its mark: make test MARKS=slow
MARKS ?= not slow and not gpu and not vllm
test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "$(MARKS)" $(PYTEST_ARGS)

# An environment that exists already: make test-vllm VLLM_CPU=/a/folder
VLLM_CPU ?= .vllm-cpu
VLLM_TESTS ?= quick
vllm-env: $(VLLM_CPU)/.ready
$(VLLM_CPU)/.ready: | $(if $(SHARE),$(VENV)/.dev)
	chaos/vllm_cpu/make.sh $(VLLM_CPU)

test-vllm: $(VENV)/.dev $(VLLM_CPU)/.ready
	VLLM_CPU=$(abspath $(VLLM_CPU)) $(BIN)/python -m pytest -s tests/vllm/test_target_vllm.py tests/vllm/test_inplace_group.py \
		-m "vllm$(if $(filter slow,$(VLLM_TESTS)),, and not slow)" $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.embedded
	@$(BIN)/python -m chaos.bench $(BENCH_ARGS)

# On a machine with GPUs torch and NIXL EP are often there already, in versions that fit each other: GPU_PYTHON=python3.
GPU_PYTHON ?= $(BIN)/python
bench-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.embedded)
	@$(GPU_PYTHON) -m chaos.gpu_bench $(BENCH_ARGS)

CHAOS_OUT ?= chaos-runs/last
CHAOS_REPORT = status=$$?; $(BIN)/healer-chaos report $(CHAOS_OUT) || exit 1; exit $$status
chaos: $(VENV)/.dev
	@$(BIN)/healer-chaos run $(if $(SUBSET),--subset $(SUBSET)) --out $(CHAOS_OUT) $(CHAOS_ARGS); $(CHAOS_REPORT)

HOURS ?= 1
SEED ?= 1
chaos-long: $(VENV)/.dev
	@$(BIN)/healer-chaos run --random --hours $(HOURS) --seed $(SEED) --out $(CHAOS_OUT) $(CHAOS_ARGS); $(CHAOS_REPORT)

mutants: $(VENV)/.embedded
	@$(BIN)/python -m chaos.mutants $(MUTANTS_ARGS)

# On a machine with GPUs and vLLM 0.33: BENCH_ARGS="--vllm-python PATH" names its interpreter.
bench-vllm: $(VENV)/.embedded
	@$(BIN)/python -m chaos.vllm_gpu --out docs/results $(BENCH_ARGS)

bench-inplace: $(VENV)/.embedded
	@$(BIN)/python -m chaos.inplace_gpu --out docs/results $(BENCH_ARGS)

bench-autoscale: $(VENV)/.dev
	@$(BIN)/python -m chaos.closed_loop $(BENCH_ARGS)

bench-placement: $(VENV)/.dev
	@VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m elastic.placement.bench $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are files inside .venv: an installation that was interrupted leaves none and is done again.
$(VENV)/.embedded: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing the executor and the daemon into $(VENV); the first time this takes a minute or more"
	@$(INSTALL) -e '.[embedded]'
	@touch $@

$(VENV)/.dev: $(VENV)/.embedded
	@echo "installing the test tools into $(VENV)"
	@$(INSTALL) -e '.[embedded,dev]'
	@touch $@
