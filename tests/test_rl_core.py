"""Critics, the search for actions, the loss, and budgets: against the library and by hand."""

from typing import Any

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

import icnn
from icnn.rl import Budget, Form, Quadratics, Rules
from icnn.rl.agent import Agent, Seen
from icnn.rl.critics import PAPER_FORM
from icnn.rl.learning import (
    Batch,
    Training,
    adam_step,
    binary_entropy,
    greedy,
    parts,
    td_goal,
    td_loss,
)

FORMS = [
    Form((16, 12), (8, 8)),
    Form((16,), (8,), "relu"),
    Form((16, 16), (8, 8), norm=False),
    Form((8, 6, 4), (8, 6, 4), "softplus", norm=False, bowl=False),
    PAPER_FORM,
    Form((8, 8), (6, 6), bounded_gates=True),
]
AGENTS, CRITICS, BATCH, STATE, ACTION = 3, 2, 8, 5, 4


def drawn(*shape: int) -> torch.Tensor:
    return 2 * torch.rand(*shape, dtype=torch.float64) - 1


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_stack_computes_what_the_networks_compute(form: Form):
    torch.manual_seed(0)
    critics = form.make(STATE, ACTION, AGENTS * CRITICS).double()
    states, actions = 3 * drawn(AGENTS, BATCH, STATE), drawn(AGENTS, BATCH, ACTION)
    f = critics.at(states)
    values = f.values(actions)
    for i, energy in enumerate(critics.energies()):
        agent, critic = divmod(i, CRITICS)
        alone = energy.double()(states[agent], actions[agent])
        torch.testing.assert_close(values[agent, critic], alone)
        assert icnn.check_convexity(energy, states[agent], icnn.Box(-torch.ones(ACTION).double(),
                                    torch.ones(ACTION).double())).proved  # fmt: skip
    torch.testing.assert_close(f.worst(actions), values.amax(dim=1))


@pytest.mark.parametrize("form", [*FORMS, Quadratics((8,)), Quadratics((8, 8), norm=True)], ids=str)
@pytest.mark.parametrize("critics", [1, 2])
def test_slopes_are_those_of_autograd(form: Any, critics: int):
    torch.manual_seed(1)
    f = form.make(STATE, ACTION, AGENTS * critics).double().at(drawn(AGENTS, BATCH, STATE))
    actions = drawn(AGENTS, BATCH, ACTION).requires_grad_()
    (slope,) = torch.autograd.grad(f.worst(actions).sum(), actions)
    value, own = f.both(actions.detach())
    torch.testing.assert_close(own, slope)
    torch.testing.assert_close(value, f.worst(actions).detach())
    torch.testing.assert_close(f.slope(actions.detach()), slope)


@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_steps_of_the_search_are_one_program(entropy: float):
    # What a GPU compiles: in one piece, for any length of a step, and the same as the reference.
    torch.manual_seed(2)
    f = Form((8, 8), (6, 6)).make(STATE, ACTION, AGENTS * CRITICS).at(torch.rand(AGENTS, 4, STATE))
    start, programs = torch.zeros(AGENTS, 4, ACTION), []

    def backend(program: Any, inputs: Any) -> Any:
        programs.append(program)
        return program

    compiled: Any = torch.compile(adam_step, fullgraph=True, dynamic=False, backend=backend)
    rules = Rules(entropy=entropy)
    with torch.no_grad():
        found = greedy(f, start, 5, rules, step=compiled)
        torch.testing.assert_close(found, greedy(f, start, 5, rules))
    assert len(programs) == 1


def test_a_quadratic_is_the_one_of_its_factors():
    torch.manual_seed(0)
    f = Quadratics((8,)).make(STATE, ACTION, 1).double().at(drawn(1, BATCH, STATE))
    assert f.best is not None
    actions, middle, L = drawn(1, BATCH, ACTION), f.best, f.factor[:, 0]
    assert (L.diagonal(dim1=-2, dim2=-1) > 0).all()
    assert (L.triu(1) == 0).all()
    away = actions - middle
    expected = 0.5 * torch.einsum("abi,abij,abkj,abk->ab", away, L, L, away) - f.value[:, 0]
    torch.testing.assert_close(f.worst(actions), expected)
    torch.testing.assert_close(greedy(f, actions, 3, Rules()), middle)


