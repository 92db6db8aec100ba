"""SAC, TD3 and DDPG in stacks: what Stable-Baselines3 computes, for many agents at a time.

Rivals of `icnn reproduce control` on a GPU, where theirs would take days. A test compares each
update with that of Stable-Baselines3, weight by weight; `benchmarks.control_rivals` compares runs.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from icnn.kernels.products import product
from icnn.rl.learning import Batch
from icnn.rl.lockstep import Lockstep, doubled
from icnn.rl.parts import Parts, fitted


@dataclass(frozen=True)
class Actors:
    """Settings, by default those of Stable-Baselines3.

    Attributes:
        soft: Whether actors draw their actions, as in SAC; else noise is added to what they say.
        widths: Of the layers of all networks.
        delay: Critics learn that many times as often as actors.
        smoothing: The standard deviation of noise in targets, where actors do not draw.
        clip: How large that noise may be.
        noise: The same in exploration.
    """

    soft: bool = False
    widths: tuple[int, ...] = (400, 300)
    critics: int = 2
    delay: int = 1
    smoothing: float = 0.2
    clip: float = 0.0
    noise: float = 0.1
    gamma: float = 0.99
    learning_rate: float = 1e-3
    tau: float = 0.005
    batch_size: int = 256
    learning_starts: int = 100
    gradient_steps: int = 1


ALGORITHMS = {
    "SAC": Actors(soft=True, widths=(256, 256), learning_rate=3e-4),
    "TD3": Actors(delay=2, clip=0.5),
    "DDPG": Actors(critics=1),
}


class Perceptrons(nn.Module):
    """Networks side by side, whose inputs and outputs are made of parts; zeros make them as long.

    Args:
        inputs: Lengths of the parts of each network's input.
        widths: Of the layers between.
        outputs: Lengths of the parts of each network's output.
        seeds: Of each network.
    """

    def __init__(
        self, inputs: Sequence[tuple[int, ...]], widths: Sequence[int],
        outputs: Sequence[tuple[int, ...]], seeds: Sequence[int],
    ):  # fmt: skip
        super().__init__()
        first, last = (tuple(map(max, zip(*parts, strict=True))) for parts in (inputs, outputs))
        self.wide = layers(first, last, widths)
        self.narrow = [layers(*ends, widths) for ends in zip(inputs, outputs, strict=True)]
        made: list[list[tuple[Tensor, Tensor]]] = []
        for own, seed in zip(self.narrow, seeds, strict=True):
            torch.manual_seed(seed)
            linears = [nn.Linear(sum(part.rows), sum(part.columns)) for part in own]
            made.append([
                refitted((linear.weight.T, linear.bias[None]), *parts)
                for linear, *parts in zip(linears, own, self.wide, strict=True)
            ])  # fmt: skip
        weights, biases = (
            [torch.stack([layer[k] for layer in those]).detach()
             for those in zip(*made, strict=True)] for k in (0, 1)
        )  # fmt: skip
        self.weights, self.biases = nn.ParameterList(weights), nn.ParameterList(biases)

    @torch.no_grad()
    def own(self, k: int) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases of one network, without the zeros."""
        mine = [(w[k].cpu(), b[k].cpu()) for w, b in zip(self.weights, self.biases, strict=True)]
        return [refitted(*pair) for pair in zip(mine, self.wide, self.narrow[k], strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        for i, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = product(b, x.relu() if i else x, w)
        return x


def layers(
    before: tuple[int, ...], after: tuple[int, ...], widths: Sequence[int]
) -> list[Parts]:  # fmt: skip
    """Of a perceptron, by parts of its input and of its output."""
    return [Parts(*ends) for ends in pairwise([before, *((width,) for width in widths), after])]


def refitted(layer: tuple[Tensor, Tensor], own: Parts, other: Parts) -> tuple[Tensor, Tensor]:
    """The weight and the bias, a row, of one layer."""
    one = (1,)
    pairs = (own, other), (own._replace(rows=one), other._replace(rows=one))
    weight, bias = (fitted(x[None], *pair)[0] for x, pair in zip(layer, pairs, strict=True))
    return weight, bias


class ActorCritic(nn.Module):
    """An actor and some critics of each agent, their slow copies, and the weight of the entropy."""

    real: Tensor
    gamma: Tensor

    def __init__(self, sizes: Sequence[tuple[int, int]], settings: Actors, seeds: Sequence[int]):
        super().__init__()
        widths, each = settings.widths, range(settings.critics)
        outputs = 2 if settings.soft else 1  # of each action: its mean and log-deviation
        self.actor = Perceptrons(
            [(S,) for S, _ in sizes], widths, [(n,) * outputs for _, n in sizes], seeds
        )
        inputs = [size for size in sizes for _ in each]
        # Seeds that no other network has.
        others = [10**6 * (k + 1) + seed for seed in seeds for k in each]
        self.critics = Perceptrons(inputs, widths, [(1,)] * len(inputs), others)
        self.slow_actor, self.slow_critics = (
            deepcopy(part).requires_grad_(False) for part in (self.actor, self.critics)
        )
        self.log_alpha = nn.Parameter(torch.zeros(len(sizes), 1))
        real = torch.zeros(len(sizes), 1, max(n for _, n in sizes))
        for i, (_, n) in enumerate(sizes):
            real[i, :, :n] = 1
        self.register_buffer("real", real, persistent=False)
        self.register_buffer("gamma", torch.ones(len(sizes), 1), persistent=False)

    def values(self, critics: Perceptrons, states: Tensor, actions: Tensor) -> Tensor:
        """`(agents, critics, B)`."""
        x = torch.cat([states, actions], dim=2)
        each = len(critics.weights[0]) // len(x)
        out = critics(x[:, None].expand(-1, each, -1, -1).flatten(end_dim=1))
        return out.view(len(x), each, -1)

    def drawn(self, states: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions of a soft actor, and the logarithms of their densities."""
        mean, deviation = normal(self.actor(states))
        action = (mean + deviation * noise).tanh()
        # log N(u) - log |d tanh(u) / du|
        log = -0.5 * noise.square() - deviation.log() - 0.5 * math.log(2 * math.pi)
        log = log - (1 - action.square() + 1e-6).log()
        return self.real * action, (self.real * log).sum(dim=2)

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Move the slow copies."""
        slow, fast = (
            [*a.parameters(), *b.parameters()]
            for a, b in ((self.slow_actor, self.slow_critics), (self.actor, self.critics))
        )
        torch._foreach_lerp_(slow, fast, share)  # pyright: ignore


def normal(out: Tensor) -> tuple[Tensor, Tensor]:
    """What a soft actor says: means and standard deviations."""
    mean, log_std = out.chunk(2, dim=2)
    return mean, log_std.clamp(-20, 2).exp()


class ActorStack(Lockstep):
    """Agents with actors, in stacks.

    Attributes:
        eps: Noise in learning, drawn anew for each update, of each agent by its own generator.
        full: An update of all; `alone` is one of critics.
    """

    agent: ActorCritic
    acting: Perceptrons
    training: Actors

    def _make(self) -> None:
        t, agent = self.training, ActorCritic(self.sizes, self.training, self.seeds)
        agent.gamma.copy_(torch.tensor(self.gammas)[:, None])
        self.agent = agent.to(self.device)
        self.acting = doubled(self.agent.actor)
        adam = partial(
            torch.optim.Adam, lr=t.learning_rate, fused=True,
            capturable=self.device.type == "cuda",
        )  # fmt: skip
        parts = list(agent.critics.parameters()), list(agent.actor.parameters()), [agent.log_alpha]
        self.optimizers = [adam(part) for part in parts]
        self.eps = torch.zeros(2, self.count, t.batch_size, self.worlds.wide[1]).to(self.device)
        self.generators = [torch.Generator(self.device).manual_seed(seed) for seed in self.seeds]

    def _programs(self) -> list[Callable[[], None]]:
        act, store, self.full = super()._programs()
        # Recorded last: what optimisers of actors know is there by now.
        delayed = self.training.delay > 1
        self.alone = self._quick(partial(self._update, False)) if delayed else self.full
        return [act, store, self._drawn_and_learned]

    def _drawn_and_learned(self) -> None:
        """Draw noise, which is not recorded: a graph would have to know the generators."""
        size = self.training.batch_size
        for i, (generator, (_, n)) in enumerate(zip(self.generators, self.sizes, strict=True)):
            own = torch.randn(2, size, n, generator=generator, device=self.device)
            self.eps[:, i, :, :n].copy_(own)
        (self.alone if self.updates % self.training.delay else self.full)()

    @torch.no_grad()
    def _act(self) -> None:
        self._copy(0)
        out = self.acting(self.state.flatten(end_dim=1)[:, None])
        shape = self.action.shape
        if self.training.soft:
            mean, deviation = (part.view(shape) for part in normal(out))
            mean[0].add_(deviation[0] * self.jitter)
            chosen = mean.tanh()
        else:
            chosen = out.view(shape).tanh()
            chosen[0].add_(self.jitter, alpha=self.training.noise).clamp_(-1, 1)
        self.action.copy_(self.agent.real[:, 0] * chosen)

    @torch.no_grad()
    def _copy(self, half: int) -> None:
        own = list(self.agent.actor.parameters())
        torch._foreach_copy_([a.chunk(2)[half] for a in self.acting.parameters()], own)  # pyright: ignore

    def _learn(self) -> None:
        self._update(True)

    def _update(self, actors: bool) -> None:
        """Of critics, and perhaps of actors."""
        t, agent = self.training, self.agent
        batch = self.memory.sample(self.picks, 1, agent.gamma)
        alpha = agent.log_alpha.exp().detach()
        found = agent.values(agent.critics, batch.states, batch.actions)
        loss = (found - self._goal(batch, alpha)[:, None]).square().mean(dim=2)
        self._step(0, ((0.5 if t.soft else 1.0) * loss).sum(), list(agent.critics.parameters()))
        self.value.copy_(found.detach().mean(dim=(1, 2)))
        if not actors:
            return
        if t.soft:
            chosen, log = agent.drawn(batch.states, self.eps[0])
            worth = agent.values(agent.critics, batch.states, chosen).amin(dim=1) - alpha * log
            # The goal is an entropy of minus one for each action.
            off = log.detach().mean(dim=1, keepdim=True) - agent.real.sum(dim=2)
            self._step(2, -(agent.log_alpha * off).sum(), [agent.log_alpha])
        else:
            chosen = agent.real * agent.actor(batch.states).tanh()
            worth = agent.values(agent.critics, batch.states, chosen)[:, 0]
        self._step(1, -worth.mean(dim=1).sum(), list(agent.actor.parameters()))
        agent.follow(t.tau)

    @torch.no_grad()
    def _goal(self, batch: Batch, alpha: Tensor) -> Tensor:
        """Rewards, and what slow copies say of the next actions."""
        t, agent = self.training, self.agent
        if t.soft:
            following, log = agent.drawn(batch.next_states, self.eps[1])
            bonus = -alpha * log
        else:
            noise = (t.smoothing * self.eps[1]).clamp(-t.clip, t.clip)
            following = (agent.slow_actor(batch.next_states).tanh() + noise).clamp(-1, 1)
            following, bonus = agent.real * following, 0.0
        q = agent.values(agent.slow_critics, batch.next_states, following).amin(dim=1)
        return batch.rewards + batch.discounts * (q + bonus)

    def _step(self, which: int, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        """Of one optimiser."""
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient.contiguous()  # as fused optimisers want them
        self.optimizers[which].step()

    def kept(self) -> dict[str, Any]:
        return super().kept() | {"generators": [g.get_state() for g in self.generators]}

    def restore(self, kept: dict[str, Any]) -> None:
        super().restore(kept)
        for generator, state in zip(self.generators, kept["generators"], strict=True):
            generator.set_state(state.cpu())

    def one(self, i: int) -> dict[str, Any]:
        self._settle()
        agent, each = self.agent, self.training.critics
        return {
            "actor": agent.actor.own(i),
            "critics": [agent.critics.own(each * i + k) for k in range(each)],
            "training": self.own_training(i), "sizes": self.sizes[i],
        }  # fmt: skip


def model_of(kept: dict[str, Any], env: Any) -> Any:
    """One agent as a model of Stable-Baselines3, which stacks can do without."""
    import stable_baselines3

    t: Actors = kept["training"]
    algo = next(name for name, settings in ALGORITHMS.items() if alike(settings, t))
    model = getattr(stable_baselines3, algo)(
        "MlpPolicy", env, device="cpu", gamma=t.gamma, policy_kwargs={"net_arch": list(t.widths)}
    )
    body = layers_of(model.actor.latent_pi if t.soft else model.actor.mu)
    *hidden, (weight, bias) = kept["actor"]
    heads = [model.actor.mu, model.actor.log_std] if t.soft else [body.pop()]
    size = bias.shape[1] // len(heads)
    last = zip(weight.split(size, dim=1), bias.split(size, dim=1), strict=True)
    pairs = [*zip(body, hidden, strict=True), *zip(heads, last, strict=True)]
    for network, own in zip(model.critic.q_networks, kept["critics"], strict=True):
        pairs += zip(layers_of(network), own, strict=True)
    with torch.no_grad():
        for layer, (w, b) in pairs:
            layer.weight.copy_(w.T)
            layer.bias.copy_(b[0])
    model.critic_target.load_state_dict(model.critic.state_dict())
    if not t.soft:
        model.actor_target.load_state_dict(model.actor.state_dict())
    return model


def alike(one: Actors, other: Actors) -> bool:
    """Whether two are of the same algorithm."""
    names = "soft", "critics", "delay"
    return all(getattr(one, name) == getattr(other, name) for name in names)


def layers_of(module: nn.Module) -> list[nn.Linear]:
    """In their order."""
    return [m for m in module.modules() if isinstance(m, nn.Linear)]
