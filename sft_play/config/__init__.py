"""Layer 1: from YAML, overrides and environment to a frozen `Config` in which every key knows its origin. No torch."""
