"""Fixtures that several tiers share: a tiny model, and trained runs that every test reads and none changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from sft_play.runs.folder import RunFolder
from tests.tiny_models import build_tiny_llama
from tests.training_runs import Trial, make_run, must_train


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with untied embeddings, in fp32."""
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "llama", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose head is its embedding, in fp32."""
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tied")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Callable[[Trial], RunFolder]:
    """Trains a trial once a session, by real processes; the folder is for reading only."""
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def train(trial: Trial) -> RunFolder:
        return must_train(make_run(folder / f"run{len(list(folder.iterdir()))}", tiny_llama, trial))

    return train
