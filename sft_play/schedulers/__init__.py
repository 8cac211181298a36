"""Jobs for schedulers: a Slurm batch script, manifests for Kubernetes and a SkyPilot task, and the entry point of containers."""
