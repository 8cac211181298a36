"""SFT-Play: fine-tune a language model on whatever hardware you own, from one YAML file."""

__version__ = "0.2.0"
