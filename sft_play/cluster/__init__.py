"""Several machines over SSH from one terminal: checked, installed, started, watched, stopped.

`preflight` asks: each machine's own Python runs the text of `probe`, and `findings` judges what they say.

`train` acts: `task` is what was asked for, `hosts` says which machines are fit and talks to a launcher on each (at the other end runs the text of
`remote`), `bring` gives them by rsync what they lack, `board` shows what they do. `install` makes the environments; `status` shows, follows and
stops runs. `ssh` makes every command for another machine.
"""
