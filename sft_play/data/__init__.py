"""Layer 3: from files to token rows with exact label masks, and from rows to batches."""

from typing import Any

IGNORED = -100
"""Label or target that no loss is computed for; the value that `torch.nn.functional.cross_entropy` ignores."""
WEIGHTS = "weights"
"""Of rows and of batches: how much each label counts; left out where all count 1."""
Message = dict[str, Any]
"""`role` and `content`; optionally `train` (`False`: this turn is not learnt; between 0 and 1: how much its tokens
count), `tool_calls`, `tool_call_id`, `name`, `reasoning_content`."""
OPEN, CLOSE = "<think>", "</think>"
"""What encloses a thought where the template does not say: most families, and people's own data."""
