"""From a gradient in the answer to gradients in what it was made of.

Near the answer `y` an energy with kinks is a maximum of smooth pieces `f_i`, of which those that
meet in `y` count, with shares `lam` on the simplex. With `h_i = f_i(y)`, `g_i` its gradient and
`s = sum_i lam_i g_i`, and the domain's `Y(s) = argmin_y s . y - e H(y)`, the optimality conditions
are

    y = Y(s),    h_i = t for all i.

A small change of the pieces and of the domain, that at fixed `y` and `s` changes them by `ds`, `dh`
and `dY`, moves the answer. With `J = -dY/ds`, `H = sum_i lam_i f_i''` and `A` the differences of
the `g_i` from one of them,

    dy = dY - J (ds + H dy + A^T a),    A dy + A.dh = 0     (a: how `lam` moves).

For a loss with gradient `v` in `y`, let `q` and `w` solve the transposed system

    q = J p,    p = v - H q - A^T w,    A q = 0;    then    v . dy = p . dY - q . ds - w . A.dh.

Eliminating `w` leaves `q = P (v - H q)` with `P = J - J A^T (A J A^T)^+ A J`. That is the paper's
Proposition 3 where pieces are straight (`H = 0`), the implicit function theorem where there is one
piece (`A` is empty), and conjugate gradients preconditioned by `P` where there is curvature.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from icnn.kernels.dual import column
from icnn.solvers.domains import Domain

DENSE = 16  # coordinates up to which the Hessian is made as a matrix
ITERATIONS = 1000  # of conjugate gradients at most
BARE = 1e-5  # the residual to reach without entropy
NOISE = 1e-11  # what rounding leaves of a product in float64, with room
ENOUGH = 1e-3  # the residual above which they have failed
TINY = torch.finfo(torch.float64).tiny


class Bend:
    """`J = -dY/ds` of a domain, at one slope for each example."""

    def __init__(self, domain: Domain, slope: Tensor, entropy: float, shape: torch.Size):
        self.domain, self.entropy, self.shape = domain, entropy, shape
        with torch.enable_grad():
            self.slope = slope.detach().requires_grad_()
            y = domain.minimise(self.slope.reshape(shape), entropy)
        self.y = y.flatten(start_dim=1)

    def __call__(self, vector: Tensor) -> Tensor:
        """`J v`, `(B, n) -> (B, n)`."""
        return -torch.autograd.grad(self.y, self.slope, vector, retain_graph=True)[0]

    def gram(self, rows: Tensor) -> Tensor:
        """`A J A^T`, `(B, k, n) -> (B, k, k)`."""
        own = getattr(self.domain, "curvature", None)
        if own is not None:
            entropy = column(torch.full_like(self.y[:, 0], self.entropy), self.shape)
            return own(self.y.detach().reshape(self.shape), entropy, rows)
        bent = torch.stack([self(row) for row in rows.unbind(dim=1)], dim=2)
        product = rows @ bent
        return (product + product.mT) / 2


class Pull(NamedTuple):
    """What multiplies a change of the domain, of the pieces' heights and of the mean slope."""

    domain: Tensor  # p, (B, n)
    heights: Tensor  # -w, (B, k)
    slope: Tensor  # -q, (B, n)


