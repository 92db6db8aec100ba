"""Do the compiled kernels keep all promises, on every problem of the catalogue of the tests?

Numba on a CPU, Triton on a GPU; `BundleEntropy`, and `Bundle` without entropy; float32 and float64;
with gradients to come and without (steps are solved less finely then). Each line of the table is a
promise: how often it was looked at, how often it was broken, and the worst ratio of what was found
to what is allowed, below one where it is kept. What can only be right or wrong is counted.

Exact answers need CVXPY, which a machine with a GPU may not have. So they can travel, together with
weights and inputs, which elsewhere would not be the same to the last bit:

    python -m benchmarks.promises --answers FILE    # where CVXPY is
    python -m benchmarks.promises --from FILE       # anywhere
"""

import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

import icnn
from benchmarks.options import options
from icnn import Solution, Status, report

for name in ("cvxpy", "pytest"):
    if find_spec(name) is None:
        # References are read from a file then, and tests are not run as such.
        sys.modules[name] = MagicMock()

from tests import problems  # noqa: E402

sys.modules["problems"] = problems  # as tests call it

from tests import test_solvers_batch as batch  # noqa: E402
from tests import test_solvers_catalogue as catalogue  # noqa: E402
from tests.problems import PROBLEMS, Answer, Parts, Problem  # noqa: E402
from tests.test_learning_gradients import CASES, Case, Setting  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = "triton" if DEVICE == "cuda" else "numba"
FIELDS = ("y", "value", "gap", "radius", "lower", "steps", "status")
WORSE = "gap / (10 x that of PyTorch + tol + rounding)"
SETTINGS: dict[str, Any] = {"seed": 0, "kernel": COMPILED, "problems": len(PROBLEMS)}
BARE = ("picnn-17-bounds-bare", "planes-17-simplex-bare", "conv-36-image-bare",
        "picnn-17-around-bare")  # fmt: skip
COMPANY = (*batch.NAMES, *BARE)
LONG = ("coupled-6-low", "coupled-6-simplex", "picnn-2-trained-softplus", "ficnn-6",
        "planes-6-twice", "coupled-6-simplex-bare", "logsumexp-2-bare", "kink-17-bare")  # fmt: skip
AT_ONCE = ("picnn-17", "ficnn-6", "picnn-159-softplus", "planes-6-simplex", "picnn-17-bounds-bare",
           "picnn-17-around-bare")  # fmt: skip


@dataclass
class Tally:
    """What was looked at, and what was broken."""

    lines: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    ratios: dict[str, list[Tensor]] = field(default_factory=dict)
    converged: dict[str, Tensor] = field(default_factory=dict)

    def add(self, what: str, where: str, found: Any, allowed: Any = 1.0) -> None:
        """Ratios for each example, or one; less than one is good, and NaN is not."""
        found = torch.as_tensor(found, dtype=torch.float64).reshape(-1)
        allowed = torch.as_tensor(allowed, dtype=torch.float64).expand_as(found)
        ratio = (found / (allowed + 1e-300)).nan_to_num(nan=1e9).clamp(max=1e9)
        bad = ~(ratio < 1)
        cases, failed, worst = self.lines.get(what, (0, 0, -torch.inf))
        count, most, i = int(bad.sum()), float(ratio.max()), int(ratio.argmax())
        self.lines[what] = (cases + len(ratio), failed + count, max(worst, most))
        if count:
            numbers = f"{float(found[i]):.4g}, allowed {float(allowed[i]):.4g}, example {i}"
            self.failures.append(f"{what}: {where}: {numbers} ({count} of {len(bad)})")

    def join(self, other: "Tally") -> None:
        """What another process has seen."""
        for what, (cases, failed, worst) in other.lines.items():
            own = self.lines.get(what, (0, 0, -torch.inf))
            self.lines[what] = (own[0] + cases, own[1] + failed, max(own[2], worst))
        self.failures += other.failures
        for key, ratios in other.ratios.items():
            self.ratios.setdefault(key, []).extend(ratios)
        for key, both in other.converged.items():
            self.converged[key] = self.converged.get(key, torch.zeros(2)) + both

    def same(self, what: str, where: str, a: Solution, b: Solution, first: int = 0) -> None:
        """Bit for bit, from an example on."""
        pairs = [(getattr(a, name)[first:], getattr(b, name)[first:]) for name in FIELDS]
        differ = [(p != q) & ~(p.isnan() & q.isnan()) for p, q in pairs]
        self.add(what, where, sum(int(d.sum()) for d in differ))

    def sum_up(self) -> list[report.Row]:
        """The table, with what is known at the end only."""
        for key, ratios in self.ratios.items():
            found = torch.cat(ratios)
            self.add("6 median of gap / true error, below 10", f"{key}, {len(found)} of them",
                     found.median() if len(found) else 0, 10)  # fmt: skip
        for key, (ours, torches) in self.converged.items():
            self.add("5 converged with PyTorch / converged, to 1.03", f"{key}: {ours:.0f}",
                     torches / ours.clamp(min=1), 1.03)  # fmt: skip
        order = sorted(self.lines, key=lambda what: int(what.split()[0]))
        names = ("promise", "cases", "failed", "worst")
        return [dict(zip(names, (what, *self.lines[what]), strict=True)) for what in order]


