# One target = one `python -m sft_play COMMAND`. Python reads the variables that you typed out of MAKEFLAGS, letter for letter:
# neither make nor a shell ever expands their values. `make help` lists every target. Under `make -e` GNU make 4.3 hands no variable over:
# the commands refuse that.
MAKEFLAGS += --no-builtin-rules --no-print-directory
override SHELL := /bin/bash
.DEFAULT_GOAL := help

# Elsewhere paths would be that folder's; under `-B` make makes everything again, this file too.
override here := $(patsubst %/Makefile,%,$(realpath $(lastword $(MAKEFILE_LIST))))
ifneq ($(here),$(strip $(realpath .)))
$(error this Makefile works in its own folder only: type `make -C $(here) ...`, or in a Makefile of yours `$$(MAKE) -C $(here) ...`)
endif
ifneq ($(findstring B,$(firstword -$(MAKEFLAGS))),)
$(error `-B` would make everything again, this Makefile too: type `make -C $(here) ...` without it)
endif

# Names of what was typed on the command line, before `override` hides it.
override typed := $(foreach v,$(.VARIABLES),$(if $(filter command%,$(origin $(v))),$(v)))

PYTHON ?= python3
ifneq ($(filter environment%,$(origin VENV)),)
$(error `VENV` is in the environment: type `make ... VENV=$(value VENV)`, or `unset VENV`)
endif
VENV := .venv
# Lower-case names are this file's own, and `override` keeps them so: a variable that you type must never change a recipe.
override define newline


endef
override nothing :=
override blank := $(nothing) $(nothing)
override tab := $(nothing)	$(nothing)
override hash := \#
# `VENV` is part of targets' names: no letter there that make or the shell reads. `$(value)` is what was typed; nothing expands it.
override read_by_others := $$ " ' ` \ ; & | < > ( ) { } [ ] * ? ~ = : % $(hash)
override wrong := $(strip $(if $(value VENV),,empty) $(foreach c,$(read_by_others),$(findstring $c,$(value VENV))) \
	$(if $(filter -%,$(value VENV)),- at its beginning) $(foreach c,blank tab newline,$(if $(findstring $($c),$(value VENV)),$c)))
$(if $(wrong),$(error `VENV` is `$(value VENV)` (refused: $(wrong)); give a path without spaces and without letters that make or a shell reads))
# $(call quoted,NAME) is a variable's value for the shell, verbatim. A newline would begin another line of the recipe.
override quoted = '$(subst ','\'',$(if $(findstring $(newline),$(value $1)),$(error `$1` contains a newline; write it on one line),$(value $1)))'
override bin := $(VENV)/bin
override program := @$(bin)/python -m sft_play
# Three test processes; each keeps a file to itself, since the tests of a file share what they trained.
override pytest := @$(bin)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
# Where `make test` looks: a folder, a file or a node id.
TESTS ?= tests
# Steps of `make accept-gpu`, as `3,8-12`, all of them when empty; and its most seconds.
STEPS ?=
SECONDS ?= 600
# Rows of `make bench-preparation`.
ROWS ?= 200000

# Variables typed on the command line are exported to recipes, and expanded by that; this stops both.
$(foreach v,$(typed),$(eval unexport $(v)))

override commands := quickstart config plan data inspect gpu-info memory-check doctor setup-accelerate train train-tb train-distributed \
	train-distributed-tb train-deepspeed train-deepspeed-tb train-fsdp resume eval compare infer merge serve runs watch profile sweep report ui card push stop logs stamp bench tensorboard \
	tensorboard-stop cluster-check cluster-install train-cluster cluster-status cluster-logs cluster-stop slurm kubernetes init help
override others := install install-unsloth audit test test-ci test-oldest check test-all test-gpu accept-gpu bench-training bench-evaluation bench-saving bench-preparation format render
.PHONY: $(commands) $(others)

# A command refuses the variables that it does not know; without one, nobody would.
override files := $(filter %.yaml %.yml,$(MAKECMDGOALS))
$(if $(files),$(error `$(firstword $(files))` is no target: make $(firstword $(filter-out $(files),$(MAKECMDGOALS))) CONFIG=$(firstword $(files))))
ifneq ($(MAKECMDGOALS),)
ifeq ($(filter-out $(others),$(MAKECMDGOALS)),)
override unknown := $(filter-out PYTHON VENV $(if $(filter test test-ci test-all test-gpu,$(MAKECMDGOALS)),TESTS) \
	$(if $(filter bench-preparation,$(MAKECMDGOALS)),ROWS) $(if $(filter accept-gpu,$(MAKECMDGOALS)),STEPS SECONDS),$(typed))
$(if $(unknown),$(error `make $(MAKECMDGOALS)` takes no $(unknown)))
endif
endif

# With Unsloth's environment, where there is one: it too is made again when its pins are newer.
$(commands): $(VENV)/.runtime $(wildcard $(VENV)-unsloth/.installed)
	$(program) $@ --from-make

