"""Layer 2: renders what accelerate and DeepSpeed read, starts the workers and watches over them. No torch."""