def solve(
    problem: Problem, dtype: torch.dtype, max_steps: int, tol: float, *, learn: bool = False,
    kernel: str = COMPILED, parts: Parts | None = None, fixed: Any = None,
) -> Solution:  # fmt: skip
    """Search with a compiled kernel, or with PyTorch on the CPU; what was found is on the CPU."""
    device = "cpu" if kernel == "torch" else DEVICE
    given = None if fixed is None else (fixed[0].to(device), fixed[1].to(device, dtype))
    solver = icnn.BundleEntropy if problem.entropy else icnn.Bundle
    more: Any = {"solver": solver(max_steps, tol, kernel=kernel), "fixed": given}
    with torch.set_grad_enabled(learn):
        where = moved(parts or problem.parts, dtype, device)
        return icnn.argmin(*where, entropy=problem.entropy, **more).to("cpu")


def moved(parts: Parts, dtype: torch.dtype, device: str) -> Parts:
    """A copy of an energy, its inputs and its domain."""
    energy, x, domain = parts.to(dtype)
    ends = [b.to(device) if isinstance(b, Tensor) else b for b in problems.limits(domain)]
    domain = icnn.Box(*ends) if ends else domain
    return Parts(energy.to(device), None if x is None else x.to(device), domain)


def apart(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """The distance of answers in the norm of `Solution.radius`."""
    a, b, domain = a.double(), b.double(), problem.domain
    if isinstance(domain, icnn.Box):
        return (domain.unit(a) - domain.unit(b)).flatten(start_dim=1).norm(dim=1)
    return (a - b).abs().flatten(start_dim=1).sum(dim=1)


def radius(problem: Problem, gap: Tensor) -> Tensor:
    """How far from the minimiser a point with such a gap can be."""
    shape = torch.Size((problem.batch, *problem.y_shape))
    return problem.domain.radius(gap, problem.entropy, shape)


def size(found: Solution) -> Tensor:
    """What `tol` is relative to."""
    return found.value.abs().clamp(min=1)


def certified(
    tally: Tally, problem: Problem, found: Solution, where: str, most: int, tol: float
) -> Tensor:
    """Checks 1 to 4: what a solution says of itself. Gives back the gap that it may have."""
    exact, rounding = problem.answer, problem.rounding(found.y)
    off = (found.value - problem.objective(found.y)).abs()
    tally.add("1 value is the objective at y", where, off, rounding)
    # A reference is a point of the domain: no slack here, the optimum is not above it.
    tally.add("2 lower is below the optimum", where, found.lower - exact.value, rounding)
    tally.add("2 value is not", where, exact.value - found.value, rounding + exact.slack)
    if problem.entropy:
        reach = found.radius + radius(problem, exact.slack) + radius(problem, rounding)
        tally.add("3 y is within the radius", where, apart(problem, found.y, exact.y), reach)
    tally.add("4 y lies in the domain", where, ~problem.domain.contains(found.y))
    wrong = (found.gap != found.value - found.lower) | (found.gaps[-1] != found.gap)
    tally.add("4 gap is value - lower", where, wrong)
    wrong = found.converged != (found.gap <= tol * size(found))
    wrong |= ((found.steps < 1) & (found.gap != 0)) | (found.steps > most)
    wrong |= (found.status == Status.MAX_STEPS) & (found.steps != most)
    tally.add("4 status fits gap and steps", where, wrong | (found.status > Status.STALLED))
    return tol * size(found) + rounding


def every(tally: Tally, problem: Problem, dtype: torch.dtype, where: str) -> None:
    """Checks 1 to 6: to the end, and after few steps."""
    kind = catalogue.SOLVERS["entropy" if problem.entropy else "bundle"]
    most, tol = catalogue.steps(kind, problem, dtype), catalogue.REACHED[dtype] / 10
    for steps in sorted({5, 20, most}):
        torches = solve(problem, dtype, steps, tol, kernel="torch")
        for learn in (False, True):
            here = f"{where}, {steps} steps{', learning' if learn else ''}"
            found = solve(problem, dtype, steps, tol, learn=learn)
            ground = certified(tally, problem, found, here, steps, tol)
            if catalogue.reaches(kind, problem, dtype) and steps == most:
                reached = catalogue.REACHED[dtype] * size(found)
                tally.add("4 gap is as small as tests ask", here, found.gap, reached)
            # Without gradients a step is not solved to the end, which may cost another step.
            rival = torches.gaps[-1 if learn else -2 :][0].clamp(min=0)
            tally.add(f"5 {WORSE}", here, found.gap, 10 * rival + ground)
            key = f"{type(kind).__name__} {str(dtype)[6:]}{', learning' if learn else ''}"
            both = torch.stack([found.converged.sum(), torches.converged.sum()]).double()
            tally.converged[key] = tally.converged.get(key, torch.zeros(2)) + both
            error = found.value - problem.answer.value
            clear = error > 100 * (problem.answer.slack + problem.rounding(found.y))
            tally.ratios.setdefault(key, []).append((found.gap / error)[clear])


def company(tally: Tally, problem: Problem, dtype: torch.dtype, where: str) -> None:
    """Checks 7 to 9: what else is in the batch, a NaN row, and the same again."""
    parts, fine = problem.parts, dtype == torch.float64 and problem.entropy > 0
    steps, tol = (300, 1e-12) if fine else (60, 1e-5)
    together = solve(problem, dtype, steps, tol)
    each = [batch.rows(parts, [i]) for i in range(problem.batch)]
    alone = [solve(problem, dtype, steps, tol, parts=row) for row in each]
    y, value, gap, reach = (torch.cat([getattr(s, k) for s in alone]) for k in FIELDS[:4])
    rounding, off = problem.rounding(y), (value - together.value).abs()
    allowed = torch.maximum(gap, together.gap) + 2 * rounding
    tally.add("7 alone and in batch, values within the gaps", where, off, allowed)
    if problem.entropy:
        allowed = reach + together.radius + (1e-9 if fine else 2 * radius(problem, rounding))
        away = apart(problem, y, together.y)
        tally.add("7 alone and in batch, y within the radii", where, away, allowed)
    if fine and not problem.smooth:
        off = (y - together.y).abs() / (1 + together.y.abs())
        tally.add("7 alone and in batch, y to 1e-9", where, off.flatten(1).amax(dim=1), 1e-9)

    x = parts.x.clone()
    x[0] = torch.nan
    for learn in (False, True):
        few: Any = {"max_steps": 60, "tol": 1e-5, "learn": learn}
        finite = solve(problem, dtype, **few)
        broken = solve(problem, dtype, **few, parts=parts._replace(x=x))
        told = broken.status[0] == Status.NONFINITE and broken.value[0].isnan()
        tally.add("8 a NaN row is told", where, not (told and broken.gap[0].isinf()))
        tally.same("8 a NaN row leaves others bit-identical", where, finite, broken, 1)
        for _ in range(2):
            again = solve(problem, dtype, **few)
            tally.same("9 the same call again, bit-identical", where, finite, again)


def given(tally: Tally, problem: Problem, dtype: torch.dtype, where: str) -> None:
    """Check 11: coordinates that are given, against PyTorch in float64."""
    torch.manual_seed(SETTINGS["seed"])
    mask = torch.rand(problem.batch, *problem.y_shape) < 0.4
    mask[..., 0], mask[0] = False, True  # and in one example, all are given
    # Numbers that are the same in float32.
    values = problem.domain.minimise(torch.randn(mask.shape).double(), 1.0).float()
    fixed = (mask, torch.where(mask, values, torch.nan))
    exact = solve(problem, torch.float64, 300, 1e-9, fixed=fixed, kernel="torch")
    held = replace(problem, name=f"{problem}, given")
    domain = problem.domain.restrict(mask, torch.where(mask, values, 0).double())
    answer = Answer(exact.y, exact.value, exact.gap.clamp(min=0))
    held.__dict__.update(parts=problem.parts._replace(domain=domain), answer=answer)
    for learn in (False, True):
        found = solve(problem, dtype, 300, 1e-5, fixed=fixed, learn=learn)
        ground = certified(tally, held, found, f"{where}, some given", 300, 1e-5)
        tally.add("11 given coordinates come back", where, (found.y != values)[mask])
        tally.add(f"11 some given: {WORSE}", where, found.gap, 10 * answer.slack + ground)
        tally.add("11 all given: no steps, no gap", where, found.steps[:1] + found.gap[:1])


def replaced(tally: Tally, problem: Problem, dtype: torch.dtype, where: str) -> None:
    """Check 11: more steps than slots, so that old cuts go."""
    steps = problem.n + 120
    torches = solve(problem, dtype, steps, 0.0, kernel="torch")
    found = solve(problem, dtype, steps, 0.0)
    ground = certified(tally, problem, found, f"{where}, slots are replaced", steps, 0.0)
    allowed = 10 * torches.gap.clamp(min=0) + ground
    tally.add(f"11 slots replaced: {WORSE}", where, found.gap, allowed)
    if dtype == torch.float64 and not problem.piecewise_linear:
        used = (problem.n + 20) / int(found.steps.max())
        tally.add("11 slots replaced: slots / steps", where, used)


def at_once(tally: Tally, problem: Problem, dtype: torch.dtype, where: str) -> None:
    """Check 12: two threads, on a GPU with a stream each, and the same one after another."""
    # Two energies of one shape: a recording of the one must not serve the other.
    pair = [problem.parts, problem.parts.to(torch.float64)]
    for tensor in pair[1].energy.state_dict().values():
        tensor.mul_(0.9)

    def search(i: int) -> list[Solution]:
        return [solve(problem, dtype, 60, 1e-5, parts=pair[i]) for _ in range(3)]

    def streamed(i: int) -> list[Solution]:
        with torch.cuda.stream(torch.cuda.Stream() if DEVICE == "cuda" else None):
            return search(i)

    expected = [search(0), search(1)]
    for first, *others in expected:
        for again in others:
            tally.same("12 three times, bit-identical", where, first, again)
    for workers, way in ((1, "12 two streams"), (2, "12 two threads at once")):
        with ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(streamed, i) for i in range(2)]
        for job, true in zip(jobs, expected, strict=True):
            if job.exception() is not None:
                tally.add(way, f"{where}: {job.exception()!r}", 3)
            for one in [] if job.exception() else job.result():
                tally.same(way, where, true[0], one)


