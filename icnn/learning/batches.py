"""Tensors in batches, many rows at once: a `DataLoader` takes them one by one otherwise."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")


class Rows(Dataset[tuple[Tensor, ...]]):
    """Rows of tensors that belong together."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = tuple(tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        return tuple(tensor[row] for tensor in self.tensors)

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, ...]:
        index = torch.tensor(rows)
        return tuple(tensor[index] for tensor in self.tensors)


def whole(batch: T) -> T:
    """What is a batch already."""
    return batch


def batches(*tensors: Tensor, size: int, drop_last: bool = False) -> DataLoader[tuple[Tensor, ...]]:
    """A loader of shuffled rows; the last batch of an epoch may be smaller, or is left out."""
    return DataLoader(Rows(tensors), size, shuffle=True, collate_fn=whole, drop_last=drop_last)
