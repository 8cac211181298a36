"""Every state of a run that is not weights: collected, written without pickle, and put back on any number of ranks.

- `pieces`: which range of which parameter stands where (arithmetic); `bundles`: where each strategy keeps it;
- `collecting`: `collect(trainer, clone=...)` and `States.write(folder)`; `restoring`: `restore(trainer, checkpoint)`;
- `facts` (scheduler, scaler, groups), `random_states`, `tensor_file` (writes safetensors), `shelf` (reads ranges of them).

- `apart`: what ranks keep that do not see rank 0's folder.

See docs/adr/0007-states-without-pickle.md.
"""

from sft_play.training.states.whole import States, collect, restore, restore_random

__all__ = ["States", "collect", "restore", "restore_random"]
