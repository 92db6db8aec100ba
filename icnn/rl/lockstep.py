"""Many agents in one process, step by step: environments, memories, tests, stop and go on.

Each agent has its own environment, memory and random numbers. How it chooses actions and what it
learns from them is up to those who inherit: `icnn.rl.stack` has ours. On a GPU what they do is
recorded as CUDA graphs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from icnn.rl.memory import PARTS, Memory
from icnn.rl.worlds import Moves, Worlds

BLOCK = 250  # steps for which random numbers are drawn at once
TESTS = 10_000  # the seed of the first test episode; others follow
M = TypeVar("M", bound=nn.Module)


class Lockstep(ABC):
    """Agents with the same settings.

    Args:
        agents: The task and the seed of each. States and actions of several tasks are made as long
            as the longest, by zeros.
        training: Settings, the same for all; among them `gamma`, `batch_size`, `learning_starts`
            and `gradient_steps`.
        total: Steps to be made, for which there is memory.
        every: Steps between two test episodes.
        device: Where networks are.
        workers: Processes for environments; 0 for this one.
        gammas: The discounts of tasks that have another one than the settings.
        options: For `gymnasium.make`.

    Attributes:
        tests: Step, return and mean `Q` of each test, one list for each agent.
        agent: All networks that learn.
        acting: Of those who act: the agents as they are now, then those under test, as it began.
        optimizers: Of the networks.
        updates: How many there were.
    """

    agent: Any  # those who inherit know more of it
    acting: Any
    optimizers: list[torch.optim.Optimizer]

    def __init__(
        self, agents: Sequence[tuple[str, int]], training: Any, total: int = 100_000,
        every: int = 1000, device: str = "cpu", workers: int = 0,
        gammas: Mapping[str, float] | None = None, **options: Any,
    ):  # fmt: skip
        self.agents, self.training = list(agents), training
        self.gammas = [(gammas or {}).get(task, training.gamma) for task, _ in agents]
        self.total, self.every, self.device = total, every, torch.device(device)
        self.count = count = len(self.agents)
        tasks, self.seeds = [task for task, _ in agents], [seed for _, seed in agents]
        # Environments to learn in, then those to be tested in.
        self.worlds = Worlds([*tasks, *tasks], workers, **options)
        self.sizes, (S, n) = self.worlds.sizes[:count], self.worlds.wide
        self.memory = Memory(count, total, (S, n)).to(self.device)
        self.random = [np.random.default_rng(seed) for seed in self.seeds]
        zeros = partial(torch.zeros, device=self.device)
        # What goes in: states to act in, of learning and testing; what was done and led to.
        self.state, self.told = zeros(2, count, S), zeros(count, 2 * S + n + 3)
        self.picks, self.jitter = zeros(count, training.batch_size), zeros(count, n)
        # What comes out.
        self.action, self.value = zeros(2, count, n), zeros(count)
        self.step, self.testing, self.returns = 0, np.zeros(count, bool), np.zeros(count)
        self.tests: list[list[tuple[int, float, float]]] = [[] for _ in self.seeds]
        self.under_test: tuple[int, list[float]] | None = None
        self.saved = self.updates = 0
        # Stacks side by side on a GPU do not wait for each other.
        self.own = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.stream = nullcontext if self.own is None else partial(torch.cuda.stream, self.own)
        self._make()
        with self.stream():
            self.act, self.store, self.learn = self._programs()
        self._reset(np.array([*self.seeds, *self.seeds]))

    @abstractmethod
    def _make(self) -> None:
        """Make `agent`, `acting` and `optimizers`."""

    @abstractmethod
    def _act(self) -> None:
        """Choose the next `action`, and that of the test, at `state`, with the help of `jitter`."""

    @abstractmethod
    def _copy(self, half: int) -> None:
        """Make those who act, or those under test, what the agents are now."""

    @abstractmethod
    def _learn(self) -> None:
        """One step of all networks, from what `picks` chooses; `value` becomes the mean `Q`."""

    def _store(self) -> None:
        """Remember what an action has led to."""
        S, n = self.worlds.wide
        state, action, following, rest = self.told.split([S, n, S, 3], dim=1)
        self.memory.add(state=state, action=action, following=following, rest=rest)

    def _programs(self) -> list[Callable[[], None]]:
        """How to act, to store and to learn, as fast as it can be done here."""
        return [self._quick(part) for part in (self._act, self._store, self._learn)]

    def _quick(self, function: Callable[[], None]) -> Callable[[], None]:
        """As it is, or on a GPU recorded."""
        return function if self.own is None else self._recorded(function)

    def _recorded(self, function: Callable[[], None]) -> Callable[[], None]:
        """As a CUDA graph; nothing stays of what it does in the making."""
        torch.cuda.synchronize()
        before = {name: tensor.clone() for name, tensor in self._tensors().items()}
        with short_products():
            for _ in range(3):
                function()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # On its own stream: what products need for themselves belongs to a stream, and stacks
            # that shared it would write over each other.
            with torch.cuda.graph(graph, stream=self.own):
                function()
        for name, tensor in self._tensors().items():
            # An optimiser has made its own as it went.
            tensor.copy_(before[name]) if name in before else tensor.zero_()
        return graph.replay

    def _tensors(self) -> dict[str, Tensor]:
        """All that learning changes, by name; not the memory, of which nothing counts yet."""
        found = dict(self.agent.state_dict()) | {"size": self.memory.size, "value": self.value}
        for k, optimizer in enumerate(self.optimizers):
            for i, state in enumerate(optimizer.state.values()):
                found |= {f"optimizer.{k}.{i}.{name}": value for name, value in state.items()}
        return found

    def _reset(self, seeds: np.ndarray, which: slice = slice(None)) -> None:
        """Begin new episodes."""
        moves = self.worlds.moves
        moves.what[:] = 0
        moves.what[which], moves.seed[which] = 2, seeds
        self.worlds.start()
        self.worlds.wait()

    def _numbers(self) -> None:
        """Draw random numbers for some steps, of each agent from its own stream."""
        t = self.training
        shape = BLOCK, t.gradient_steps, t.batch_size
        picks = np.stack([r.random(shape, np.float32) for r in self.random], axis=-2)
        jitter = np.zeros((BLOCK, *self.jitter.shape), np.float32)
        self.free = np.zeros_like(jitter)
        for i, (r, (_, n)) in enumerate(zip(self.random, self.sizes, strict=True)):
            jitter[:, i, :n] = r.standard_normal((BLOCK, n), np.float32)
            self.free[:, i, :n] = r.uniform(-1, 1, (BLOCK, n))
        self.block = [torch.from_numpy(numbers).to(self.device) for numbers in (picks, jitter)]

    def begin(self) -> None:
        """Choose actions."""
        i, moves = self.step % BLOCK, self.worlds.moves
        if i == 0:
            self._numbers()
        if self.step % self.every == 0 and not self.testing.any():
            self._test(self.step // self.every)
        self.state.copy_(torch.from_numpy(moves.state).view_as(self.state))
        self.jitter.copy_(self.block[1][i])
        self.act()

    def send(self) -> None:
        """Send them to the environments."""
        count, moves = self.count, self.worlds.moves
        action = self.action.cpu().numpy()
        if self.step < self.training.learning_starts:
            action[0] = self.free[self.step % BLOCK]
        moves.action[:] = action.reshape(2 * count, -1)
        self.before = moves.state[:count].copy()
        moves.what[:count], moves.what[count:] = 1, self.testing
        self.worlds.start()

    def between(self) -> None:
        """Learn, while environments are under way."""
        if self.step >= self.training.learning_starts:
            for picks in self.block[0][self.step % BLOCK]:
                self.picks.copy_(picks)
                self.updates += 1
                self.learn()

    def end(self) -> None:
        """Remember what came of the actions."""
        count, moves = self.count, self.worlds.wait()
        ended = moves.terminated | moves.truncated
        told = np.concatenate([
            self.before, moves.action[:count], moves.following[:count],
            np.stack([moves.reward, moves.terminated, ended], axis=1)[:count],
        ], axis=1)  # fmt: skip
        self.told.copy_(torch.from_numpy(told.astype(np.float32)))
        self.store()
        self._note(moves)
        self.step += 1

    def _test(self, number: int, kept: bool = True) -> None:
        """Begin a test episode with the networks as they are."""
        count = self.count
        self._copy(1)
        self.under_test = (self.step, self.value.tolist()) if kept else None
        self._reset(np.full(count, TESTS + number), slice(count, None))
        self.testing[:], self.returns[:] = True, 0

    def _note(self, moves: Moves) -> None:
        """What test episodes have brought, and who is done."""
        count = self.count
        self.returns += np.where(self.testing, moves.reward[count:], 0)
        done = self.testing & (moves.terminated | moves.truncated)[count:]
        self.testing &= ~done
        if self.under_test is not None:
            step, value = self.under_test
            for i in np.flatnonzero(done):
                self.tests[i].append((step, float(self.returns[i]), value[i]))

    def _end_tests(self) -> None:
        """Test episodes alone, to their end."""
        count, moves = self.count, self.worlds.moves
        while self.testing.any():
            self.state.copy_(torch.from_numpy(moves.state).view_as(self.state))
            self.act()
            moves.action[count:] = self.action[1].cpu().numpy()
            moves.what[:count], moves.what[count:] = 0, self.testing
            self.worlds.start()
            self._note(self.worlds.wait())

    def finish(self, episodes: int = 10) -> np.ndarray:
        """Returns of test episodes at the end, `(agents, episodes)`."""
        found = []
        with self.stream():
            self._end_tests()
            for i in range(episodes):
                self._test(10**6 + i, kept=False)
                self._end_tests()
                found.append(self.returns.copy())
        return np.stack(found, axis=1)

    def kept(self) -> dict[str, Any]:
        """All that the rest depends on, after a multiple of `BLOCK` steps."""
        assert self.step % BLOCK == 0, "random numbers of a block are not kept"
        self._settle()
        self.saved = self.step
        memory = {k: v[:, : self.step].cpu() for k, v in self.memory.state_dict().items()
                  if k in PARTS}  # fmt: skip
        return deepcopy({
            "settings": self.settings,
            "agent": self.agent.state_dict(), "acting": self.acting.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "memory": memory, "value": self.value.tolist(), "step": self.step,
            "updates": self.updates, "testing": self.testing, "returns": self.returns,
            "tests": self.tests, "under_test": self.under_test,
            "random": [r.bit_generator.state for r in self.random],
            "worlds": self.worlds.kept(), "moves": list(self.worlds.moves),
        })  # fmt: skip

    @property
    def settings(self) -> tuple[Any, ...]:
        """What a run is known by."""
        return self.agents, self.training, self.gammas, self.total, self.every

    def own_training(self, i: int) -> Any:
        """The settings of one agent."""
        return replace(self.training, gamma=self.gammas[i])

    @abstractmethod
    def one(self, i: int) -> dict[str, Any]:
        """One agent by itself, to be kept."""

    def _settle(self) -> None:
        """Wait for what is under way on a GPU: other streams do not."""
        if self.own is not None:
            torch.cuda.synchronize()

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from there, as if nothing had happened."""
        self._settle()
        self.agent.load_state_dict(kept["agent"])
        self.acting.load_state_dict(kept["acting"])
        # In place: graphs know where numbers are.
        for optimizer, one in zip(self.optimizers, kept["optimizers"], strict=True):
            if optimizer.state and one["state"]:  # there is none before the first update
                for state, new in zip(optimizer.state.values(), one["state"].values(), strict=True):
                    for name, value in state.items():
                        value.copy_(new[name])
            else:
                optimizer.load_state_dict(one)
        for name, part in kept["memory"].items():
            self.memory.get_buffer(name)[:, : part.shape[1]] = part.to(self.device)
        self.memory.size.fill_(kept["step"])
        self.value.copy_(torch.tensor(kept["value"]))
        for name in ("step", "updates", "testing", "returns", "tests", "under_test"):
            setattr(self, name, kept[name])
        for random, state in zip(self.random, kept["random"], strict=True):
            random.bit_generator.state = state
        self.worlds.restore(kept["worlds"])
        for own_part, part in zip(self.worlds.moves, kept["moves"], strict=True):
            own_part[...] = part
        self.saved = self.step
        self._settle()


def doubled(module: M) -> M:
    """A copy for those who act and those under test: everything twice, one after the other."""
    found = deepcopy(module).requires_grad_(False)
    for tensor in (*found.parameters(), *found.buffers()):
        tensor.data = torch.cat([tensor, tensor])
    return found


@contextmanager
def short_products() -> Iterator[None]:
    """Matrix products in TF32: what is learned from samples has larger errors, and they are most
    of the time. (A certificate is always computed in full.)
    """
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def run(stacks: Sequence[Lockstep], told: Callable[[], None] = lambda: None) -> None:
    """All steps of several stacks, side by side: while environments move, networks learn."""
    while under_way := [stack for stack in stacks if stack.step < stack.total]:
        for part in ("begin", "send", "between", "end"):
            for stack in under_way:
                with stack.stream():
                    getattr(stack, part)()
        told()
