"""What a run did, on one page: live (`make ui`) and as a file (`make report`). Reads files only; never talks to
workers.
"""
