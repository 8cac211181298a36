"""Layer 1: run folders, stamps, checkpoint manifests and discovery. No torch."""
