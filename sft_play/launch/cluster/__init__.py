"""Several machines over SSH from one terminal: checked, installed, started, watched, stopped."""
