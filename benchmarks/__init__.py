"""One file a question; each prints a table of ratios measured in one run."""