@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_actions_are_those_of_argmin(entropy: float):
    torch.manual_seed(0)
    critics = Form((16, 16), (16, 16)).make(STATE, ACTION, 2).double()
    states = 2 * drawn(1, 32, STATE)
    first, second = critics.energies()
    box = icnn.Box(-torch.ones(ACTION).double(), torch.ones(ACTION).double())
    solver = icnn.BundleEntropy(tol=1e-8, max_steps=300) if entropy else icnn.Bundle()
    exact = icnn.argmin(
        icnn.Max(first, second).double(), states[0], box, entropy=entropy, solver=solver
    )
    f, start = critics.at(states), torch.zeros(1, 32, ACTION).double()
    rules = Rules(entropy=entropy)

    def objective(a: torch.Tensor) -> torch.Tensor:
        return (f.worst(a) - entropy * binary_entropy(a))[0]

    before = objective(start) - exact.value
    for steps, left in ((10, 0.06), (300, 2e-3)):
        after = objective(greedy(f, start, steps, rules)) - exact.value
        assert (after > -1e-6).all()
        assert after.mean() < left * before.mean()


@pytest.mark.parametrize("form", [Form((16, 16), (16, 16)), Quadratics((16,))], ids=str)
def test_actions_of_a_part_of_the_box(form: Any):
    """Of a smaller box, coordinate by coordinate; of a budget, by steps of one length."""
    torch.manual_seed(0)
    f = form.make(STATE, ACTION, 1).double().at(2 * drawn(1, 32, STATE))
    high = torch.tensor([1.0, 0.5, 0.25, 0.01]).double()
    for domain, joint in ((icnn.Box(-high, high), False), (Budget(0.7), True)):

        def nearest(a: torch.Tensor, domain: Any = domain) -> torch.Tensor:
            return domain.project(a[0])[None]

        start = torch.zeros(1, 32, ACTION).double()
        exact = icnn.argmin(
            lambda x, y: f.worst(y[None])[0], None, domain, entropy=0, solver=icnn.Bundle(),
            start=start[0],
        )  # fmt: skip
        found = greedy(f, start, 30, Rules(), nearest, joint)
        assert domain.contains(found[0]).all()
        left = f.worst(found)[0] - exact.value
        assert (f.worst(found)[0] >= exact.lower - 1e-9).all()
        assert left.mean() < 0.03 * (f.worst(start)[0] - exact.value).mean()


def batch_of(discount: float = 0.9) -> Batch:
    discounts = discount * (torch.rand(AGENTS, BATCH) > 0.3).double()
    return Batch(
        drawn(AGENTS, BATCH, STATE), drawn(AGENTS, BATCH, ACTION), drawn(AGENTS, BATCH),
        drawn(AGENTS, BATCH, STATE), discounts,
    )  # fmt: skip


def agent_of(agents: int = AGENTS) -> Any:
    agent = Agent(Form((16,), (8,)).make(STATE, ACTION, agents * CRITICS), agents).double()
    agent.targets.load_state_dict(
        {k: v + 0.1 * torch.rand_like(v) for k, v in agent.critics.state_dict().items()}
    )
    agent.seen.add(drawn(agents, 40, STATE), 5 * drawn(agents, 40))
    return agent


class Alone:
    """One network at states, its slope by autograd."""

    def __init__(self, energy: icnn.Energy, states: torch.Tensor):
        self.energy, self.states = energy, states

    def slope(self, actions: torch.Tensor) -> torch.Tensor:
        actions = actions.detach().requires_grad_()
        value = self.energy(self.states, actions)
        return torch.autograd.grad(value.sum(), actions)[0]


