"""What compositions of energies are at a given `x`: their values, and their abilities."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from icnn.checks import check_batch, check_like, check_shape, check_tensor
from icnn.energies.energy import able
from icnn.energies.layers import NonNegative

Both = tuple[Tensor, Tensor]
"""Values `(B,)`, and their gradient in `y`."""


class ScoreAt:
    """`sum(slope * y)`."""

    def __init__(self, slope: Tensor):
        self.slope = slope

    def __call__(self, y: Tensor) -> Tensor:
        check_batch("y", y, self.slope.shape, like=self.slope)
        return per_example(y * self.slope)

    @torch.no_grad()
    def value_and_gradient(self, y: Tensor) -> Both:
        """Without a graph."""
        return self(y), self.slope.to(y.dtype, copy=True)

    def select(self, index: Tensor) -> "ScoreAt":
        """For some of its examples."""
        return ScoreAt(self.slope.index_select(0, index))


class QuadraticAt:
    """`0.5 * sum(weight * (y - center)^2)`; without a `batch` it has the same center for all."""

    def __init__(
        self,
        center: Tensor | float,
        weight: Tensor | float,
        batch: int | None,
        y_shape: Sequence[int] | None,
    ):
        self.center, self.weight, self.batch, self.y_shape = center, weight, batch, y_shape

    def check(self, y: Tensor) -> None:
        """A `y` that fits both numbers."""
        shape = check_tensor("y", y).shape[1:] if self.y_shape is None else self.y_shape
        check_shape("y", y, (self.batch, *(shape or (1,))))
        check_broadcast("weight", self.weight, shape)
        for part in (self.center, self.weight):
            if isinstance(part, Tensor) and part.ndim:
                check_like("y", y, part)

    def __call__(self, y: Tensor) -> Tensor:
        self.check(y)
        return 0.5 * per_example(self.weight * (y - self.center).square())

    @torch.no_grad()
    def value_and_gradient(self, y: Tensor) -> Both:
        """Without a graph."""
        self.check(y)
        # df/dy = weight . (y - center),    f = 0.5 sum (y - center) . df/dy
        away = y - self.center
        gradient = self.weight * away
        return 0.5 * per_example(away * gradient), gradient.to(y.dtype)

    def select(self, index: Tensor) -> "QuadraticAt":
        """For some of its examples."""
        if self.batch is None:
            return self
        assert isinstance(self.center, Tensor), "a center with a batch is what a network gave"
        center = self.center.index_select(0, index)
        return QuadraticAt(center, self.weight, len(index), self.y_shape)


class TermsAt:
    """Energies that make one; it has the abilities that all of them have."""

    def __init__(self, terms: Sequence[Any]):
        self.terms = terms

    def joined(self, both: list[Both]) -> Both:
        """Value and gradient, of those of the terms."""
        raise NotImplementedError

    @property
    def value_and_gradient(self) -> Callable[[Tensor], Both] | None:
        return self._both if able("value_and_gradient", self.terms) else None

    @property
    def select(self) -> "Callable[[Tensor], TermsAt] | None":
        return self._some if able("select", self.terms) else None

    @torch.no_grad()
    def _both(self, y: Tensor) -> Both:
        return self.joined([term.value_and_gradient(y) for term in self.terms])

    def _some(self, index: Tensor) -> "TermsAt":
        return type(self)([term.select(index) for term in self.terms])


class SumAt(TermsAt):
    """The sum of energies."""

    def __call__(self, y: Tensor) -> Tensor:
        return reduce(torch.add, [term(y) for term in self.terms])

    def joined(self, both: list[Both]) -> Both:
        values, gradients = zip(*both, strict=True)
        return reduce(torch.add, values), reduce(torch.add, gradients)


class MaxAt(TermsAt):
    """The pointwise maximum of energies."""

    def __call__(self, y: Tensor) -> Tensor:
        return reduce(torch.maximum, [term(y) for term in self.terms])

    def joined(self, both: list[Both]) -> Both:
        value, gradient = both[0]
        for other, slope in both[1:]:
            # The gradient of the larger; the mean of both where they are equal, as in PyTorch.
            share = (0.5 * ((other > value).to(value) + (other >= value).to(value))).to(slope)
            share = share.reshape(-1, *(1 for _ in slope.shape[1:]))
            gradient = torch.lerp(gradient, slope, share)
            value = torch.maximum(value, other)
        return value, gradient


class ScaleAt(TermsAt):
    """`c * energy`."""

    def __init__(self, c: Tensor | float, term: Any):
        super().__init__([term])
        self.c = c

    def __call__(self, y: Tensor) -> Tensor:
        return self.c * self.terms[0](y)

    def joined(self, both: list[Both]) -> Both:
        value, gradient = both[0]
        return self.c * value, self.c * gradient

    def _some(self, index: Tensor) -> "ScaleAt":
        return ScaleAt(self.c, self.terms[0].select(index))


def check_broadcast(argument: str, value: NonNegative | Tensor | float, shape: Sequence[int]):
    """A number, or a tensor that `y_shape` does not have to grow for."""
    own = value.raw.shape if isinstance(value, NonNegative) else getattr(value, "shape", ())
    fits = len(own) <= len(shape) and all(
        n in (1, m) for n, m in zip(reversed(own), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"`{argument}` must broadcast to y_shape {tuple(shape)}, got shape {tuple(own)}"
        )


def per_example(values: Tensor) -> Tensor:
    """Sum over all dimensions but the first: `(B, ...) -> (B,)`."""
    return values.flatten(start_dim=1).sum(dim=1)
