"""Score held-out rows by loss and by generated answers, and compare the scores of runs."""
