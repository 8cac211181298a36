"""Measurements against other trainers; run by `make bench-training`."""
