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
        free = self.bottom - slope / (entropy * self.weight)
        # Not `project`: at a bound itself, minima and maxima go half of the way with both.
        low, high = (torch.as_tensor(wide(b), dtype=free.dtype, device=free.device)
                     for b in (self.box.low, self.box.high))  # fmt: skip
        return torch.where(free <= low, low, torch.where(free >= high, high, free))

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


def bent(domain: Domain, f: EnergyAt, like: Tensor) -> tuple[EnergyAt, Bowl] | None:
    """What is to be cut of an energy, and a domain with its quadratic in the place of an entropy.

    For boxes, and weights above zero.
    """
    found = apart(f)
    if found is None or type(domain) is not Box:
        return None
    rest, quadratic = found
    quadratic.check(like)
    bottom, weight = (
        torch.as_tensor(part, dtype=torch.float64, device=like.device)
        for part in (quadratic.center, quadratic.weight)
    )
    if not bool((weight.isfinite() & (weight > 0)).all()):
        return None
    broken = ~bottom.isfinite()
    if bool(broken.any()):
        # What is no number for an example is left to the network to tell, if it does.
        lost = broken.expand(like.shape).flatten(start_dim=1).any(dim=1)
        with torch.no_grad():
            told = ~rest(like).isfinite()
        if bool((lost & ~told).any()):
            return None
        bottom = torch.where(broken, 0.0, bottom)
    return rest, Bowl(domain, bottom, weight)
