"""Layer 3: finds, loads, quantises and adapts the model."""

import logging

# PEFT imports bitsandbytes, which on a CPU warns of a kernel that it does without, and for int8 of a cast in every
# forward pass.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
