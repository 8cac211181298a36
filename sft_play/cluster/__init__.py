"""Several machines over SSH from one terminal: the ordinary commands, typed on each of them.

`inventory` lists them, `ssh` runs commands on them. `check` compares what `make doctor` says on each, `bring` gives them
what they lack by rsync, `train` starts and shows the launchers.
"""
