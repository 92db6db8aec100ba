"""Several processes that train one energy: what `torchrun` starts, `icnn.fit` joins by itself.

Of the order in which a loader gives examples, process r of W takes places r, r + W, r + 2 W, ...
So W processes with batches of B see, step by step, what one process sees with batches of W B; and
gradients are means over all examples of a step, also of the last one, where some have fewer.
"""

import atexit
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
)


@dataclass(frozen=True)
class Team:
    """The processes of a run; alone without `torchrun`."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def wrap(self, step: nn.Module) -> nn.Module:
        """A module whose gradients are those of all processes; weights start as the first's."""
        if self.size == 1:
            return step
        where = [self.device] if self.device.type == "cuda" else None
        # A loss of answers does not see the offset of an energy, for one: it may go unused.
        return nn.parallel.DistributedDataParallel(
            step, device_ids=where, find_unused_parameters=True
        )

    def agree(self, value: Any) -> Any:
        """What the first process has."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, device=self.device)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """What each process has."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found


def join(device: torch.device) -> Team:
    """The processes that `torchrun` started, or those of a group that is there already."""
    if not dist.is_available():
        return Team(device)
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", 1)) == 1 or "RANK" not in os.environ:
            return Team(device)
        # Others wait while the first validates; who dies is missed by `torchrun`, not by them.
        patience = timedelta(days=1)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
        atexit.register(leave)
    if device.type == "cuda":
        # A script that says "cuda" means the one of its process.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
    return Team(device, dist.get_rank(), dist.get_world_size())


def leave() -> None:
    """At the end of a script."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Shard(Sampler[list[int]]):
    """The batches of one process.

    Args:
        whole: The batches of a loader as it was made.
        team: Whose one process this is.
    """

    def __init__(self, whole: BatchSampler, team: Team):
        self.whole, self.team, self.sampler = whole, team, whole.sampler

    def __iter__(self) -> Iterator[list[int]]:
        size, team = self.whole.batch_size * self.team.size, self.team
        together: list[int] = []
        for place in self.whole.sampler:
            together.append(place)
            if len(together) == size:
                yield together[team.rank :: team.size]
                together = []
        if together and not self.whole.drop_last:
            # Who has none takes part with an example that does not count: others wait for it.
            yield together[team.rank :: team.size] or together[:1]

    def __len__(self) -> int:
        count, size = len(self.whole.sampler), self.whole.batch_size * self.team.size  # pyright: ignore
        return count // size if self.whole.drop_last else -(-count // size)

    def share(self, step: int) -> float:
        """What a mean over this process' batch counts for, times the number of processes."""
        count, size = len(self.whole.sampler), self.whole.batch_size * self.team.size  # pyright: ignore
        together = min(size, count - step * size)
        own = len(range(self.team.rank, together, self.team.size))
        return own * self.team.size / together


def shard(loader: Any, team: Team) -> tuple[Any, Shard | None]:
    """A loader of this process' examples, and how much each of its batches counts."""
    if team.size == 1:
        return loader, None
    plain = isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler
    if not plain or isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "`loader` must be a DataLoader with a dataset of known length and a batch_size where "
            f"there are several processes, got {type(loader).__name__}"
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            "`loader` must give all examples, and `fit` deals them out, got a DistributedSampler"
        )
    own = Shard(loader.batch_sampler, team)  # pyright: ignore
    made = DataLoader(
        loader.dataset,
        batch_sampler=own,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    return made, own
