"""Several machines over SSH from one terminal, each of which runs the ordinary commands.

`inventory` lists the machines and `ssh` runs commands on them. `check` compares the reports of `make doctor`, `bring`
copies what a machine lacks with rsync, and `train` starts the launchers and shows their output.
"""
