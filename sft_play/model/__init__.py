"""Layer 3: find, load, quantise and adapt the model."""

import logging

# PEFT imports bitsandbytes, which warns on a CPU about a missing kernel, and about int8's cast in every forward pass.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
