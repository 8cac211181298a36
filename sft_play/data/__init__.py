"""Layer 3: from files to token rows with exact label masks, and from rows to batches."""

IGNORED = -100
"""Label or target that no loss is computed for; the value that `torch.nn.functional.cross_entropy` ignores."""
WEIGHTS = "weights"
"""Of rows and of batches: how much each label counts; left out where all count 1."""
