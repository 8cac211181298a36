# One target = one `python -m sft_play COMMAND`. Python reads the variables that you typed out of MAKEFLAGS, letter for letter:
# neither make nor a shell ever expands their values. `make help` lists every target.
MAKEFLAGS += --no-builtin-rules --no-print-directory
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
# Lower-case names are this file's own: a variable that you type, such as RUN, must never change a recipe.
bin := $(VENV)/bin
program := @$(bin)/python -m sft_play
# Where `make test` looks: a folder, a file or a node id.
TESTS ?= tests

# Variables typed on the command line are exported to recipes, and expanded by that; this stops both.
$(foreach v,$(.VARIABLES),$(if $(filter command%,$(origin $(v))),$(eval unexport $(v))))

commands := quickstart config plan gpu-info memory-check doctor setup-accelerate train train-tb train-distributed \
	train-distributed-tb train-deepspeed train-deepspeed-tb train-fsdp resume eval infer merge serve bench tensorboard \
	tensorboard-stop help
.PHONY: $(commands) install test check test-all test-gpu bench-training format render

$(commands): $(VENV)/.runtime
	$(program) $@ --from-make

# A virtual environment with the pinned dependencies; made again when the pins are newer than it.
install: $(VENV)/.runtime

$(VENV)/.runtime: constraints.txt pyproject.toml
	@scripts/install.sh "$(PYTHON)" "$(VENV)" runtime

$(VENV)/.dev: $(VENV)/.runtime
	@scripts/install.sh "$(PYTHON)" "$(VENV)" dev

$(VENV)/.bench: $(VENV)/.dev
	@scripts/install.sh "$(PYTHON)" "$(VENV)" bench

test: $(VENV)/.dev
	@$(bin)/python -m pytest "$(TESTS)" -m "not long and not gpu"

check: $(VENV)/.dev
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@$(bin)/mypy
	@$(bin)/lint-imports --no-logo
	@$(bin)/python -m pytest tests/unit tests/contract -m "not long and not gpu and not slow"

test-all: $(VENV)/.bench
	@$(bin)/python -m pytest "$(TESTS)" -m "not gpu"

test-gpu: $(VENV)/.dev
	@$(bin)/python -m pytest "$(TESTS)" -m gpu

# Training speed and memory beside a plain transformers Trainer and TRL's SFTTrainer, as ratios of medians.
bench-training: $(VENV)/.bench
	@$(bin)/python -m benchmarks.training

# Writes every rendered file again: docs/configuration.md, configs/schema.json, accelerate_configs/, deepspeed/,
# the figures of docs/presets.md.
render: $(VENV)/.dev
	@$(bin)/python scripts/render_reference.py
	@$(bin)/python -m sft_play.launch.render
	@$(bin)/python scripts/render_presets.py

format: $(VENV)/.dev
	@$(bin)/ruff check --fix .
	@$(bin)/ruff format .
