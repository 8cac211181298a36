"""Jobs for schedulers: a Slurm batch script, manifests for Kubernetes, and the entry point of containers."""
