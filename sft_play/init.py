"""`sft-play init`: write a Makefile, presets, examples and documents into an empty folder, for installations without a
clone.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sft_play.config.layers import SHIPPED
from sft_play.errors import UserError
from sft_play.files import write_text

if TYPE_CHECKING:
    from sft_play.config.call import Call

INDEX, FOLDERS = "README.md", ("configs", "deepspeed", "examples", "docs")
"""`docs` is included since hints name its pages and the examples link to them."""
NEXT = "make quickstart\n  make plan CONFIG=configs/run_bnb.yaml HARDWARE=24GB"
MAKEFILE = r"""# Written by `sft-play init`: `make COMMAND NAME=value ...` is `sft-play COMMAND NAME=value ...` in the
# environment named below.
MAKEFLAGS += --no-builtin-rules --no-print-directory
override SHELL := /bin/bash
.DEFAULT_GOAL := help
# Python reads the variables that you typed from MAKEFLAGS verbatim; make must not expand them.
override typed := $(foreach v,$(.VARIABLES),$(if $(filter command%,$(origin $(v))),$(v)))
$(foreach v,$(typed),$(eval unexport $(v)))
$(if $(filter PYTHON VENV,$(typed)),$(error \
  this Makefile takes no PYTHON and no VENV: run `sft-play init` of the other environment))
.PHONY: FORCE
$(MAKEFILE_LIST): ;
%: FORCE
	@PYTHON -P -m sft_play $@ --from-make
"""


def main(_: Call) -> int:
    """Write the files and print what to type next. Raise `UserError` if one of them exists already."""
    taken = [name for name in ("Makefile", INDEX, *FOLDERS) if Path(name).exists()]
    if taken:
        raise UserError(
            f"`{taken[0]}` exists already, and your files are not replaced", hint="run it in an empty folder"
        )
    for name in FOLDERS:
        shutil.copytree(SHIPPED / name, name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(SHIPPED / INDEX, INDEX)
    write_text(Path("Makefile"), MAKEFILE.replace("PYTHON -P", f"{shlex.quote(sys.executable).replace('$', '$$')} -P"))
    print(f"wrote Makefile, {INDEX}, {', '.join(f'{name}/' for name in FOLDERS)}. Next:\n  {NEXT}")
    return 0
