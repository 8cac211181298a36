"""Scoring: loss of held-out rows, generated answers and their scores, and comparing them."""
