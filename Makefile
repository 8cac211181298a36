# One target = one `python -m sft_play COMMAND`. Python reads the variables that you typed out of MAKEFLAGS, letter for letter:
# neither make nor a shell ever expands their values. `make help` lists every target.
MAKEFLAGS += --no-builtin-rules --no-print-directory
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := @$(BIN)/python -m sft_play
# Where `make test` looks: a folder, a file or a node id.
TESTS ?= tests

# Variables typed on the command line are exported to recipes, and expanded by that; this stops both.
$(foreach v,$(.VARIABLES),$(if $(filter command%,$(origin $(v))),$(eval unexport $(v))))

COMMANDS := quickstart config plan gpu-info memory-check doctor setup-accelerate train train-tb train-distributed \
	train-distributed-tb train-deepspeed train-deepspeed-tb train-fsdp resume eval infer merge serve tensorboard tensorboard-stop help
.PHONY: $(COMMANDS) install test check test-all test-gpu bench-training format render

$(COMMANDS): $(VENV)/.runtime
	$(RUN) $@ --from-make

# A virtual environment with the pinned dependencies; made again when the pins are newer than it.
install: $(VENV)/.runtime

$(VENV)/.runtime: constraints.txt pyproject.toml
	@scripts/install.sh "$(PYTHON)" "$(VENV)" runtime

$(VENV)/.dev: $(VENV)/.runtime
	@scripts/install.sh "$(PYTHON)" "$(VENV)" dev

$(VENV)/.bench: $(VENV)/.dev
	@scripts/install.sh "$(PYTHON)" "$(VENV)" bench

test: $(VENV)/.dev
	@$(BIN)/python -m pytest "$(TESTS)" -m "not long and not gpu"

check: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m pytest tests/unit tests/contract -m "not long and not gpu and not slow"

test-all: $(VENV)/.bench
	@$(BIN)/python -m pytest "$(TESTS)" -m "not gpu"

test-gpu: $(VENV)/.dev
	@$(BIN)/python -m pytest "$(TESTS)" -m gpu

# Training speed and memory beside a plain transformers Trainer and TRL's SFTTrainer, as ratios of medians.
bench-training: $(VENV)/.bench
	@$(BIN)/python -m benchmarks.training

# Writes every rendered file again: docs/configuration.md, configs/schema.json, accelerate_configs/, deepspeed/.
render: $(VENV)/.dev
	@$(BIN)/python scripts/render_reference.py
	@$(BIN)/python -m sft_play.launch.render

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