def slopes(case: Case, dtype: torch.dtype, kernel: str) -> list[Tensor]:
    """Gradients of a random linear loss in all that an answer depends on."""
    s, device = case.setting(), "cpu" if kernel == "torch" else DEVICE

    def leaf(t: Tensor | None) -> Any:
        return None if t is None else t.detach().to(device, dtype).requires_grad_()

    mask, bounds = None if s.mask is None else s.mask.to(device), [leaf(b) for b in s.bounds]
    s = Setting(case, s.energy.to(device, dtype), leaf(s.x), bounds, mask, leaf(s.values))
    tol = 1e-14 if dtype == torch.float64 else 1e-6
    y = s.argmin(solver=icnn.BundleEntropy(max_steps=120, tol=tol, kernel=kernel)).y
    torch.manual_seed(SETTINGS["seed"])
    loss = (torch.randn(y.shape, dtype=torch.float64).to(y) * y).sum()
    leaves = list(s.leaves().values())
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [g.cpu().double() for g in found]


def gradients(tally: Tally, case: Case, dtype: torch.dtype, where: str) -> None:
    """Check 10: in float64 as with PyTorch on the CPU; in float32 not much further off."""
    exact = slopes(case, torch.float64, "torch")
    least = 0.01 * max(g.norm() for g in exact)

    def off(found: list[Tensor]) -> float:
        pairs = zip(found, exact, strict=True)
        return max(float((a - b).norm() / b.norm().clamp(min=least)) for a, b in pairs)

    found = slopes(case, dtype, COMPILED)
    if dtype == torch.float64:
        a, b = (torch.cat([g.flatten() for g in each]) for each in (found, exact))
        angle = 1 - torch.cosine_similarity(a, b, dim=0)
        tally.add("10 gradients in float64, to 1e-5", where, off(found), 1e-5)
        tally.add("10 1 - cosine in float64, to 1e-10", where, angle, 1e-10)
    else:
        allowed = 3 * off(slopes(case, dtype, "torch")) + 1e-3
        tally.add("10 float32: error / (3 x PyTorch's + 1e-3)", where, off(found), allowed)


