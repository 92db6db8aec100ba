"""Learning: losses on answers, and against them."""