@dataclass(frozen=True)
class System:
    """The optimality conditions of a batch at its answers, in float64.

    Args:
        bend: `J`.
        slopes: `g_i` at the answer, `(B, k, n)`.
        lam: Their shares, `(B, k)`; those of no share are not there.
        hessian: Maps `q` to `H q`; `None` where pieces are straight.
        entropic: Whether the objective has an entropy. Without, `J` is but a metric that leaves out
            coordinates at their bounds: the first condition is `s + H dy + A^T a = 0` there.
        eps: The precision of slopes and of `hessian`.
    """

    bend: Bend
    slopes: Tensor
    lam: Tensor
    hessian: Callable[[Tensor], Tensor] | None
    entropic: bool
    eps: float

    def pull(self, v: Tensor) -> Pull:
        """Solve the transposed system."""
        kinks = Kinks(self)
        if self.hessian is None:
            q = kinks.metric(v) if self.entropic else torch.zeros_like(v)
            rest = v
        else:
            dense = self.entropic and v.shape[1] <= DENSE
            q = (self.solve if dense else self.descend)(kinks, self.hessian, v)
            rest = v - self.hessian(q)
        w = kinks.multipliers(rest)
        return Pull(rest - kinks.spread(w), -w, -q)

    def solve(self, kinks: "Kinks", hessian: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        """`(I + P H) q = P v`, with `H` and `P` as matrices."""
        units = torch.eye(v.shape[1], dtype=v.dtype, device=v.device)
        columns = [unit.expand_as(v) for unit in units]
        bent = torch.stack([hessian(unit) for unit in columns], dim=2)
        metric = torch.stack([kinks.metric(unit) for unit in columns], dim=2)
        found, failed = torch.linalg.solve_ex(units + metric @ bent, kinks.metric(v)[:, :, None])
        # An energy that is not convex can make the system singular.
        sound = (failed == 0) & found.isfinite().all(dim=(1, 2))
        report_rough(
            ~sound & v.isfinite().all(dim=1), "its equations are singular: is the energy convex?"
        )
        return torch.where(sound[:, None], found.squeeze(2), 0.0)

    def descend(self, kinks: "Kinks", hessian: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        """Conjugate gradients for `(J^-1 + H) q = v` with `A q = 0`, preconditioned by `P`.

        Directions are `d = P r`, so that `J^-1 d` is `r` but for rows of `A`, which `P` takes out
        again: no inverse is ever formed (Gould, Hribar and Nocedal, 2001).
        """
        q, r = torch.zeros_like(v), v
        z = kinks.metric(r)
        d, image = z, r
        size = first = (r * z).sum(dim=1)
        small, noise = 4 * self.eps, torch.zeros_like(first)
        if not self.entropic:
            # All that keeps an answer at its bound is that J is tiny there; and where kinks leave
            # no way to move, what is left of J v is rounding.
            small, noise = max(small, BARE), NOISE * (v * kinks.bend(v)).sum(dim=1)
        most = min(ITERATIONS, 10 * v.shape[1] + 50)
        for _ in range(most):
            bent = hessian(d) + (image if self.entropic else 0.0)
            along = (d * bent).sum(dim=1)
            # Each example on its own; one without curvature along d is left where it is.
            active = (size > small**2 * first) & (size > noise) & (along > TINY)
            if not bool(active.any()):
                break
            step = torch.where(active, size / along.clamp(min=TINY), 0.0)[:, None]
            q, r = q + step * d, r - step * bent
            z = kinks.metric(r)
            before, size = size, torch.where(active, (r * z).sum(dim=1), size)
            turn = torch.where(active, size / before.clamp(min=TINY), 0.0)[:, None]
            d, image = z + turn * d, r + turn * image
        advice = f"{most} conjugate gradients were not enough: more entropy makes it easier"
        report_rough((size > ENOUGH**2 * first) & (size > noise), advice)
        return q


def report_rough(rough: Tensor, why: str) -> None:
    """Warn of gradients that were not found."""
    count = int(rough.sum())
    if count:
        warnings.warn(
            f"the gradient of {count} of {len(rough)} examples is rough: {why}",
            RuntimeWarning,
            stacklevel=2,
        )


class Kinks:
    """The differences `A` of the active pieces' slopes, and `M = A J A^T`."""

    def __init__(self, system: System):
        self.bend, lam, slopes = system.bend, system.lam, system.slopes
        self.top = lam.argmax(dim=1, keepdim=True)
        first = slopes.gather(1, self.top[:, :, None].expand(-1, -1, slopes.shape[2]))
        active = (lam > 0).scatter(1, self.top, False)
        self.apart = (slopes - first).masked_fill(~active[:, :, None], 0)
        self.active = active
        if lam.shape[1] == 1:
            return  # one piece has no kink
        matrix = self.bend.gram(self.apart)

        # A difference that is rounding is none: the same piece was met twice.
        diagonal = matrix.diagonal(dim1=1, dim2=2)
        size = self.bend.gram(slopes).diagonal(dim1=1, dim2=2)
        size = size + size.gather(1, self.top)
        noise = (64 * system.eps) ** 2 * size
        self.active = active & (diagonal > noise) & (diagonal > TINY)
        self.units = torch.where(self.active, diagonal, 1.0).rsqrt().masked_fill(~self.active, 0)
        scaled = matrix * self.units[:, :, None] * self.units[:, None, :]
        # Pieces that depend on each other: directions below what rounding makes of the slopes.
        values, self.vectors = torch.linalg.eigh(scaled)
        least = ((noise * self.units**2)[:, None, :] @ self.vectors**2).squeeze(1)
        least = least.clamp(min=1e-13 * lam.shape[1])
        self.inverse = torch.where(values > least, 1 / values.clamp(min=TINY), 0.0)

    def multipliers(self, v: Tensor) -> Tensor:
        """`w = M^+ A J v`, with that of the first piece minus the sum of the others."""
        if self.active.shape[1] == 1:
            return torch.zeros_like(v[:, :1])
        right = self.units * (self.apart @ self.bend(v)[:, :, None]).squeeze(2)
        right = self.inverse * (self.vectors.mT @ right[:, :, None]).squeeze(2)
        w = self.units * (self.vectors @ right[:, :, None]).squeeze(2)
        return w.scatter(1, self.top, -w.sum(dim=1, keepdim=True))

    def spread(self, w: Tensor) -> Tensor:
        """`A^T w`."""
        return (w[:, None, :] @ self.apart).squeeze(1)

    def metric(self, v: Tensor) -> Tensor:
        """`P v`."""
        return self.bend(v - self.spread(self.multipliers(v)))


class Answer(torch.autograd.Function):
    """`y` with the gradients of `System`: a node between the answer and what it was made of."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, system: System, where: Tensor, *parts: Tensor) -> Tensor:
        ctx.system, ctx.where = system, where
        ctx.save_for_backward(*parts)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.no_grad():
            v = gradients[0].flatten(start_dim=1).double()
            v = torch.where(ctx.where[:, None], v, 0.0)
            pulls = ctx.system.pull(v)
            made = zip(pulls, ctx.saved_tensors, strict=True)
            pulls = [pull.to(part.dtype) for pull, part in made]
        return (None, None, None, *first_order(pulls, ctx.saved_tensors))


class Held(torch.autograd.Function):
    """A value with the answer held: that is true of first derivatives, and of no others."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return first_order(list(gradients), ctx.saved_tensors)[0]


def first_order(gradients: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same, but with `create_graph` an error for who differentiates them in the inputs."""
    if not torch.is_grad_enabled():
        return gradients
    return FirstOrder.apply(len(inputs), *inputs, *gradients)  # pyright: ignore


class FirstOrder(torch.autograd.Function):
    """Gradients that must not be differentiated: their own dependence is not known."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Any:
        return tuple(gradient.clone() for gradient in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "answers of icnn.argmin have gradients of first order only, and no second derivatives"
        )
