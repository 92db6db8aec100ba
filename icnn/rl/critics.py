"""Networks `-Q(s, a)`, convex in the action: several of them at once, as one product of stacks.

All tensors have a leading dimension of networks: those of one agent, two as a rule, then those of
the next. So one agent and fifty go through the same lines. `energies()` gives each network as the
library's own; what is computed here is what they compute, in fewer and larger steps.
"""

import math
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icnn.checks import check_choice
from icnn.energies.activations import smooth_plus
from icnn.energies.compose import Sum
from icnn.energies.energy import Dense, Energy
from icnn.energies.picnn import PICNN, PartialLayer, XLayer
from icnn.kernels.products import product
from icnn.rl.parts import Parts


class Bowl(Energy):
    """`0.5 * sum(exp(log_weight) * y^2)`."""

    def __init__(self, dim_y: int):
        super().__init__()
        self.y_shape = (dim_y,)
        self.log_weight = nn.Parameter(torch.full((dim_y,), 0.1).log())

    def forward(self, x: Any, y: Tensor) -> Tensor:
        return 0.5 * (self.log_weight.exp() * y.square()).sum(dim=1)


def bounded(gate: Tensor) -> Tensor:
    """Near zero as it is, and never beyond 2."""
    return 2 * (gate / 2).tanh()


class BoundedPICNN(PICNN):
    """With gates that do not grow with the state."""

    def describe(self, x: Tensor | None) -> list[Dense]:
        return [
            layer._replace(
                gate_y=None if layer.gate_y is None else bounded(layer.gate_y),
                gate_z=None if layer.gate_z is None else bounded(layer.gate_z),
            )
            for layer in super().describe(x)
        ]


@dataclass(frozen=True)
class Form:
    """What a network looks like.

    Attributes:
        state: Widths of the layers of the state, of which gates and biases are made.
        hidden: Widths of the layers that are convex in the action, as many.
        activation: "softplus" or "relu", of the convex part.
        norm: Whether each layer of the state has a norm: features do not grow with the state, and
            neither do gates made of them.
        bowl: Whether a square of the action is added, with a learned weight.
        bounded_gates: Whether gates stay between -2 and 2.
    """

    state: tuple[int, ...] = (256, 256)
    hidden: tuple[int, ...] = (128, 128)
    activation: str = "softplus"
    norm: bool = True
    bowl: bool = True
    bounded_gates: bool = False

    def __post_init__(self):
        check_choice("activation", self.activation, ["softplus", "relu"])
        if not self.hidden:
            raise ValueError("`hidden` must have at least one width, got none")
        if len(self.state) != len(self.hidden):
            raise ValueError(
                f"`state` must have as many widths as `hidden`, {len(self.hidden)}, got "
                f"{len(self.state)}"
            )

    def make(self, dim_state: int, dim_action: int, count: int) -> "Critics":
        """Several networks, as one."""
        return Critics(self, dim_state, dim_action, count)

    def energy(self, dim_state: int, dim_action: int) -> Energy:
        """One network, with new weights."""
        convex = (BoundedPICNN if self.bounded_gates else PICNN)(
            dim_state, dim_action, self.hidden, activation=self.activation,
            x_norm="layer" if self.norm else None, x_hidden=self.state,
        )  # fmt: skip
        return Sum(convex, Bowl(dim_action)) if self.bowl else convex


PAPER_FORM = Form((200, 200), (200, 200), "relu", norm=False, bowl=False)


