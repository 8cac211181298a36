"""Layer 3: the Trainer subclass, its callbacks, metrics, saving and loading."""
