"""Slurm: a batch script from the plan, and its submission."""
