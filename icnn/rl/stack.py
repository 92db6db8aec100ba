"""Many agents in one process: their networks in stacks, on a GPU as CUDA graphs.

Each agent has its own environment, memory and random numbers. What it does depends on its task and
seed, and not on who else is in the stack (up to the rounding of larger products).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any
from warnings import warn

import numpy as np
import torch
from torch import Tensor, nn

from icnn.rl.agent import Agent, shortened
from icnn.rl.learning import Batch, Training, adam_step, greedy, is_far, td_loss, worth
from icnn.rl.parts import all_fitted
from icnn.rl.worlds import Moves, Worlds

BLOCK = 250  # steps for which random numbers are drawn at once
LONG = 50_000  # steps of a run for which more is compiled
TESTS = 10_000  # the seed of the first test episode; others follow
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


class Stack:
    """Agents with the same settings.

    Args:
        agents: The task and the seed of each. States and actions of several tasks are made as long
            as the longest, by zeros.
        training: Settings, the same for all.
        total: Steps to be made, for which there is memory.
        every: Steps between two test episodes.
        device: Where networks are.
        workers: Processes for environments; 0 for this one.
        gammas: The discounts of tasks that have another one than the settings.
        options: For `gymnasium.make`.

    Attributes:
        tests: Step, return and mean `Q` of each test, one list for each agent.
    """

    def __init__(
        self, agents: Sequence[tuple[str, int]], training: Training, total: int = 100_000,
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
        critics = training.form.make(S, n, training.critics * count)
        made = []
        for seed, sizes in zip(self.seeds, self.sizes, strict=True):
            torch.manual_seed(seed)
            own = training.form.make(*sizes, training.critics)
            made.append(all_fitted(own.state_dict(), own.parts, critics.parts))
        critics.load_state_dict({k: torch.cat([m[k] for m in made]) for k in made[0]})
        agent = Agent(critics, count, training.standardised)
        agent.seen.settled = training.learning_starts
        agent.seen.length.copy_(torch.tensor([shortened(S) for S, _ in self.sizes])[:, None, None])
        agent.gamma.copy_(torch.tensor(self.gammas)[:, None])
        for i, (_, length) in enumerate(self.sizes):
            agent.real[i, :, length:] = 0
        self.agent = agent.to(self.device)
        # Those who act: the agents as they are now, then those under test, as it began.
        self.acting = deepcopy(agent).requires_grad_(False)
        for tensor in (*self.acting.parameters(), *self.acting.buffers()):
            tensor.data = torch.cat([tensor, tensor])
        self.optimizer = self.agent.optimizer(
            training.learning_rate, training.weight_decay, capturable=self.device.type == "cuda"
        )
        self.memory = Memory(count, total, (S, n)).to(self.device)
        self.random = [np.random.default_rng(seed) for seed in self.seeds]
        zeros = partial(torch.zeros, device=self.device)
        # What goes in: states to act in, of learning and testing; what was done and led to.
        self.state, self.told = zeros(2, count, S), zeros(count, 2 * S + n + 3)
        self.picks, self.jitter = zeros(count, training.batch_size), zeros(count, n)
        self.far = is_far(training.batch_size, training.rules.far).to(self.device)
        # What comes out.
        self.action, self.value = zeros(2, count, n), zeros(count)
        # What critics thought of an action that is under way, and what is known of the one before.
        self.believed, self.last = zeros(count, 1), zeros(3, count, 1)
        self.judged = training.rules.judges(training.critics)
        self.step, self.testing, self.returns = 0, np.zeros(count, bool), np.zeros(count)
        self.tests: list[list[tuple[int, float, float]]] = [[] for _ in self.seeds]
        self.under_test: tuple[int, list[float]] | None = None
        self.saved = 0
        # Stacks side by side on a GPU do not wait for each other.
        self.own = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.stream = nullcontext if self.own is None else partial(torch.cuda.stream, self.own)
        # Much of the time goes into starting what is small. A long run compiles networks and loss,
        # which takes most of a minute; on a GPU any run does so with a step of the search.
        cuda = self.device.type == "cuda"
        long = total >= LONG and compiles(self.device)
        self.search = compiled(adam_step) if cuda else None
        self.loss = compiled(td_loss) if long else partial(td_loss, step=self.search)
        parts = [self._act, self._store, self._learn]
        if cuda:
            with self.stream():
                parts = [self._recorded(f) for f in parts]
        elif long:
            parts[:2] = map(compiled, parts[:2])
        self.act, self.store, self.learn = parts
        self._reset(np.array([*self.seeds, *self.seeds]))

    @torch.no_grad()
    def _act(self) -> None:
        """Choose the next action, and that of the test."""
        self._copy(0)
        f, rules = self.acting.at(self.state.flatten(end_dim=1)[:, None]), self.training.rules
        start = torch.zeros_like(self.action).flatten(end_dim=1)[:, None]
        best = greedy(f, start, rules.steps, rules, step=self.search)
        self.action.copy_(best.view_as(self.action))
        self.action[0].add_(self.jitter, alpha=self.training.noise).clamp_(-1, 1)
        if self.judged:
            q = worth(f, self.action.flatten(end_dim=1)[:, None], rules, self.acting.real)
            self.believed.copy_(q[: self.count].mean(dim=1))

    @torch.no_grad()
    def _copy(self, half: int) -> None:
        """Make those who act what the agents are now; those under test may be the slow copies."""
        slow = half and self.training.slow
        own = [*(self.agent.targets if slow else self.agent.critics).parameters(),
               *self.agent.seen.buffers()]  # fmt: skip
        acting = [*self.acting.critics.parameters(), *self.acting.seen.buffers()]
        torch._foreach_copy_([a.chunk(2)[half] for a in acting], own)  # pyright: ignore

    @torch.no_grad()
    def _store(self) -> None:
        """Remember what an action has led to."""
        S, n = self.worlds.wide
        state, action, following, rest = self.told.split([S, n, S, 3], dim=1)
        self.memory.add(state=state, action=action, following=following, rest=rest)
        seen = self.agent.seen
        seen.add(state[:, None], rest[:, :1])
        if self.judged:
            # Not of actions that were drawn at random.
            own = (self.memory.size > self.training.learning_starts).to(rest.dtype)
            told = (own * part for part in rest.split(1, dim=1))
            last = seen.judge(self.agent.gamma, self.last, own * self.believed, *told)
            self.last.copy_(own * last)

    def _learn(self) -> None:
        """One step of all networks."""
        t = self.training
        batch = self.memory.sample(self.picks, t.n_steps, self.agent.gamma, self.far)
        loss, value = self.loss(self.agent, batch, t.rules)
        self.optimizer.zero_grad()
        loss.sum().backward()
        self.optimizer.step()
        self.agent.follow(t.tau)
        self.value.copy_(value)

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
        found = dict(self.agent.state_dict()) | {
            "size": self.memory.size, "value": self.value, "last": self.last,
        }  # fmt: skip
        for i, state in enumerate(self.optimizer.state.values()):
            found |= {f"optimizer.{i}.{name}": value for name, value in state.items()}
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
            "optimizer": self.optimizer.state_dict(), "memory": memory,
            "value": self.value.tolist(), "last": self.last.tolist(), "step": self.step,
            "testing": self.testing,
            "returns": self.returns, "tests": self.tests, "under_test": self.under_test,
            "random": [r.bit_generator.state for r in self.random],
            "worlds": self.worlds.kept(), "moves": list(self.worlds.moves),
        })  # fmt: skip

    @property
    def settings(self) -> tuple[Any, ...]:
        """What a run is known by."""
        return self.agents, self.training, self.gammas, self.total, self.every

    def _settle(self) -> None:
        """Wait for what is under way on a GPU: other streams do not."""
        if self.own is not None:
            torch.cuda.synchronize()

    def one(self, i: int) -> dict[str, Any]:
        """One agent, as `Agent.load_state_dict` takes it, and its settings."""
        self._settle()
        critics, sizes = self.training.critics, self.sizes[i]
        state = {
            name: (value[i : i + 1] if name.startswith("seen") else
                   value[critics * i : critics * (i + 1)]).cpu().clone()
            for name, value in self.agent.state_dict().items()
        }  # fmt: skip
        seen = {name: state.pop(name) for name in list(state) if name.startswith("seen")}
        for name in ("seen.mean", "seen.variance"):
            seen[name] = seen[name][..., : sizes[0]].clone()
        own = self.training.form.make(*sizes, critics)
        state = all_fitted(state, self.agent.critics.parts, own.parts)
        return {"agent": state | seen, "training": self.own_training(i), "sizes": sizes}

    def own_training(self, i: int) -> Training:
        """The settings of one agent."""
        return replace(self.training, gamma=self.gammas[i])

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from there, as if nothing had happened."""
        self._settle()
        self.agent.load_state_dict(kept["agent"])
        self.acting.load_state_dict(kept["acting"])
        # In place: graphs know where numbers are.
        own = self.optimizer.state
        if own and kept["optimizer"]["state"]:  # there is none before the first update
            for state, new in zip(own.values(), kept["optimizer"]["state"].values(), strict=True):
                for name, value in state.items():
                    value.copy_(new[name])
        else:
            self.optimizer.load_state_dict(kept["optimizer"])
        for name, part in kept["memory"].items():
            self.memory.get_buffer(name)[:, : part.shape[1]] = part.to(self.device)
        self.memory.size.fill_(kept["step"])
        self.value.copy_(torch.tensor(kept["value"]))
        self.last.copy_(torch.tensor(kept["last"]))
        for name in ("step", "testing", "returns", "tests", "under_test"):
            setattr(self, name, kept[name])
        for random, state in zip(self.random, kept["random"], strict=True):
            random.bit_generator.state = state
        self.worlds.restore(kept["worlds"])
        for own_part, part in zip(self.worlds.moves, kept["moves"], strict=True):
            own_part[...] = part
        self.saved = self.step
        self._settle()


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


@cache
def compiles(device: torch.device) -> bool:
    """Whether PyTorch finds all that it takes to compile; on a CPU, a compiler among others."""
    try:
        compiled(lambda x: x.sin())(torch.zeros(16, device=device))
    except Exception as error:  # of a compiler, of a linker, of the disk
        warn(f"PyTorch cannot compile here, and learning is slower: {error}", stacklevel=3)
        return False
    return True


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For tensors of the shapes that come, of as many stacks as there are."""
    dynamo: Any = import_module("torch._dynamo")
    dynamo.config.recompile_limit = max(64, dynamo.config.recompile_limit)
    # What is kept on disk for other numbers of threads is of no use.
    return torch.compile(function, dynamic=False, options={"cpp.threads": torch.get_num_threads()})


def run(stacks: Sequence[Stack], told: Callable[[], None] = lambda: None) -> None:
    """All steps of several stacks, side by side: while environments move, networks learn."""
    while under_way := [stack for stack in stacks if stack.step < stack.total]:
        for part in (Stack.begin, Stack.send, Stack.between, Stack.end):
            for stack in under_way:
                with stack.stream():
                    part(stack)
        told()