def store(path: Path) -> None:
    """All problems and their answers as plain tensors."""
    known = {
        p.name: (tuple(p.answer), dict(p.energy.state_dict()), p.x, problems.limits(p.domain))
        for p in PROBLEMS
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(known, path)


def load(path: Path) -> None:
    """Put stored problems and answers in place of those that would be made."""
    known = torch.load(path, weights_only=True)
    problems.fitted = lambda energy, *rest: energy  # its weights are in the file
    for problem in PROBLEMS:
        answer, weights, x, bounds = known[problem.name]
        energy, _, domain = problem.parts
        energy.load_state_dict(weights)
        domain = icnn.Box(*bounds) if bounds else domain
        problem.__dict__.update(parts=Parts(energy, x, domain), answer=Answer(*answer))


CHECKS: dict[str, tuple[Callable[..., None], Any]] = {
    "every": (every, PROBLEMS),
    "company": (company, COMPANY),
    "given": (given, COMPANY),
    "gradients": (gradients, CASES),
    "replaced": (replaced, LONG),
    "at once": (at_once, AT_ONCE),
}


def prepare(stored: Path | None, seed: int) -> None:
    """All that a process needs before it can check."""
    torch.set_num_threads(1)
    SETTINGS["seed"] = seed
    if stored is not None:
        load(stored)
    _ = [problem.parts for problem in PROBLEMS]  # some are trained: not without gradients


def cases_of(check: str) -> list[Any]:
    """Problems by their names, or what a check is about."""
    names = CHECKS[check][1]
    return [p for p in PROBLEMS if p.name in names] or list(names)


def work(job: tuple[str, int, torch.dtype]) -> Tally:
    """One check of one case."""
    check, number, dtype = job
    case, tally = cases_of(check)[number], Tally()
    where = f"{case.name} {str(dtype)[6:]}"
    try:
        CHECKS[check][0](tally, case, dtype, where)
    except Exception as error:
        tally.add("0 no exception", f"{where}, {check}: {error!r}", 1)
    return tally


def main() -> None:
    """Check, print, write `results/promises-cpu.json`, or `-cuda`."""
    arguments = options(
        __doc__,
        answers={"type": Path, "help": "only compute exact answers, into this file"},
        jobs={"type": int, "default": 1, "help": "processes that share the work"},
        **{"from": {"type": Path, "dest": "stored", "help": "read exact answers from this file"}},
    )
    setup = (arguments.stored, arguments.seed)
    if arguments.answers is not None:
        return store(arguments.answers)
    every_sixth = slice(None, None, 6 if arguments.fast else 1)
    jobs = [
        (check, number, dtype)
        for check in CHECKS
        for number in range(len(cases_of(check)))[every_sixth]
        for dtype in catalogue.REACHED
    ]
    tally, began, spawn = Tally(), time.perf_counter(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, spawn, prepare, setup) as pool:
        for done, seen in enumerate(pool.map(work, jobs), 1):
            tally.join(seen)
            if done % 20 == 0:
                print(f"{done} of {len(jobs)}: {time.perf_counter() - began:.0f} s", flush=True)
    rows = tally.sum_up()
    print(report.table(rows), *tally.failures, sep="\n")
    if not arguments.fast:
        where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU, 1 thread"
        settings = {**SETTINGS, "where": where, "failures": tally.failures}
        print(report.write(f"promises-{DEVICE}", settings, rows, arguments.out))
    sys.exit(bool(tally.failures))


if __name__ == "__main__":
    main()