class Critics(nn.Module):
    """Networks of one form.

        u_0 = s,    u_{i+1} = relu(norm(V_i u_i))
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
            {name: filled(name, [upright(w.detach()) for w in there])
             for name, there in places(energy).items()}
            for energy in (form.energy(dim_state, dim_action) for _ in range(count))
        ]  # fmt: skip
        self.weights = nn.ParameterDict({
            name: torch.stack([torch.cat(one[name], dim=1) for one in made]) for name in made[0]
        })  # fmt: skip
        self.parts = {
            name: Parts((len(there[0]),), tuple(w.shape[1] for w in there))
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
                for weight, value in zip(there, columns, strict=False):  # zeros may follow
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
        n, depth = weights["wy0"].shape[1], len(form.hidden)
        self.layers: list[tuple[Any, ...]] = []
        below = 0
        for i in range(depth + 1):
            width = form.hidden[i] if i < depth else 1
            out = product(weights[f"bias{i}"], u, weights[f"head{i}"])
            next_u = form.state[i] if i < depth else 0
            sizes = next_u, width, n, below
            v, bias, gate_y, gate_z, _ = out.split([*sizes, out.shape[2] - sum(sizes)], dim=2)
            if form.bounded_gates:
                gate_y, gate_z = bounded(gate_y), bounded(gate_z)
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

    def apart(self) -> "CriticsAt":
        """Each network at its own share of the states, as if it were an agent by itself."""
        own = copy(self)
        own.shape = (math.prod(self.shape), 1)
        own.layers = [
            (wy, self.share(bias), self.share(gate_y), wz,
             None if gate_z is None else self.share(gate_z))
            for wy, bias, gate_y, wz, gate_z in self.layers
        ]  # fmt: skip
        own.bias, own.slope_y, own.slope_z = (
            self.share(t) for t in (self.bias, self.slope_y, self.slope_z)
        )
        return own

    def share(self, tensor: Tensor) -> Tensor:
        """`(networks, B, k) -> (networks, B / critics, k)`: the first has the first states, ..."""
        return shared(tensor.unflatten(0, self.shape))

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
                total = product(total, z * gate_z, wz)
            z = self.act(total)
        return self._total(a, z).unflatten(0, self.shape)

    def _total(self, a: Tensor, z: Any) -> Tensor:
        slope = self.slope_y
        if self.bowl is not None:
            slope = torch.addcmul(slope, self.bowl, a, value=0.5)
        return (z * self.slope_z).sum(dim=2) + (a * slope).sum(dim=2) + self.bias[..., 0]

    def worst(self, actions: Tensor) -> Tensor:
        """The largest energy of each agent's networks, `(agents, B)`: the least `Q`."""
        return self.values(actions).amax(dim=1)

    def slope(self, actions: Tensor) -> Tensor:
        """The gradient of `worst`, `(agents, B, n)`."""
        return self._back(actions)[0] if self.shape[1] == 1 else self.both(actions)[1]

    def both(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """`worst` and its gradient."""
        a = self.spread(actions)
        gradient, last = self._back(a)
        return worst(
            *(t.unflatten(0, self.shape) for t in (self._total(a, self.act(last)), gradient))
        )

    def _back(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of each network, and what its last layer adds up to."""
        sums: list[Tensor] = []
        for wy, bias, gate_y, wz, gate_z in self.layers:
            total = torch.baddbmm(bias, a * gate_y, wy)
            if wz is not None:
                total = product(total, self.act(sums[-1]) * gate_z, wz)
            sums.append(total)
        gradient = self.slope_y if self.bowl is None else torch.addcmul(self.slope_y, self.bowl, a)
        back = self.slope_z
        for (wy, _, gate_y, wz, gate_z), total in zip(
            reversed(self.layers), reversed(sums), strict=True
        ):
            back = back * (total.sigmoid() if self.act is smooth_plus else (total > 0).to(a.dtype))
            gradient = torch.addcmul(gradient, torch.bmm(back, wy.mT), gate_y)
            if wz is not None:
                back = product(None, back, wz.mT) * gate_z
        return gradient, sums[-1]


def worst(values: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of values `(agents, critics, B)`, and its slope."""
    if values.shape[1] == 1:
        return values[:, 0], slopes[:, 0]
    value, top = values.max(dim=1, keepdim=True)
    return value[:, 0], slopes.take_along_dim(top[..., None], dim=1)[:, 0]


def shared(tensor: Tensor) -> Tensor:
    """`(agents, critics, B, ...) -> (agents * critics, B / critics, ...)`."""
    parts = tensor.unflatten(2, (tensor.shape[1], -1))
    return parts.diagonal(dim1=1, dim2=2).movedim(-1, 1).flatten(end_dim=1)


def normalised(u: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A layer norm, with weights of each network."""
    return torch.addcmul(shift, F.layer_norm(u, u.shape[-1:]), scale)


def places(energy: Energy) -> dict[str, list[Tensor]]:
    """Weights of one network that stand beside each other, by the names that they have here."""
    found: dict[str, list[Tensor]] = {}
    inner: Any = energy.energies[0] if isinstance(energy, Sum) else energy
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
    if isinstance(energy, Sum):
        found["bowl"] = [energy.energies[1].log_weight]  # pyright: ignore
    return found


def filled(name: str, parts: list[Tensor]) -> list[Tensor]:
    """Heads and their biases with zeros at the end: products of eight columns each are faster."""
    if not name.startswith(("head", "bias")):
        return parts
    width = sum(part.shape[1] for part in parts)
    return [*parts, parts[0].new_zeros(len(parts[0]), -width % 8)]


def upright(weight: Tensor) -> Tensor:
    """As a matrix, last dimension first in the library."""
    return weight.T if weight.ndim == 2 else weight[None]
