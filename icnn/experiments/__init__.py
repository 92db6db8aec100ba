"""One file an experiment: a frozen dataclass of settings and `run(settings) -> dict`."""