# What is no target is asked of the program, which knows the nearest name.
.DEFAULT:
	@if [ -x $(bin)/python ]; then exec $(bin)/python -m sft_play $(call quoted,@) --from-make; \
	else printf 'error: there is no target `%s`\n\nhint: `make help` lists all commands\n' $(call quoted,@) >&2; exit 2; fi

# A virtual environment with the pinned dependencies; made again when the pins are newer than it.
install: $(VENV)/.runtime
	@echo "installed; next: make quickstart, or: make plan CONFIG=configs/run_bnb.yaml HARDWARE=24GB"

$(VENV)/.runtime: constraints.txt pyproject.toml
	@scripts/install.sh $(call quoted,PYTHON) $(VENV) runtime

# Unsloth wants older transformers and datasets: an environment beside this one, which commands enter by themselves.
install-unsloth: $(VENV)-unsloth/.installed
	@echo "installed; next: make train CONFIG=run_unsloth"

$(VENV)-unsloth/.installed: $(VENV)/.runtime constraints-unsloth.txt
	@scripts/install.sh $(call quoted,PYTHON) $(VENV) unsloth

$(VENV)-oldest/.installed: $(VENV)/.dev constraints-oldest.txt
	@scripts/install.sh $(call quoted,PYTHON) $(VENV) oldest

$(VENV)/.dev: $(VENV)/.runtime
	@scripts/install.sh $(call quoted,PYTHON) $(VENV) dev

$(VENV)/.audit: $(VENV)/.runtime
	@scripts/install.sh $(call quoted,PYTHON) $(VENV) audit

$(VENV)/.bench: $(VENV)/.dev
	@scripts/install.sh $(call quoted,PYTHON) $(VENV) bench

override normal := not long and not gpu and not quiet

# Within eight minutes on two cores; TESTS= runs all of what it names.
test: $(VENV)/.dev
	$(pytest) $(call quoted,TESTS) -m "$(normal)$(if $(filter tests,$(value TESTS)), and not broad)"

test-ci: $(VENV)/.dev
	$(pytest) $(call quoted,TESTS) -m "$(normal)"

# With the oldest libraries that pyproject.toml promises: what reads, loads, plans, trains, saves and traces by them.
override oldest := tests/unit $(addprefix tests/contract/test_,data_command.py inspect.py plan_command.py plan_families.py presets.py source_refusals.py \
	unsloth.py) $(addprefix tests/numerics/test_,layouts.py loss.py model_load.py states.py trace.py varlen_training.py) \
	$(addprefix tests/distributed/test_,resume.py training_strategies.py)
test-oldest: $(VENV)-oldest/.installed
	@$(VENV)-oldest/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "$(normal) and not pinned" $(oldest)

check: $(VENV)/.dev
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@$(bin)/mypy
	@$(bin)/lint-imports --no-logo
	@$(bin)/python scripts/check_tree.py
	$(pytest) tests/unit tests/contract -m "$(normal) and not slow"

# Fails where a package has a hole, and (`--strict`) where no advisories of it could be asked for.
audit: $(VENV)/.audit
	@$(bin)/python -m pip_audit --requirement constraints.txt --no-deps --disable-pip --strict

# Every process is executed here, as a user starts it; `make test` forks most from one that has imported torch (tests/warm.py).
test-all: export SFT_PLAY_TEST_COLD = 1
test-all: $(VENV)/.bench
	$(pytest) $(call quoted,TESTS) -m "not gpu and not quiet"
	@$(bin)/python -m pytest $(call quoted,TESTS) -m quiet

test-gpu: $(VENV)/.dev
	@$(bin)/python -m pytest $(call quoted,TESTS) -m gpu -rs

# What only a real card can show, offline, in SECONDS; writes docs/benchmarks-gpu.md. STEPS=8-12 adds some steps to it.
accept-gpu: $(VENV)/.bench
	@$(bin)/python -m benchmarks.acceptance STEPS=$(call quoted,STEPS) SECONDS=$(call quoted,SECONDS)

# Training speed and memory compared with a plain transformers Trainer and TRL's SFTTrainer, as ratios of medians.
bench-training: $(VENV)/.bench
	@$(bin)/python -m benchmarks.training

# Answers a second compared with one-by-one and batched `generate`, as ratios of medians.
bench-evaluation: $(VENV)/.dev
	@$(bin)/python -m benchmarks.evaluation

# Seconds of a save, its share of a step, with and without verification.
bench-saving: $(VENV)/.dev
	@$(bin)/python -m benchmarks.saving

# Rows a second of `make data` compared with a plain `datasets.map(apply_chat_template)`; ROWS=20000 makes it shorter.
bench-preparation: $(VENV)/.dev
	@$(bin)/python -m benchmarks.preparation rows=$(call quoted,ROWS)

# Writes every rendered file again: docs/configuration.md, configs/schema.json, accelerate_configs/, deepspeed/,
# the figures of docs/presets.md.
render: $(VENV)/.dev
	@$(bin)/python scripts/render_reference.py
	@$(bin)/python scripts/render_launch_files.py
	@$(bin)/python scripts/render_presets.py

format: $(VENV)/.dev
	@$(bin)/ruff check --fix .
	@$(bin)/ruff format .
