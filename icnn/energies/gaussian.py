"""The energy of a Gaussian: all of its coordinates are coupled."""

from typing import Any

import torch
from torch import Tensor, nn

from icnn.checks import check_batch, check_like, check_shape, check_tensor
from icnn.energies.composed import Both
from icnn.energies.energy import Energy, EnergyAt
from icnn.energies.layers import frozen


class Gaussian(Energy):
    """`0.5 * |factor (y - mean)|^2`: what a Gaussian density is the exponential of, but for a sign.

    Its minimum over some coordinates, with the others given by `fixed`, is their mean given those.

    Args:
        mean: A tensor of shape `y_shape`.
        factor: A matrix of any height, with a column for each number in `y`: the precision, the
            inverse of the covariance, is `factor.T @ factor`. As in `icnn.Quadratic`, what is an
            `nn.Parameter` is learned; other tensors are constants.

    Examples:
        >>> energy = icnn.Gaussian(torch.zeros(2), torch.tensor([[2.0, -1.0]]))
        >>> given = (torch.tensor([[True, False]]), torch.tensor([[0.5, torch.nan]]))
        >>> box = icnn.Box(-2.0, 2.0)
        >>> icnn.argmin(energy, None, box, entropy=0, solver=icnn.Bundle(), fixed=given).y
        tensor([[0.5000, 1.0000]])
    """

    mean: Tensor
    factor: Tensor

    def __init__(self, mean: Tensor, factor: Tensor):
        super().__init__()
        check_tensor("mean", mean)
        if not mean.ndim:
            raise ValueError("`mean` must have the shape of `y`, got a single number")
        self.y_shape = tuple(mean.shape)
        check_tensor("factor", factor)
        check_shape("factor", factor, (None, mean.numel()))
        check_like("factor", factor, mean)
        for name, part in (("mean", mean), ("factor", factor)):
            if isinstance(part, nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part.detach().clone())

    def at(self, x: Any) -> EnergyAt:
        return GaussianAt(frozen(self.mean), frozen(self.factor))

    def extra_repr(self) -> str:
        return f"y_shape={self.y_shape}, rank={len(self.factor)}"


class GaussianAt:
    """The same for every example, whatever `x` is."""

    def __init__(self, mean: Tensor, factor: Tensor):
        self.mean, self.factor = mean, factor

    def __call__(self, y: Tensor) -> Tensor:
        check_batch("y", y, (None, *self.mean.shape), like=self.mean)
        return 0.5 * self.folded(y).square().sum(dim=1)

    def folded(self, y: Tensor) -> Tensor:
        """`factor (y - mean)`."""
        return (y - self.mean).flatten(start_dim=1) @ self.factor.mT

    @torch.no_grad()
    def value_and_gradient(self, y: Tensor) -> Both:
        """Without a graph."""
        check_batch("y", y, (None, *self.mean.shape), like=self.mean)
        # df/dy = factor^T factor (y - mean)
        folded = self.folded(y)
        return 0.5 * folded.square().sum(dim=1), (folded @ self.factor).reshape(y.shape).to(y.dtype)

    def select(self, index: Tensor) -> "GaussianAt":
        """For some of its examples."""
        return self
