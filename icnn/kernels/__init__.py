"""The inner problems of the solvers, on tensors alone."""
