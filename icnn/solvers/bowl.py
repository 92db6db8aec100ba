"""A quadratic of the energy in the place of the entropy: it is minimised as it is, without cuts.

Cuts of a curved function are many. In `Sum(network, Quadratic(...))` only the network needs them:
the quadratic is separable, and the minimum of it and a plane over a box is known in closed form.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icnn.energies.composed import QuadraticAt, SumAt
from icnn.energies.energy import Checked, EnergyAt
from icnn.kernels.ground import Ground, ground
from icnn.solvers.domains import Box, Domain, positive, total, wide


@dataclass(frozen=True, eq=False)
class Bowl:
    """A box whose entropy is `H(y) = -sum(weight * (y - bottom)^2) / 2`.

    Args:
        box: Where `y` lives.
        bottom: Broadcasts to `(B, *y_shape)`, as does
        weight: Above zero.
    """

    box: Box
    bottom: Tensor
    weight: Tensor

    def center(self, like: Tensor) -> Tensor:
        return self.box.project((torch.zeros_like(like) + self.bottom).to(like.dtype))

    def contains(self, y: Tensor) -> Tensor:
        return self.box.contains(y)

    def project(self, y: Tensor) -> Tensor:
        return self.box.project(y)

    def carry(self, y: Tensor) -> Tensor:
        return self.box.carry(y)

    def entropy(self, y: Tensor) -> Tensor:
        return -0.5 * total(self.weight * (y - self.bottom).square())

    def minimise(self, slope: Tensor, entropy: float | Tensor) -> Tensor:
        if not positive(entropy):
            return self.box.minimise(slope, 0.0)
        return self.box.project(self.bottom - slope / (entropy * self.weight))

    def curvature(self, y: Tensor, entropy: float | Tensor, slopes: Tensor) -> Tensor:
        inside = (y > wide(self.box.low)) & (y < wide(self.box.high))
        weight = torch.where(inside, 1 / (entropy * self.weight), 0.0).flatten(start_dim=1)
        return (slopes * weight[:, None, :]) @ slopes.mT

    def ground(self, like: Tensor) -> Ground:
        """The bowl as compiled kernels read it."""
        return ground(self.box.low, self.box.width, -1, like, self.bottom, self.weight)

    def radius(self, gap: Tensor, entropy: float, shape: torch.Size) -> Tensor:
        """`|u - u*|_2 <= sqrt(2 gap / bend)`, with the least curvature in `u`."""
        width = torch.as_tensor(self.box.width, dtype=torch.float64, device=gap.device)
        # A coordinate that is given does not move.
        bend = torch.where(width > 0, self.weight * width.square(), torch.inf)
        least = bend.expand(shape).flatten(start_dim=1).amin(dim=1)
        return (2 * gap / (entropy * least)).sqrt()


def apart(f: EnergyAt) -> tuple[EnergyAt, QuadraticAt] | None:
    """An energy as a quadratic and the rest, if it is such a sum."""
    f = bare(f)
    terms = list(f.terms) if isinstance(f, SumAt) else []
    place = next((i for i, term in enumerate(terms) if isinstance(bare(term), QuadraticAt)), None)
    if place is None or len(terms) < 2:
        return None
    found = bare(terms.pop(place))
    return (terms[0] if len(terms) == 1 else SumAt(terms)), found


def bare(f: EnergyAt) -> Any:
    """An energy without the checks around it."""
    return f.f if isinstance(f, Checked) else f


def bent(domain: Domain, quadratic: QuadraticAt, like: Tensor) -> Bowl | None:
    """A domain with a quadratic for its entropy: for boxes, and weights above zero."""
    if type(domain) is not Box:
        return None
    quadratic.check(like)
    bottom, weight = (
        torch.as_tensor(part, device=like.device).double()
        for part in (quadratic.center, quadratic.weight)
    )
    sound = bottom.isfinite().all() & weight.isfinite().all() & (weight > 0).all()
    return Bowl(domain, bottom, weight) if bool(sound) else None
