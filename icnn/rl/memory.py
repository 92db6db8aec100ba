"""What many agents did, and batches of it."""

import torch
from torch import Tensor, nn

from icnn.rl.learning import Batch

PARTS = ("state", "action", "following", "rest")  # of what is remembered


class Memory(nn.Module):
    """What agents did, `(agents, total, ...)`; `rest`: reward, terminated, ended in any way."""

    state: Tensor
    action: Tensor
    following: Tensor
    rest: Tensor
    size: Tensor
    rows: Tensor

    def __init__(self, agents: int, total: int, sizes: tuple[int, int]):
        super().__init__()
        for name, width in zip(PARTS, (*sizes, sizes[0], 3),
                               strict=True):  # fmt: skip
            self.register_buffer(name, torch.zeros(agents, total, width))
        self.register_buffer("size", torch.zeros(1, dtype=torch.long))
        self.register_buffer("rows", torch.arange(agents)[:, None])

    def add(self, **new: Tensor) -> None:
        """One step of each agent."""
        for name, value in new.items():
            getattr(self, name).index_copy_(1, self.size, value[:, None])
        self.size.add_(1)

    def sample(
        self, picks: Tensor, n_steps: int, gamma: Tensor | float, far: Tensor | None = None
    ) -> Batch:
        """Transitions of `n_steps`, or as many as there were, by numbers from 0 to 1.

        Those that are not `far`, `(B,)`, are of one step.
        """
        rows, first = self.rows, (picks * (self.size - n_steps + 1)).long()
        going, reward = torch.ones_like(picks), torch.zeros_like(picks)
        discount, last = torch.ones_like(picks), first
        for k in range(n_steps):
            # An episode that has ended adds no more, and its end is where it led to.
            gain, terminated, ended = self.rest[rows, first + k].unbind(dim=2)
            reward = reward + going * gamma**k * gain
            last = torch.where(going > 0, first + k, last)
            discount = torch.where(going > 0, gamma ** (k + 1) * (1 - terminated), discount)
            going = going * (1 - ended) if far is None else going * (1 - ended) * far
        return Batch(
            self.state[rows, first], self.action[rows, first], reward, self.following[rows, last],
            discount,
        )  # fmt: skip
