"""Minimising an energy over `y`, with a certificate."""
