"""Layer 2: a pure function from configuration, hardware and facts to a plan with reasons. No torch."""
