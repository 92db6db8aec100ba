"""Our agents in stacks: the networks of all of them are one batch of matrices.

What an agent does depends on its task and seed, and not on who else is in the stack (up to the
rounding of larger products).
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from icnn.rl.agent import Agent, shortened
from icnn.rl.learning import Training, adam_step, greedy, is_far, parts, td_goal, td_loss, worth
from icnn.rl.lockstep import Lockstep, doubled
from icnn.rl.parts import all_fitted

LONG = 50_000  # steps of a run for which more is compiled


class Stack(Lockstep):
    """Agents with the same `Training`."""

    agent: Agent
    acting: Agent
    training: Training

    def _make(self) -> None:
        training, count, (S, n) = self.training, self.count, self.worlds.wide
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
        self.acting = doubled(agent)
        self.optimizers = [self.agent.optimizer(
            training.learning_rate, training.weight_decay, capturable=self.device.type == "cuda"
        )]  # fmt: skip
        self.far = is_far(training.batch_size, training.rules.far).to(self.device)
        # What critics thought of an action that is under way, and what is known of the one before.
        self.judged = training.rules.judges(training.critics)
        self.believed = torch.zeros(count, 1, device=self.device)
        self.last = torch.zeros(3, count, 1, device=self.device)

    def _programs(self) -> list[Callable[[], None]]:
        # Much of the time goes into starting what is small. A long run compiles networks and loss,
        # which takes most of a minute; on a GPU any run does so with a step of the search.
        cuda = self.device.type == "cuda"
        long = self.total >= LONG and compiles(self.device)
        self.search = compiled(adam_step) if cuda else None
        self.goal = compiled(td_goal) if long else partial(td_goal, step=self.search)
        self.loss = compiled(td_loss) if long else td_loss
        found = super()._programs()
        if long and not cuda:
            found[:2] = map(compiled, found[:2])
        return found

    @torch.no_grad()
    def _act(self) -> None:
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
        # Those under test may be the slow copies.
        slow = half and self.training.slow
        own = [*(self.agent.targets if slow else self.agent.critics).parameters(),
               *self.agent.seen.buffers()]  # fmt: skip
        acting = [*self.acting.critics.parameters(), *self.acting.seen.buffers()]
        torch._foreach_copy_([a.chunk(2)[half] for a in acting], own)  # pyright: ignore

    @torch.no_grad()
    def _store(self) -> None:
        super()._store()
        S, n = self.worlds.wide
        state, rest = self.told[:, :S], self.told[:, 2 * S + n :]
        seen = self.agent.seen
        seen.add(state[:, None], rest[:, :1])
        if self.judged:
            # Not of actions that were drawn at random.
            own = (self.memory.size > self.training.learning_starts).to(rest.dtype)
            told = (own * part for part in rest.split(1, dim=1))
            last = seen.judge(self.agent.gamma, self.last, own * self.believed, *told)
            self.last.copy_(own * last)

    def _learn(self) -> None:
        t = self.training
        batch = self.memory.sample(self.picks, t.n_steps, self.agent.gamma, self.far)
        goal = self.goal(self.agent, batch, t.rules)
        for part, own in parts(batch, goal, t.minibatches):
            loss, value = self.loss(self.agent, part, own, t.rules)
            self.optimizers[0].zero_grad()
            loss.sum().backward()
            self.optimizers[0].step()
            self.agent.follow(t.tau)
            self.value.copy_(value)

    def _tensors(self) -> dict[str, Tensor]:
        return super()._tensors() | {"last": self.last}

    def kept(self) -> dict[str, Any]:
        return super().kept() | {"last": self.last.tolist()}

    def restore(self, kept: dict[str, Any]) -> None:
        super().restore(kept)
        self.last.copy_(torch.tensor(kept["last"]))
        self._settle()

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
