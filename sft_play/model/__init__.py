"""Layer 3: find, load, quantise and adapt the model."""

import logging

# PEFT imports bitsandbytes, which warns on a CPU about a missing kernel, and for int8 about a cast in every forward pass.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
