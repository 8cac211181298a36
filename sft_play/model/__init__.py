"""Layer 3: finds, loads, quantises and adapts the model."""