@pytest.mark.parametrize("entropy", [0.0, 0.5])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("caution", [0.0, 0.3, 1.0])
def test_the_loss_is_that_of_the_formula(entropy: float, bounded: bool, caution: float):
    torch.manual_seed(0)
    agent, batch = agent_of(), batch_of()
    agent.seen.caution.fill_(caution)
    batch, seen = batch._replace(rewards=10 * batch.rewards), agent.seen
    rules = Rules(entropy=entropy, bounded=bounded)
    agent.gamma.fill_(0.1)
    loss, value = td_loss(agent, batch, td_goal(agent, batch, rules), rules)
    slow, fast = agent.targets.energies(), agent.critics.energies()
    for i in range(AGENTS):
        scale = float(seen.scale[i])

        def known(states: torch.Tensor, i: int = i) -> torch.Tensor:
            return (states - seen.mean[i]) / (seen.variance[i] + 1e-8).sqrt()

        pair = [energy.double() for energy in slow[2 * i : 2 * i + 2]]
        halves = known(batch.next_states[i]).chunk(2)
        best = torch.cat([
            greedy(Alone(energy, half), torch.zeros(len(half), ACTION).double(),
                   rules.target_steps, rules)
            for energy, half in zip(pair, halves, strict=True)
        ])  # fmt: skip
        first, second = (-energy(known(batch.next_states[i]), best) for energy in pair)
        q = caution * torch.minimum(first, second) + (1 - caution) * (first + second) / 2
        q = q + entropy * binary_entropy(best)
        goal = batch.rewards[i] / scale + batch.discounts[i] * q
        if bounded:
            low, top = (float(r[i]) / scale / 0.9 for r in (seen.least, seen.most))
            top += entropy * ACTION * np.log(2) / 0.9
            assert ((goal < low) | (goal > top)).any(), "or the test says nothing"
            goal = goal.clamp(low, top)
        expected, values = 0.0, []
        for energy in fast[2 * i : 2 * i + 2]:
            q = -energy.double()(known(batch.states[i]), batch.actions[i])
            q = q + entropy * binary_entropy(batch.actions[i])
            values.append(q.mean())
            expected = expected + (q - goal.detach()).square().mean()
        torch.testing.assert_close(loss[i], torch.as_tensor(expected))
        torch.testing.assert_close(value[i], torch.stack(values).mean().detach() * scale)


@pytest.mark.parametrize("form", [Form((16, 12), (8, 6)), Quadratics((16,))], ids=str)
def test_networks_apart_have_shares_of_the_states(form: Any):
    torch.manual_seed(0)
    f = form.make(STATE, ACTION, AGENTS * CRITICS).double().at(drawn(AGENTS, BATCH, STATE))
    actions = drawn(AGENTS, BATCH, ACTION)
    each = f.values(actions).unflatten(2, (CRITICS, -1))
    apart = f.apart()
    own = actions.reshape(AGENTS * CRITICS, -1, ACTION)
    expected = torch.stack([each[:, k, k] for k in range(CRITICS)], dim=1).flatten(end_dim=1)
    torch.testing.assert_close(apart.values(own)[:, 0], expected)
    torch.testing.assert_close(apart.both(own)[0], expected)
    torch.testing.assert_close(apart.slope(own), apart.both(own)[1])
    with pytest.raises(ValueError, match="`batch_size` must be a multiple of 2 critics, got 7"):
        td_goal(agent_of(), Batch(*(part[:, :7] for part in batch_of())), Rules())


def test_long_states_are_as_long_as_others():
    torch.manual_seed(0)
    for dim in (4, 16, 100):
        states = 3 + 2 * torch.randn(1, 5000, dim)
        seen = Seen(1, dim)
        seen.add(states, torch.ones(1, 5000))
        squares = seen(states).square().sum(dim=2).mean()
        assert float(squares) == pytest.approx(min(dim, 16), rel=1e-3)


