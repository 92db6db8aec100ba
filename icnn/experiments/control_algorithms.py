"""Settings of our algorithms in control tasks, and what each improvement does by itself.

`ICNN` is the paper's, `ICNNQ` ours. `ICNN+name` has one of the improvements below, `ICNNQ-name` all
but that one; `ICNNQ+name` has one that is not among our defaults.
"""

from dataclasses import replace
from typing import Any

from icnn.rl.learning import PAPER, Training
from icnn.rl.quadratics import Quadratics

TASKS = (
    "Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum",
    "InvertedPendulum", "Reacher", "Swimmer", "Walker2d",
)  # fmt: skip
# A swimmer's stroke pays off later than a discount of 0.99 looks; the same for all algorithms.
GAMMAS = {"Swimmer": 0.9999}
OURS = {
    "ICNNQ": Training(),
    "ICNN": PAPER,
    "NAF": Training(form=Quadratics(), critics=1),
}
RIVALS = ("SAC", "TD3", "DDPG")
# The whole table: those first that matter most, and how many seeds of each.
TABLE = {"ICNNQ": 5, "ICNN": 5, "SAC": 3, "TD3": 3, "NAF": 3, "DDPG": 3}

# What the paper's algorithm and ours do not share.
IMPROVEMENTS = {
    "double": ("critics", "rules.calibrated"),
    "size": ("form.state", "form.hidden"),
    "norm": ("form.norm",),
    "smooth": ("form.activation", "form.bowl"),
    "standard": ("standardised",),
    "bounded": ("rules.bounded",),
    "bare": ("rules.entropy", "rules.steps", "rules.target_steps"),
    "rates": ("learning_rate", "tau", "slow"),
    "decay": ("weight_decay",),
    "n-steps": ("n_steps", "rules.far"),
    "noise": ("noise",),
}
OTHERS: dict[str, dict[str, Any]] = {
    "entropy": {"rules.entropy": 0.1},
    "all-n-steps": {"rules.far": 1.0},
    "least": {"rules.calibrated": False},
    "updates": {"gradient_steps": 2},
    "gates": {"form.bounded_gates": True},
}
WHAT = {
    "double": "two critics, targets between their mean and the least",
    "size": "256 units along the state and 128 convex ones, not 200",
    "norm": "layer norms along the state",
    "smooth": "softplus, and a square of the action",
    "standard": "states standardised, values in units of rewards",
    "bounded": "bounded targets",
    "least": "targets of the least Q, always",
    "bare": "no entropy, and a shorter search",
    "rates": "other rates, and slow copies act in tests",
    "decay": "more weight decay",
    "noise": "more noise in exploration",
    "entropy": "an entropy of 0.1",
    "n-steps": "a quarter of targets of three steps",
    "all-n-steps": "all targets of three steps",
    "updates": "two updates a step",
    "gates": "bounded gates",
}


def changed(base: Training, values: dict[str, Any]) -> Training:
    """Some settings, by their names with dots."""
    for name, value in values.items():
        part, _, field = name.rpartition(".")
        if part:
            value = replace(getattr(base, part), **{field: value})
        base = replace(base, **{part or field: value})
    return base


def taken(base: Training, other: Training, names: tuple[str, ...]) -> Training:
    """`base`, but for some settings of the other."""

    def value(name: str) -> Any:
        found: Any = other
        for part in name.split("."):
            found = getattr(found, part)
        return found

    return changed(base, {name: value(name) for name in names})


ABLATION = {
    **{f"ICNN+{n}": taken(PAPER, Training(), fields) for n, fields in IMPROVEMENTS.items()},
    **{f"ICNNQ-{n}": taken(Training(), PAPER, fields) for n, fields in IMPROVEMENTS.items()},
    **{f"ICNNQ+{n}": changed(Training(), values) for n, values in OTHERS.items()},
}
# In the order of the table, and those that the flag `--ablation` adds.
CHANGES = sorted(("ICNN", "ICNNQ", *ABLATION), key=lambda algo: algo.startswith("ICNNQ"))
ALONE = [algo for algo in CHANGES if "ICNNQ-" not in algo]


def training(task: str, algo: str, fast: bool) -> Training:
    """The settings of one of our algorithms in a task."""
    found = (OURS | ABLATION)[algo]
    found = replace(found, gamma=GAMMAS.get(task, found.gamma))
    if not fast:
        return found
    form = found.form
    small = (
        Quadratics((16,)) if isinstance(form, Quadratics)
        else replace(form, state=(16,), hidden=(8,))
    )  # fmt: skip
    return replace(found, form=small, batch_size=16, learning_starts=100)
