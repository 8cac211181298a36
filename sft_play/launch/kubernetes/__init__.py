"""`make kubernetes`: manifests of a run for Kubernetes with and without operators, and a SkyPilot task, all from one plan."""
