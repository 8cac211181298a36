"""Several machines over SSH from one terminal: checked, installed, started, watched, stopped.

`inventory` lists them, `ssh` runs commands on them, `hosts` talks with the program that is sent there as text (`probe`
and `remote`). `preflight` measures, `findings` judges what was measured. `task` is what `train-cluster` was asked for
and what comes before a run, `bring` gives machines what they lack by rsync, `train` starts and watches the launchers.
`install` makes environments; `status` shows, follows and stops runs.
"""
