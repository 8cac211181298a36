"""Puts presets, examples and documents into the wheel, where `extends: run_bnb` and `sft-play init` find them."""

import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithShipped(build_py):
    """The package, and beside its modules what `config.layers.SHIPPED` names."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # setuptools keeps modules that no longer exist
        super().run()
        if not self.editable_mode:
            for name in ("configs", "deepspeed", "examples", "docs"):
                self.copy_tree(name, f"{self.build_lib}/sft_play/shipped/{name}")
            for name in ("README.md", "constraints-unsloth.txt"):
                self.copy_file(name, f"{self.build_lib}/sft_play/shipped")


setup(cmdclass={"build_py": BuildWithShipped})
