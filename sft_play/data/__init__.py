"""Layer 3: from files to token rows with exact label masks, and from rows to batches."""
