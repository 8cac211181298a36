"""Exact memory of a training step: the real model and step under fake tensors, which have sizes and no content."""
