"""`make inspect`: prepared rows as a person can check them, in the terminal and as one page."""
