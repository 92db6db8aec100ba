"""Energies `f(x, y)` that are convex in `y` by construction."""
