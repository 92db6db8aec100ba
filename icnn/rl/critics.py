"""Networks `-Q(s, a)`, convex in the action: several of them at once, as one product of stacks.

All tensors have a leading dimension of networks: those of one agent, two as a rule, then those of
the next. So one agent and fifty go through the same lines. `energies()` gives each network as the
library's own; what is computed here is what they compute, in fewer and larger steps.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icnn.checks import check_choice
from icnn.energies.activations import smooth_plus
from icnn.energies.compose import Sum
from icnn.energies.energy import Energy, EnergyAt
from icnn.energies.picnn import PICNN, PartialLayer, XLayer
from icnn.rl.parts import Parts


class Encoded(Energy):
    """An energy of features: `energy(encoder(x), y)`, convex in `y` as the energy is."""

    def __init__(self, encoder: nn.Module, energy: Energy):
        super().__init__()
        self.encoder, self.energy, self.y_shape = encoder, energy, energy.y_shape

    def at(self, x: Any) -> EnergyAt:
        return self.energy.at(self.encoder(x))


class Bowl(Energy):
    """`0.5 * sum(exp(log_weight) * y^2)`."""

    def __init__(self, dim_y: int):
        super().__init__()
        self.y_shape = (dim_y,)
        self.log_weight = nn.Parameter(torch.full((dim_y,), 0.1).log())

    def forward(self, x: Any, y: Tensor) -> Tensor:
        return 0.5 * (self.log_weight.exp() * y.square()).sum(dim=1)


@dataclass(frozen=True)
class Form:
    """What a network looks like.

    Attributes:
        widths: Of layers that make features of the state, for gates to be made of. Without any,
            gates are made of the state itself, as in the paper.
        hidden: Widths of what is convex in the action, and of the layers of the state beside it.
        activation: "softplus" or "relu", of the convex part.
        norm: Whether each layer of the state has a norm: features do not grow with the state, and
            neither do gates made of them.
        bowl: Whether a square of the action is added, with a learned weight.
    """

    widths: tuple[int, ...] = ()
    hidden: tuple[int, ...] = (128, 128)
    activation: str = "softplus"
    norm: bool = True
    bowl: bool = True

    def __post_init__(self):
        check_choice("activation", self.activation, ["softplus", "relu"])
        if not self.hidden:
            raise ValueError("`hidden` must have at least one width, got none")

    def make(self, dim_state: int, dim_action: int, count: int) -> "Critics":
        """Several networks, as one."""
        return Critics(self, dim_state, dim_action, count)

    def energy(self, dim_state: int, dim_action: int) -> Energy:
        """One network, with new weights."""
        parts: list[nn.Module] = []
        for before, after in pairwise((dim_state, *self.widths)):
            parts += [nn.Linear(before, after)]
            parts += [nn.LayerNorm(after), nn.ReLU()] if self.norm else [nn.ReLU()]
        convex: Energy = PICNN(
            (dim_state, *self.widths)[-1], dim_action, self.hidden, activation=self.activation,
            x_norm="layer" if self.norm else None,
        )  # fmt: skip
        return Encoded(
            nn.Sequential(*parts), Sum(convex, Bowl(dim_action)) if self.bowl else convex
        )


PAPER_FORM = Form((), (200, 200), "relu", norm=False, bowl=False)


class Critics(nn.Module):
    """Networks of one form.

        u_0 = features(s),    u_{i+1} = relu(norm(V_i u_i))
        z_{i+1} = g(Wz_i (z_i * [gate_i(u_i)]_+) + Wy_i (a * gate_i'(u_i)) + W_i u_i + b_i)

    `V_i`, the gates and `W_i` are one matrix, a head of `u_i`.

    Args:
        form: Of each.
        dim_state: The length of a state.
        dim_action: The length of an action.
        count: How many networks.
    """

    def __init__(self, form: Form, dim_state: int, dim_action: int, count: int):
        super().__init__()
        self.form, self.dim_state, self.dim_action = form, dim_state, dim_action
        made = [
            {name: [upright(w.detach()) for w in there] for name, there in places(energy).items()}
            for energy in (form.energy(dim_state, dim_action) for _ in range(count))
        ]
        self.weights = nn.ParameterDict({
            name: torch.stack([torch.cat(one[name], dim=1) for one in made]) for name in made[0]
        })  # fmt: skip
        self.parts = {
            name: Parts(len(there[0]), tuple(w.shape[1] for w in there))
            for name, there in made[0].items()
        }

    def at(self, states: Tensor) -> "CriticsAt":
        """All that depends on states alone, `(agents, B, dim_state)`."""
        return CriticsAt(self.form, self.weights, states)

    @torch.no_grad()
    def project_(self) -> None:
        """Clip what must not be negative."""
        for name, weight in self.weights.items():
            if name.startswith("wz"):
                weight.clamp_(min=0)

    @torch.no_grad()
    def energies(self) -> list[Energy]:
        """Each network as the library knows it, with weights of its own."""
        like, found = self.weights["head0"], []
        for i in range(len(like)):
            energy = self.form.energy(self.dim_state, self.dim_action).to(like)
            for name, there in places(energy).items():
                columns = self.weights[name][i].split(self.parts[name].columns, dim=1)
                for weight, value in zip(there, columns, strict=True):
                    upright(weight.data).copy_(value)
            found.append(energy)
        return found


class CriticsAt:
    """At states: values and slopes of all networks.

    Actions are `(agents, B, n)`, values `(agents, critics, B)`.
    """

    def __init__(self, form: Form, weights: Any, states: Tensor):
        agents = states.shape[0]
        networks = len(weights["head0"])
        self.form, self.shape = form, (agents, networks // agents)
        self.act = smooth_plus if form.activation == "softplus" else F.relu
        u = self.spread(states)
        for i in range(len(form.widths)):
            u = torch.baddbmm(weights[f"bias_e{i}"], u, weights[f"encoder{i}"])
            if form.norm:
                u = normalised(u, weights[f"scale_e{i}"], weights[f"shift_e{i}"])
            u = u.relu()
        n, depth = weights["wy0"].shape[1], len(form.hidden)
        self.layers: list[tuple[Any, ...]] = []
        below = 0
        for i in range(depth + 1):
            width = form.hidden[i] if i < depth else 1
            out = torch.baddbmm(weights[f"bias{i}"], u, weights[f"head{i}"])
            next_u = width if i < depth else 0
            v, bias, gate_y, gate_z = out.split([next_u, width, n, below], dim=2)
            if i < depth:
                if form.norm:
                    v = normalised(v, weights[f"scale{i}"], weights[f"shift{i}"])
                u = v.relu()
            wz = weights[f"wz{i}"] if i else None
            self.layers.append((weights[f"wy{i}"], bias, gate_y, wz, gate_z.relu() if i else None))
            below = width
        # The last unit is one slope in z and one in a, for each example.
        wy, self.bias, gate_y, wz, gate_z = self.layers.pop()
        self.slope_y, self.slope_z = gate_y * wy.mT, gate_z * wz.mT
        self.bowl = weights["bowl"].exp() if form.bowl else None

    def spread(self, tensor: Tensor) -> Tensor:
        """What an agent has, for each of its networks: `(agents, B, k) -> (networks, B, k)`."""
        count = self.shape[1]
        if count == 1:
            return tensor
        return tensor[:, None].expand(-1, count, -1, -1).flatten(end_dim=1)

    def values(self, actions: Tensor) -> Tensor:
        """Energies of all networks."""
        a, z = self.spread(actions), actions
        for wy, bias, gate_y, wz, gate_z in self.layers:
            total = torch.baddbmm(bias, a * gate_y, wy)
            if wz is not None:
                total = torch.baddbmm(total, z * gate_z, wz)
            z = self.act(total)
        return self._total(a, z).unflatten(0, self.shape)

    def _total(self, a: Tensor, z: Any) -> Tensor:
        value = (z * self.slope_z).sum(dim=2) + (a * self.slope_y).sum(dim=2) + self.bias[..., 0]
        return value if self.bowl is None else value + 0.5 * (self.bowl * a * a).sum(dim=2)

    def worst(self, actions: Tensor) -> Tensor:
        """The largest energy of each agent's networks, `(agents, B)`: the least `Q`."""
        return self.values(actions).amax(dim=1)

    def slope(self, actions: Tensor) -> Tensor:
        """The gradient of `worst`, `(agents, B, n)`."""
        return self.both(actions)[1]

    @torch.no_grad()
    def both(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """`worst` and its gradient, without a graph."""
        a, z = self.spread(actions), actions
        slopes: list[Tensor] = []
        for wy, bias, gate_y, wz, gate_z in self.layers:
            total = torch.baddbmm(bias, a * gate_y, wy)
            if wz is not None:
                total = torch.baddbmm(total, z * gate_z, wz)
            slopes.append(total.sigmoid() if self.act is smooth_plus else (total > 0).to(a.dtype))
            z = self.act(total)
        gradient = self.slope_y if self.bowl is None else torch.addcmul(self.slope_y, self.bowl, a)
        back = self.slope_z
        for layer, slope in zip(reversed(self.layers), reversed(slopes), strict=True):
            wy, _, gate_y, wz, gate_z = layer
            back = back * slope
            gradient = torch.addcmul(gradient, back @ wy.mT, gate_y)
            if wz is not None:
                back = back @ wz.mT * gate_z
        each, slope = (t.unflatten(0, self.shape) for t in (self._total(a, z), gradient))
        if self.shape[1] == 1:
            return each[:, 0], slope[:, 0]
        value, top = each.max(dim=1, keepdim=True)
        return value[:, 0], slope.take_along_dim(top[..., None], dim=1)[:, 0]


def normalised(u: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A layer norm, with weights of each network."""
    return torch.addcmul(shift, F.layer_norm(u, u.shape[-1:]), scale)


def places(energy: Energy) -> dict[str, list[Tensor]]:
    """Weights of one network that stand beside each other, by the names that they have here."""
    assert isinstance(energy, Encoded)
    found: dict[str, list[Tensor]] = {}
    for kind, names in ((nn.Linear, ("encoder", "bias_e")), (nn.LayerNorm, ("scale_e", "shift_e"))):
        for i, layer in enumerate(m for m in energy.encoder.children() if isinstance(m, kind)):
            for name, weight in zip(names, (layer.weight, layer.bias), strict=True):
                found[f"{name}{i}"] = [weight]
    inner: Any = energy.energy.energies[0] if isinstance(energy.energy, Sum) else energy.energy
    below: list[Any] = [*inner.x_path, None]
    for i, (x_layer, layer) in enumerate(zip(below, inner.layers, strict=True)):
        assert isinstance(layer, PartialLayer)
        assert x_layer is None or isinstance(x_layer, XLayer)
        v = None if x_layer is None else x_layer.v
        linears = [m for m in (v, layer.wu, layer.wyu, layer.wzu) if m is not None]
        found[f"head{i}"] = [m.weight for m in linears]
        found[f"bias{i}"] = [m.bias for m in linears if m.bias is not None]
        found[f"wy{i}"] = [layer.wy.weight]
        if layer.wz is not None:
            found[f"wz{i}"] = [layer.wz.raw]
        if x_layer is not None and isinstance(x_layer.norm, nn.LayerNorm):
            found |= {f"scale{i}": [x_layer.norm.weight], f"shift{i}": [x_layer.norm.bias]}
    if isinstance(energy.energy, Sum):
        found["bowl"] = [energy.energy.energies[1].log_weight]  # pyright: ignore
    return found


def upright(weight: Tensor) -> Tensor:
    """As a matrix, last dimension first in the library."""
    return weight.T if weight.ndim == 2 else weight[None]
