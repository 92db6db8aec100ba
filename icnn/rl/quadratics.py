"""Normalized advantage functions (Gu et al., 2016): `-Q` is a quadratic of the action."""

from copy import copy
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from icnn.rl.critics import normalised, shared, worst
from icnn.rl.parts import Parts


@dataclass(frozen=True)
class Quadratics:
    """What a network of `icnn.rl.NAF` looks like.

        -Q(s, a) = (a - mu(s))' L(s) L(s)' (a - mu(s)) / 2 - V(s)

    Attributes:
        widths: Of layers that make features of the state.
        norm: Whether each has a norm.
    """

    widths: tuple[int, ...] = (200, 200)
    norm: bool = False

    def make(self, dim_state: int, dim_action: int, count: int) -> "QuadraticCritics":
        """Several networks, as one."""
        return QuadraticCritics(self, dim_state, dim_action, count)


class QuadraticCritics(nn.Module):
    """Networks of one form, with a leading dimension of networks as in `icnn.rl.critics`."""

    def __init__(self, form: Quadratics, dim_state: int, dim_action: int, count: int):
        super().__init__()
        self.form, self.dim_state, self.dim_action = form, dim_state, dim_action
        # V, mu, and L row by row: what a shorter action has stands first in each.
        outputs = 1, dim_action, dim_action * (dim_action + 1) // 2
        made: dict[str, Tensor] = {}
        self.parts: dict[str, Parts] = {}
        for i, (before, after) in enumerate(pairwise((dim_state, *form.widths, sum(outputs)))):
            bound = before**-0.5
            columns = (after,) if i < len(form.widths) else outputs
            self.parts |= {f"layer{i}": Parts((before,), columns)} | dict.fromkeys(
                (f"bias{i}", f"scale{i}", f"shift{i}"), Parts((1,), columns)
            )
            made[f"layer{i}"] = torch.empty(count, before, after).uniform_(-bound, bound)
            made[f"bias{i}"] = torch.empty(count, 1, after).uniform_(-bound, bound)
            if form.norm and i < len(form.widths):
                made[f"scale{i}"] = torch.ones(count, 1, after)
                made[f"shift{i}"] = torch.zeros(count, 1, after)
        self.weights = nn.ParameterDict(made)

    def at(self, states: Tensor) -> "QuadraticsAt":
        """All that depends on states alone, `(agents, B, dim_state)`."""
        weights, depth = self.weights, len(self.form.widths)
        count = len(weights["layer0"]) // len(states)
        u = states[:, None].expand(-1, count, -1, -1).flatten(end_dim=1)
        for i in range(depth + 1):
            u = torch.baddbmm(weights[f"bias{i}"], u, weights[f"layer{i}"])
            if i < depth:
                if self.form.norm:
                    u = normalised(u, weights[f"scale{i}"], weights[f"shift{i}"])
                u = u.relu()
        return QuadraticsAt(u.unflatten(0, (len(states), count)), self.dim_action)

    def project_(self) -> None:
        """Nothing must not be negative here."""


class QuadraticsAt:
    """At states; actions are `(agents, B, n)`, values `(agents, critics, B)`."""

    def __init__(self, out: Tensor, n: int):
        value, middle, entries = out.split([1, n, out.shape[-1] - 1 - n], dim=-1)
        rows, columns = torch.tril_indices(n, n, device=out.device)
        # L is lower triangular, with a diagonal above zero.
        entries = torch.where(rows == columns, entries.clamp(max=5).exp(), entries)
        factor = out.new_zeros(*out.shape[:-1], n * n)
        self.factor = factor.index_copy(-1, rows * n + columns, entries).unflatten(-1, (n, n))
        self.value, self.middle = value[..., 0], middle.tanh()
        self.shape = self.value.shape[:2]

    def values(self, actions: Tensor) -> Tensor:
        """Energies of all networks."""
        away = (actions[:, None] - self.middle)[..., None, :] @ self.factor
        return 0.5 * away.square().sum(dim=(-2, -1)) - self.value

    def worst(self, actions: Tensor) -> Tensor:
        """The largest energy of each agent's networks: the least `Q`."""
        return self.values(actions).amax(dim=1)

    @property
    def best(self) -> Tensor | None:
        """The minimiser, where there is one network: in closed form."""
        return self.middle[:, 0] if self.middle.shape[1] == 1 else None

    def slope(self, actions: Tensor) -> Tensor:
        """The gradient of `worst`."""
        return self.both(actions)[1]

    def both(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """`worst` and its gradient."""
        away = (actions[:, None] - self.middle)[..., None, :] @ self.factor
        slope = (away @ self.factor.mT)[..., 0, :]
        return worst(0.5 * away.square().sum(dim=(-2, -1)) - self.value, slope)

    def apart(self) -> "QuadraticsAt":
        """Each network at its own share of the states, as if it were an agent by itself."""
        own = copy(self)
        own.shape = torch.Size([self.shape.numel(), 1])
        own.factor, own.middle = (shared(t)[:, None] for t in (self.factor, self.middle))
        own.value = shared(self.value)[:, None]
        return own
