"""Several machines over SSH from one terminal: checked, installed, started, watched, stopped.

`preflight` asks: each machine's own Python runs the text of `probe`, and `findings` judges what they say.

`train` acts: `task` is what was asked for, `elastic` chooses the machines that
`facts` finds fit, `sync` brings them what they lack (by rsync: `transfer`), and `session` holds one start together, through an `agent` for each
machine, at whose other end `remote`, `remote_processes` and `remote_launch` run; `board` shows it, and `cause` says what ended it first. `install`
makes the environments. `status` shows, follows and stops runs, also one in a `phase` before its start. `ssh` makes every command for another
machine; `children` ends the programs that a stopped command waits for.
"""
