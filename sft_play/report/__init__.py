"""Show what a run did on one page: live (`make ui`), and as a file (`make report`). Only files are read."""
