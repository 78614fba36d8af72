# Two commands do all the set-up: `make demo` and `make test`. Each builds .venv from the pinned locks by itself.
PYTHON ?= python3
VENV := .venv
# Which lock an environment was made from stands in its .ready, and stays: another one is not laid over it.
HELD := $(shell test ! -e $(VENV)/.ready || cat $(VENV)/.ready)
LOCK ?= $(or $(HELD),requirements/cpu.txt)
BIN := $(VENV)/bin
TOPIC ?= Does GRPO learn one-digit sums faster with a learning rate of 4e-5 than with 1e-5?
BENCHES := boot episode_end run_switch grpo_step tree_training async_overlap gateway_overhead swarm_scale false_positives
STUDY_PINS := $(wildcard studies/*/requirements.txt)
PIP := $(BIN)/python -m pip install -qq --no-deps --disable-pip-version-check

.PHONY: demo test test-all check bench setup verl format clean

demo: $(VENV)/.ready  ## a whole study on this machine: no API key, no service
	$(BIN)/researcher start --topic "$(TOPIC)"

# Processes that tests run in.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder --durations=15

test: $(VENV)/.dev-ready  ## every capability, in 20 minutes on two cores; a campaign runs when it is named: pytest PATH::TEST
	$(PYTEST) -m "not campaign"

test-all: $(VENV)/.dev-ready  ## every test that this machine can run: the slow campaigns as well
	$(PYTEST)

check: $(VENV)/.dev-ready  ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Not among them: `learning` (hours; `python -m bench.learning --what NAME`) and `train_floor`, which grpo_step runs itself.
# grpo_step makes .venv-trl from requirements/trl.txt at its first run, and downloads what is pinned there.
bench: $(VENV)/.dev-ready  ## the benchmarks of BENCHES; fails where a ratio is worse than its kept result (docs/performance.md)
	@$(BIN)/python -m bench.gate $(BENCHES)

setup: $(VENV)/.dev-ready

format: $(VENV)/.dev-ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

ifneq ($(filter-out $(LOCK),$(HELD)),)
$(error $(VENV) was made from $(HELD), not from $(LOCK): `make clean` first, without LOCK)
endif

$(VENV)/.ready: $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@test $(notdir $(LOCK)) != cpu.txt || ! $(BIN)/python -c 'from importlib.metadata import version; version("vllm")' >/dev/null 2>&1 || \
		{ echo "$(VENV) holds vLLM's CUDA build, which $(LOCK) has not: make $(MAKECMDGOALS) LOCK=requirements/gpu.txt" >&2; exit 1; }
	@echo "Setting up .venv from $(LOCK) (about three minutes, 4 GB) ..."
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) -r $(LOCK)
	@$(PIP) --no-build-isolation -e .
	@echo $(LOCK) > $@

$(VENV)/.dev-ready: $(VENV)/.ready $(VENV)/.verl-ready requirements/dev.txt $(STUDY_PINS)
	@$(PIP) -r requirements/dev.txt $(addprefix -r ,$(STUDY_PINS))
	@touch $@

verl: $(VENV)/.verl-ready  ## what `swarm serve --engine verl` needs beside the rest (0.4 GB)

$(VENV)/.verl-ready: $(VENV)/.ready requirements/verl.txt requirements/ray.txt
	@$(PIP) -r requirements/verl.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-*
