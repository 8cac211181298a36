"""Locks of torch's extension builder: those of dead processes go, those of living ones stay."""

from __future__ import annotations

from pathlib import Path

from torch.utils.file_baton import FileBaton

from sft_play.launch.extension_locks import extension_folder, remove_abandoned_locks


def test_only_locks_that_nobody_holds_are_removed(tmp_path: Path) -> None:
    folders = [tmp_path / "torch_extensions" / "py311_cpu" / name for name in ("held", "left")]
    for folder in folders:
        folder.mkdir(parents=True)
    held = FileBaton(str(folders[0] / "lock"))
    assert held.try_acquire()
    (folders[1] / "lock").touch()  # as a process leaves it that was killed
    variables = {"XDG_CACHE_HOME": str(tmp_path)}
    assert remove_abandoned_locks(variables) == [folders[1] / "lock"]
    assert (folders[0] / "lock").exists() and not (folders[1] / "lock").exists()
    FileBaton(str(folders[1] / "lock")).wait()  # would not return otherwise
    held.release()
    assert remove_abandoned_locks(variables) == []
    assert remove_abandoned_locks({"HOME": str(tmp_path / "nobody")}) == []
    assert extension_folder({"TORCH_EXTENSIONS_DIR": "/x"}) == Path("/x")
