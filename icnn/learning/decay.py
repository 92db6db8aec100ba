"""Weight decay on the weights that a network uses, however they are stored."""

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from icnn.energies.layers import NonNegative


def decay(module: nn.Module, optimizer: torch.optim.Optimizer, rate: float) -> RemovableHandle:
    """Before every step multiply weights by `1 - lr * rate`, as AdamW does.

    An optimiser's own decay draws what is *stored* to zero, and under "softplus" or "exp" that is
    no small weight at all. Here it is the effective weight that shrinks. Biases and other vectors
    are left alone, unless they are weights of a `NonNegative`.
    """
    constrained = {id(part.raw): part for part in module.modules() if isinstance(part, NonNegative)}

    @torch.no_grad()
    def shrink(*_: object) -> None:
        for group in optimizer.param_groups:
            factor = max(0.0, 1 - float(group["lr"]) * rate)
            moved = [weight for weight in group["params"] if weight.grad is not None]
            plain = [w for w in moved if w.ndim > 1 and id(w) not in constrained]
            if plain:
                torch._foreach_mul_(plain, factor)  # pyright: ignore
            for weight in moved:
                if id(weight) in constrained:
                    constrained[id(weight)].scale_(factor)

    return optimizer.register_step_pre_hook(shrink)