def test_parts_of_a_batch_are_all_of_it():
    batch = batch_of()
    goal = torch.arange(float(batch.rewards.numel())).view_as(batch.rewards)
    found = list(parts(batch, goal, 2))
    assert [len(own[0]) for _, own in found] == [BATCH // 2] * 2
    for whole, *halves in zip((*batch, goal), *((*part, own) for part, own in found), strict=True):
        assert torch.equal(torch.cat(halves, dim=1), whole)
    with pytest.raises(ValueError, match="must be a multiple of 3 minibatches, got 256"):
        Training(minibatches=3)


def test_agents_in_a_stack_are_on_their_own():
    torch.manual_seed(0)
    agent, batch = agent_of(), batch_of()
    loss, _ = td_loss(agent, batch, td_goal(agent, batch, Rules()), Rules())
    loss.sum().backward()
    alone = agent_of(1)
    for i in range(AGENTS):
        mine = {
            k: v[i : i + 1] if k.startswith("seen") else v[2 * i : 2 * i + 2]
            for k, v in agent.state_dict().items()
        }
        alone.load_state_dict(mine)
        alone.zero_grad()
        mine = Batch(*(t[i : i + 1] for t in batch))
        own, _ = td_loss(alone, mine, td_goal(alone, mine, Rules()), Rules())
        own.sum().backward()
        torch.testing.assert_close(own[0], loss[i])
        for name, p in alone.critics.named_parameters():
            grad = agent.critics.get_parameter(name).grad
            assert grad is not None
            torch.testing.assert_close(p.grad, grad[2 * i : 2 * i + 2])


def test_the_target_has_no_gradient_and_follows():
    torch.manual_seed(0)
    agent = agent_of()
    before = [p.clone() for p in agent.targets.parameters()]
    batch = batch_of()
    td_loss(agent, batch, td_goal(agent, batch, Rules()), Rules())[0].sum().backward()
    assert all(p.grad is None for p in agent.targets.parameters())
    for p in agent.critics.parameters():
        p.data.sub_(1.0)
    agent.follow(0.25)
    for name, fast in agent.critics.weights.items():
        if name.startswith("wz"):
            assert (fast >= 0).all()
    for old, slow, fast in zip(before, agent.targets.parameters(), agent.critics.parameters(),
                               strict=True):  # fmt: skip
        torch.testing.assert_close(slow, 0.75 * old + 0.25 * fast)


@given(parts=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_what_was_seen(parts: list[int], seed: int):
    rng = np.random.default_rng(seed)
    states, rewards = rng.normal(3, 5, (2, sum(parts), 3)), rng.normal(size=(2, sum(parts)))
    seen, start = Seen(2, 3).double(), 0
    for n in parts:
        seen.add(*(torch.from_numpy(x[:, start : start + n]) for x in (states, rewards)))
        start += n
    for i in range(2):
        np.testing.assert_allclose(seen.mean[i, 0], states[i].mean(axis=0), atol=1e-9)
        np.testing.assert_allclose(seen.variance[i, 0], states[i].var(axis=0), atol=1e-9)
        np.testing.assert_allclose(seen.square[i, 0], np.square(rewards[i]).mean(), atol=1e-9)
        assert float(seen.least[i]) == min(0, rewards[i].min())
        assert float(seen.most[i]) == max(0, rewards[i].max())


HIGH = torch.tensor([1.0, 0.3, 2.0, 0.7], dtype=torch.float64)


@pytest.mark.parametrize("total", [0.2, 1.0, 3.0, 10.0])
def test_a_budget_against_solvers(total: float):
    torch.manual_seed(0)
    budget = Budget(total, HIGH)
    y = 2 * torch.randn(20, 4, dtype=torch.float64)
    nearest, corner = budget.project(y), budget.minimise(y, 0.0)
    assert budget.contains(nearest).all()
    assert budget.contains(corner).all()
    torch.testing.assert_close(budget.minimise(y, 2.0), budget.project(-y / 2))
    for i in range(len(y)):
        v = cp.Variable(4)
        limits: list[Any] = [cp.norm1(v) <= total, cp.abs(v) <= HIGH.numpy()]
        cp.Problem(cp.Minimize(cp.sum_squares(v - y[i].numpy())), limits).solve(solver="CLARABEL")
        assert v.value is not None
        np.testing.assert_allclose(nearest[i], v.value, atol=1e-5)
        # a = p - q
        cost = np.concatenate([y[i].numpy(), -y[i].numpy()])
        exact = linprog(cost, np.ones((1, 8)), [total], bounds=[(0, h) for h in HIGH.tolist()] * 2)
        assert float((corner[i] * y[i]).sum()) == pytest.approx(exact.fun)


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8),
    st.floats(0.01, 10), st.floats(0.01, 10),
)  # fmt: skip
@settings(deadline=None, max_examples=200)
def test_not_one_budget_is_exceeded(values: list[float], total: float, high: float):
    y = torch.tensor([values], dtype=torch.float32)
    found = Budget(total, high).project(y)
    assert float(found.double().abs().sum()) <= total
    assert float(found.abs().max()) <= np.float32(high)
    again = Budget(total, high).project(found)
    torch.testing.assert_close(again, found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("solver", [icnn.Bundle(), icnn.ProjectedGradient(
    rule="spectral", max_steps=300, tol=1e-6)], ids=lambda s: type(s).__name__)  # fmt: skip
def test_argmin_under_a_budget(solver: Any):
    torch.manual_seed(0)
    x = 3 * torch.randn(16, 4, dtype=torch.float64)
    budget = Budget(1.5, HIGH)
    found = icnn.argmin(
        lambda x, y: (y - x).square().sum(dim=1) / 2, x, budget, entropy=0, solver=solver,
        start=torch.zeros_like(x),
    )  # fmt: skip
    off = (found.y - budget.project(x)).square().sum(dim=1) / 2
    assert (off <= found.gap + 1e-9).all()
    assert (found.gap < 1e-3).all()


def test_a_bundle_leaves_the_corners_of_a_budget():
    """It stayed in one, with a gap that was true and large."""
    torch.manual_seed(0)
    f = Form((16, 16), (16, 16)).make(STATE, 6, 2).double().at(3 * drawn(1, 20, STATE))
    found = icnn.argmin(
        lambda x, y: 3 * f.worst(y[None])[0], None, Budget(1.0), entropy=0,
        solver=icnn.Bundle(tol=1e-3, max_steps=30), start=torch.zeros(20, 6).double(),
    )  # fmt: skip
    assert found.converged.all()


def test_the_unit_of_values_settles():
    seen = Seen(1, 2)
    seen.settled = 20
    assert float(seen.scale) == 1, "of no rewards"
    for _ in range(20):
        seen.add(torch.rand(1, 1, 2), torch.full((1, 1), 2.0))
    seen.add(torch.rand(1, 1, 2), torch.full((1, 1), 100.0))
    assert float(seen.scale) == pytest.approx(2)
    assert float(seen.most) == 100


def test_caution_is_what_steps_teach():
    """Two agents, three environments; one episode ends by itself, one is cut off."""
    torch.manual_seed(0)
    gamma, steps = torch.tensor([[0.9], [0.99]]).double(), 6
    q, r = drawn(steps, 2, 3), drawn(steps, 2, 3)
    terminated, ended = (torch.zeros(steps, 2, 3).double() for _ in range(2))
    terminated[2, 0, 1] = ended[2, 0, 1] = ended[3, 1, 2] = 1.0
    seen = Seen(2, 4).double()
    seen.square.fill_(4.0)
    seen.caution.fill_(0.5)
    last = torch.zeros(3, 2, 3).double()
    assert seen.scale.eq(2).all()
    for k in range(steps):
        last = seen.judge(gamma, last, q[k], r[k], terminated[k], ended[k])
    for i in range(2):
        total = 0.0
        for n in range(3):
            for k in range(steps):
                if terminated[k, i, n]:
                    total += float(r[k, i, n] / 2 - q[k, i, n])
                elif k + 1 < steps and not ended[k, i, n]:
                    total += float(r[k, i, n] / 2 + gamma[i, 0] * q[k + 1, i, n] - q[k, i, n])
        assert float(seen.caution[i]) == pytest.approx(0.5 - 1e-3 * total / 3, rel=1e-12)


@pytest.mark.parametrize(("promise", "caution"), [(0.5, 0.0), (1.0, 0.5), (2.0, 1.0)])
def test_who_promises_too_much_becomes_cautious(promise: float, caution: float):
    """Rewards of one, for ever: they are worth `1 / (1 - gamma)`."""
    seen, one = Seen(1, 1), torch.ones(1, 1)
    seen.square.fill_(1.0)
    seen.caution.fill_(0.5)
    last, gamma = torch.zeros(3, 1, 1), torch.tensor([[0.9]])
    for _ in range(20_000):
        last = seen.judge(gamma, last, promise * 10 * one, one, 0 * one, 0 * one)
    assert float(seen.caution) == pytest.approx(caution, abs=1e-2)


def test_bad_forms():
    with pytest.raises(ValueError, match="`activation` must be one of"):
        Form(activation="elu")
    with pytest.raises(ValueError, match="`hidden` must have at least one width"):
        Form(hidden=())
    with pytest.raises(ValueError, match="`state` must have as many widths as `hidden`, 1, got 2"):
        Form(hidden=(8,))
    with pytest.raises(ValueError, match="`learning_starts` must be at least `n_steps`, 3"):
        Training(n_steps=3, learning_starts=2)


def test_a_bad_budget():
    with pytest.raises(ValueError, match="`high` must be"):
        Budget(1.0, -1.0)
    with pytest.raises(ValueError, match="`total` must be"):
        Budget(-1.0)
    with pytest.raises(ValueError, match="`high` must be"):
        Budget(1.0, "much")  # pyright: ignore[reportArgumentType]
