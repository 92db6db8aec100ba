"""Losses, as users import them: `icnn.losses.max_margin`, `icnn.losses.soft_f1`."""

from icnn.learning.losses import max_margin, soft_f1

__all__ = ["max_margin", "soft_f1"]
