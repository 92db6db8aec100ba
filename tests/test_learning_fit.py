"""The training loop: what it learns, what it writes, how it ends."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import icnn
from icnn.energies.layers import NonNegative
from icnn.learning.parallel import Team, shard

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
TRAINEE = Path(__file__).with_name("trainee.py")


def squares(energy: Any, x: Tensor, y: Tensor, cost: Tensor) -> Tensor:
    return (energy(x, y) - cost).square().mean()


def made(**options: Any) -> tuple[icnn.PICNN, DataLoader]:
    torch.manual_seed(0)
    x, y = torch.randn(60, 3), torch.rand(60, 2)
    data = TensorDataset(x, y, (y - x[:, :2].sigmoid()).abs().sum(dim=1))
    return icnn.PICNN(3, 2, (8,), **options), DataLoader(data, 16, shuffle=True)


def start(*arguments: Any, processes: int = 1, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(TRAINEE)]
    if processes > 1:
        several = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, "-m", *several, str(TRAINEE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options,
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def killed(moments: int, every: int | None, folder: Path, device: str = "cpu") -> None:
    """A run that is killed so many times, and continued, ends as one that is left alone."""
    common = ["--epochs", 8, "--device", device]
    finished(start(folder / "whole.pt", *common))
    draw, checkpoint = random.Random(every), folder / "run.ckpt"
    common += ["--checkpoint", checkpoint, *([] if every is None else ["--every", every])]
    for _ in range(moments):
        process = start(folder / "parts.pt", *common)
        assert process.stdout is not None
        process.stdout.readline()  # it is on its way
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.wait()
    finished(start(folder / "parts.pt", *common))
    whole, parts = (torch.load(folder / f"{name}.pt") for name in ("whole", "parts"))
    assert same(whole["energy"], parts["energy"])
    assert same(whole["rows"], parts["rows"])
    assert whole["best"] == parts["best"]
    assert len(list(folder.glob(".*.part"))) <= 1, "of a process that was killed in the act"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("every", [None, 2])
def test_killed_and_resumed_to_the_last_bit(every: int | None, device: str, tmp_path: Path):
    killed(5 if every else 2, every, tmp_path, device)


@pytest.mark.slow
def test_killed_and_resumed_twenty_times(tmp_path: Path):
    killed(20, 3, tmp_path)


def test_two_processes_are_one_with_twice_the_batch(tmp_path: Path):
    finished(start(tmp_path / "one.pt", "--calm", "--batch", 16))
    finished(start(tmp_path / "two.pt", "--calm", "--batch", 8, processes=2))
    one, two = (torch.load(tmp_path / f"{name}.pt") for name in ("one", "two"))
    for name, weight in one["energy"].items():
        torch.testing.assert_close(two["energy"][name], weight, atol=1e-5, rtol=1e-5)
    for a, b in zip(one["rows"], two["rows"], strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_two_processes_killed_and_resumed(tmp_path: Path):
    finished(start(tmp_path / "whole.pt", processes=2))
    arguments = [tmp_path / "parts.pt", "--checkpoint", tmp_path / "run.ckpt", "--every", 2]
    process = start(*arguments, processes=2, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished(start(*arguments, processes=2))
    whole, parts = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "parts"))
    assert same(whole["energy"], parts["energy"])


def test_the_best_weights_are_kept_and_patience_ends_it():
    energy, loader = made()
    scores, weights = iter([3.0, 1.0, 2.0, 2.0, 5.0, 0.0]), []

    def validation(energy: nn.Module) -> float:
        assert not energy.training
        weights.append({name: w.clone() for name, w in energy.state_dict().items()})
        return next(scores)

    history = icnn.fit(energy, loader, squares, validation=validation, patience=3)
    assert history.stopped == "no better validation in 3 epochs"
    assert history.best == 2
    assert len(history.rows) == 5
    assert same(dict(energy.state_dict()), weights[1])
    assert not energy.training


def test_a_run_that_has_ended_ends_again(tmp_path: Path):
    energy, loader = made()
    options: Any = {"validation": loader, "checkpoint": tmp_path / "a.ckpt", "epochs": 3}
    first = icnn.fit(energy, loader, squares, **options)
    other, loader = made()
    again = icnn.fit(other, loader, squares, resume=True, **options)
    assert again.rows == first.rows
    assert same(dict(other.state_dict()), dict(energy.state_dict()))
    more = icnn.fit(other, loader, squares, resume=True, **options | {"epochs": 4})
    assert more.rows[:3] == first.rows
    assert len(more.rows) == 4


def test_a_checkpoint_is_not_written_over_by_mistake(tmp_path: Path):
    energy, loader = made()
    path = tmp_path / "a.ckpt"
    icnn.fit(energy, loader, squares, epochs=1, checkpoint=path)
    with pytest.raises(ValueError, match="`checkpoint` is there already"):
        icnn.fit(energy, loader, squares, epochs=1, checkpoint=path)
    with pytest.raises(ValueError, match="another energy"):
        icnn.fit(icnn.FICNN(3), loader, squares, epochs=1, checkpoint=path, resume=True)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is no checkpoint"):
        icnn.fit(energy, loader, squares, epochs=1, checkpoint=path, resume=True)


def test_what_a_callback_ended_goes_on_without_it(tmp_path: Path):
    energy, loader = made()
    options: Any = {"checkpoint": tmp_path / "a.ckpt", "epochs": 3, "resume": True}
    end: Any = {"callbacks": [lambda run: True]}
    for _ in range(2):
        history = icnn.fit(energy, loader, squares, **options, **end)
        assert (len(history.rows), history.stopped) == (1, "a callback ended it")
    assert len(icnn.fit(energy, loader, squares, **options).rows) == 3


def test_gaps_are_told_where_the_loss_gives_solutions():
    energy, loader = made()

    def loss(energy: Any, x: Tensor, y: Tensor, cost: Tensor) -> Any:
        found = icnn.argmin(energy, x, icnn.Box())
        return (found.y - y).square().mean(), found

    row = icnn.fit(energy, loader, loss, epochs=1).rows[0]
    assert 0 <= row["gap"] < 1e-3
    assert row["converged"] == 1.0


@pytest.mark.parametrize("positivity", ["project", "softplus", "exp", "square", "abs"])
def test_weight_decay_shrinks_what_is_used(positivity: str):
    energy, loader = made(positivity=positivity)
    before = [part().detach().clone() for part in energy.modules() if isinstance(part, NonNegative)]
    optimizer = torch.optim.SGD(energy.parameters(), lr=0.1)

    def nothing(energy: Any, x: Tensor, y: Tensor, cost: Tensor) -> Tensor:
        return 0.0 * energy(x, y).mean()

    icnn.fit(energy, loader, nothing, epochs=2, optimizer=optimizer, weight_decay=0.5)
    after = [part().detach() for part in energy.modules() if isinstance(part, NonNegative)]
    assert before
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(b, a * 0.95**8, rtol=1e-4, atol=1e-6)


def test_weight_decay_is_that_of_adamw():
    energy, loader = made()
    torch.manual_seed(1)
    icnn.fit(energy, loader, squares, epochs=2, weight_decay=0.1)
    other, loader = made()
    torch.manual_seed(1)
    vectors = [p for p in other.parameters() if p.ndim < 2]
    groups = [{"params": vectors, "weight_decay": 0.0},
              {"params": [p for p in other.parameters() if p.ndim > 1]}]  # fmt: skip
    icnn.fit(other, loader, squares, epochs=2,
             optimizer=torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1))  # fmt: skip
    for a, b in zip(energy.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_clipping_schedule_and_callbacks():
    energy, loader = made()
    before = [p.detach().clone() for p in energy.parameters()]
    optimizer = torch.optim.SGD(energy.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 1 else 0.0)
    seen = []

    def callback(run: Any) -> bool:
        seen.append((run.epoch, run.history.rows[-1]["rate"]))
        return run.epoch == 2

    def steep(*batch: Any) -> Tensor:
        return 1e4 * squares(*batch)

    history = icnn.fit(
        energy, loader, steep, clip=0.01, optimizer=optimizer, schedule=schedule,
        callbacks=[callback],
    )  # fmt: skip
    assert seen == [(1, 0.0), (2, 0.0)]
    assert history.stopped == "a callback ended it"
    moved = [p.detach() - b for p, b in zip(energy.parameters(), before, strict=True)]
    # One step of the clipped length; projection only shortens it.
    assert 0 < torch.cat([m.flatten() for m in moved]).norm() <= 0.01 + 1e-6


def test_a_schedule_that_looks_at_the_validation():
    energy, loader = made()
    optimizer = torch.optim.SGD(energy.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=1)
    history = icnn.fit(
        energy, loader, squares, epochs=4, optimizer=optimizer, schedule=schedule,
        validation=lambda energy: 1.0,
    )  # fmt: skip
    assert [row["rate"] for row in history.rows] == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])


def test_a_validation_that_is_no_number(tmp_path: Path):
    energy, loader = made()
    with pytest.raises(FloatingPointError, match="the validation is nan in epoch 1, step 4"):
        icnn.fit(energy, loader, squares, validation=lambda energy: float("nan"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_mixed_precision(precision: torch.dtype, device: str, tmp_path: Path):
    def run(epochs: int, resume: bool = False) -> tuple[icnn.PICNN, icnn.History]:
        energy, loader = made()
        path = tmp_path / "a.ckpt" if resume else None
        optimizer = torch.optim.Adam(energy.to(device).parameters(), lr=3e-3)
        return energy, icnn.fit(
            energy, loader, squares, epochs=epochs, precision=precision, optimizer=optimizer,
            checkpoint=path, resume=resume,
        )  # fmt: skip

    whole, history = run(12)
    assert history.rows[-1]["loss"] < 0.5 * history.rows[0]["loss"]
    assert all(p.dtype == torch.float32 for p in whole.parameters())
    run(5, resume=True)  # with the scale of its scaler
    assert same(dict(run(12, resume=True)[0].state_dict()), dict(whole.state_dict()))


@pytest.mark.parametrize("device", DEVICES)
def test_answers_keep_their_precision_under_autocast(device: str):
    energy, loader = made()
    features = nn.Linear(3, 3).to(device)
    energy.to(device)

    def loss(energy: Any, x: Tensor, y: Tensor, cost: Tensor) -> tuple[Tensor, icnn.Solution]:
        low = features(x)
        assert low.dtype == torch.bfloat16
        found = icnn.argmin(energy, low, icnn.Box())
        return (found.y - y).square().mean(), found

    history = icnn.fit(energy, loader, loss, epochs=2, precision=torch.bfloat16)
    assert all(row["converged"] == 1 for row in history.rows)
    assert all(row["gap"] < 1e-3 for row in history.rows)


def test_logs_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    energy, loader = made()
    history = icnn.fit(
        energy, loader, squares, epochs=2, validation=loader, logs=tmp_path / "logs", progress=True
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 9))
    found = [event.value for event in events.Scalars("epoch/validation")]
    assert found == pytest.approx([row["validation"] for row in history.rows])
    assert capsys.readouterr().err.startswith("epoch 1/2: loss ")
    assert history.plot(tmp_path / "a.png").stat().st_size > 1000
    assert history.report().startswith("2 epochs (all of them); of epoch ")


def test_a_bar_on_a_terminal_however_narrow(capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    energy, loader = made()
    icnn.fit(energy, loader, squares, epochs=2, validation=loader)
    *_, last = (line for line in capsys.readouterr().err.splitlines() if "epoch 2/2" in line)
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in last
    assert "loss" in last


def test_a_loss_that_is_no_number(tmp_path: Path):
    energy, loader = made()
    good = []

    def loss(energy: Any, x: Tensor, y: Tensor, cost: Tensor) -> Tensor:
        broken = len(good) == 6  # in the second epoch
        good.append({name: w.clone() for name, w in energy.state_dict().items()})
        return squares(energy, x, y, cost) * (torch.nan if broken else 1.0)

    path = tmp_path / "a.ckpt"
    with pytest.raises(FloatingPointError, match=r"loss is nan in epoch 2, step 3.*a\.ckpt"):
        icnn.fit(energy, loader, loss, checkpoint=path)
    assert same(dict(energy.state_dict()), good[6])
    torch.manual_seed(0)
    history = icnn.fit(energy, loader, squares, epochs=3, checkpoint=path, resume=True)
    assert len(history.rows) == 3


def test_an_energy_that_runs_away(tmp_path: Path):
    energy, loader = made()
    optimizer = torch.optim.SGD(energy.parameters(), lr=1e20)

    def loss(energy: Any, x: Tensor, y: Tensor, cost: Tensor) -> Any:
        found = icnn.argmin(energy, x, icnn.Box())
        return squares(energy, x, y, cost) + found.y.sum(), found

    with pytest.raises(FloatingPointError, match="A lower learning rate"):
        icnn.fit(energy, loader, loss, optimizer=optimizer, checkpoint=tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists(), "there was nothing good to write"


def test_a_gradient_that_is_no_number():
    energy, loader = made()

    def loss(energy: Any, x: Tensor, y: Tensor, cost: Tensor) -> Tensor:
        return (energy(x, y) * 0.0).clamp(min=0).sqrt().mean()

    with pytest.raises(FloatingPointError, match=r"gradient of `.*` is not finite in epoch 1"):
        icnn.fit(energy, loader, loss)


def test_weights_that_were_thrown_far_are_not_written(tmp_path: Path):
    energy, loader = made()
    path, far = tmp_path / "a.ckpt", [1e-3] * 5 + [1e30] * 100
    optimizer = torch.optim.SGD(energy.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: far[step])
    options: Any = {"schedule": schedule, "clip": 1.0, "checkpoint": path, "every": 1}
    with pytest.raises(FloatingPointError, match="The last good checkpoint"):
        icnn.fit(energy, loader, squares, optimizer=optimizer, **options)
    weights = torch.load(path)["energy"].values()
    assert max(float(w.abs().max()) for w in weights) < 100


def test_statistics_of_a_norm_survive_a_broken_batch():
    energy, loader = made(x_norm="batch")
    x = loader.dataset.tensors[0]  # pyright: ignore
    x[7] = torch.nan
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        icnn.fit(energy, loader, squares)
    assert all(bool(buffer.isfinite().all()) for buffer in energy.buffers())


def test_numbers_of_numpy_in_a_checkpoint(tmp_path: Path):
    energy, loader = made()
    optimizer = torch.optim.SGD(energy.parameters(), lr=np.float64(1e-3))  # pyright: ignore
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(0.01 * step))

    def callback(run: Any) -> None:
        run.history.rows[-1]["f1"] = np.float64(0.5)

    options: Any = {"optimizer": optimizer, "schedule": schedule, "callbacks": [callback]}
    options |= {"checkpoint": tmp_path / "a.ckpt", "resume": True}
    icnn.fit(energy, loader, squares, epochs=1, **options)
    assert icnn.fit(energy, loader, squares, epochs=2, **options).rows[0]["f1"] == 0.5


def test_resumed_without_its_validation(tmp_path: Path):
    energy, loader = made()
    options: Any = {"checkpoint": tmp_path / "a.ckpt", "resume": True}
    icnn.fit(energy, loader, squares, epochs=2, validation=lambda energy: 1.0, **options)
    icnn.fit(energy, loader, squares, epochs=3, **options)
    last = torch.load(tmp_path / "a.ckpt")["energy"]
    assert same(dict(energy.state_dict()), dict(last))


def test_examples_are_dealt_out_once():
    _, loader = made()
    team = Team(torch.device("cpu"), 0, 2)
    sampler = DistributedSampler(loader.dataset, 2, 0)  # pyright: ignore
    with pytest.raises(ValueError, match="got a DistributedSampler"):
        shard(DataLoader(loader.dataset, 16, sampler=sampler), team)
    with pytest.raises(ValueError, match="`loader` must be a DataLoader"):
        shard([1, 2], team)
    parts = [shard(loader, Team(torch.device("cpu"), rank, 2)) for rank in range(2)]
    torch.manual_seed(0)
    shares = [[own.share(step) for step in range(len(own))] for _, own in parts if own]
    assert shares == [[1.0, 1.0], [1.0, 1.0]]
    assert [len(loader) for loader, _ in parts] == [2, 2]


FULL = """
import resource, signal, sys, torch, icnn
energy, path = icnn.FICNN(2, (8,)), sys.argv[1]
batch = (torch.rand(20, 2), torch.rand(20))
loss = lambda energy, y, cost: (energy(None, y) - cost).square().mean()
def full(run):
    if run.epoch == 2:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    icnn.fit(energy, [batch], loss, epochs=5, checkpoint=path, callbacks=[full])
except OSError as error:
    print(error)
"""


def test_a_disk_that_is_full(tmp_path: Path):
    # The system itself refuses to write more: the same error as of a disk, but for its number.
    path = tmp_path / "a.ckpt"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True
    )
    assert "cannot write the checkpoint; the one before it is whole" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]
    energy, batch = icnn.FICNN(2, (8,)), (torch.rand(20, 2), torch.rand(20))

    def loss(energy: Any, y: Tensor, cost: Tensor) -> Tensor:
        return (energy(None, y) - cost).square().mean()

    history = icnn.fit(energy, [batch], loss, epochs=2, checkpoint=path, resume=True)
    assert [row["epoch"] for row in history.rows] == [1, 2]


@pytest.fixture
def heeded():
    """Interrupts are, also where tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
def test_an_interrupted_keyboard(tmp_path: Path):
    energy, loader = made()
    path, steps = tmp_path / "a.ckpt", []

    def loss(*batch: Any) -> Tensor:
        steps.append(0)
        if len(steps) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return squares(*batch)

    torch.manual_seed(3)
    with pytest.raises(KeyboardInterrupt, match="epoch 2 after step 2: resume=True goes on"):
        icnn.fit(energy, loader, loss, epochs=3, checkpoint=path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    icnn.fit(energy, loader, squares, epochs=3, checkpoint=path, resume=True)
    whole, loader = made()
    torch.manual_seed(3)
    icnn.fit(whole, loader, squares, epochs=3)
    assert same(dict(whole.state_dict()), dict(energy.state_dict()))


def test_loaders_with_generators_and_workers_of_their_own(tmp_path: Path):
    def run(epochs: int, resume: bool) -> tuple[dict[str, Tensor], list[float]]:
        energy, loader = made()
        first, second = (torch.Generator().manual_seed(seed) for seed in (7, 8))
        data = loader.dataset
        loader = DataLoader(data, 16, shuffle=True, generator=first, num_workers=1)
        some = RandomSampler(data, num_samples=20, generator=second)  # pyright: ignore
        held = DataLoader(data, 16, sampler=some)
        path = tmp_path / "a.ckpt" if resume else None
        history = icnn.fit(
            energy, loader, squares, epochs=epochs, validation=held, checkpoint=path, resume=resume
        )
        return dict(energy.state_dict()), [row["validation"] for row in history.rows]

    whole = run(3, False)
    run(1, True)
    again = run(3, True)
    assert same(whole[0], again[0])
    assert whole[1] == again[1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"epochs": 0}, "`epochs` must be an integer of at least 1, got 0"),
        ({"clip": 0.0}, "`clip` must be above 0"),
        ({"patience": 2}, "`patience` needs a `validation`"),
        ({"resume": True}, "`resume` and `every` need a `checkpoint`"),
        ({"precision": torch.float64}, "`precision` must be one of"),
        ({"weight_decay": -1.0}, "`weight_decay` must be"),
        ({"validation": []}, "`validation` must give batches, got none"),
        ({"validation": lambda energy: None}, "`validation` must give a number, got None"),
        ({"callbacks": print}, "`callbacks` must be a list of functions"),
        ({"checkpoint": "."}, "`checkpoint` must be a file, got a folder"),
    ],
)
def test_bad_options(options: Any, told: str):
    energy, loader = made()
    with pytest.raises(ValueError, match=told):
        icnn.fit(energy, loader, squares, **options)


def test_bad_parts():
    energy, loader = made()
    batches = [tuple(t[:4] for t in loader.dataset.tensors)]  # pyright: ignore
    with pytest.raises(ValueError, match="`loader` must give batches, got none in epoch 1"):
        icnn.fit(energy, [], squares)
    with pytest.raises(ValueError, match="none in epoch 2, as an iterator that can be read only"):
        icnn.fit(energy, iter(batches), squares)
    with pytest.raises(ValueError, match=r"`loss` must give one number.*\(16,\): take the mean"):
        icnn.fit(energy, loader, lambda energy, x, y, cost: energy(x, y))
    with pytest.raises(ValueError, match="`loss` must give one number, as a tensor, got True"):
        icnn.fit(energy, loader, lambda energy, x, y, cost: True)
    with pytest.raises(ValueError, match="`optimizer` must make steps of gradients that are there"):
        icnn.fit(energy, loader, squares, optimizer=torch.optim.LBFGS(energy.parameters()))
    with pytest.raises(ValueError, match="`loss` must depend on weights"):
        icnn.fit(energy, loader, lambda energy, x, y, cost: cost.mean())
    with pytest.raises(ValueError, match="`energy` must have parameters that are learned"):
        icnn.fit(nn.ReLU(), loader, squares)
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(energy.parameters()), 1)
    with pytest.raises(ValueError, match="`schedule` must be one of `optimizer`"):
        icnn.fit(energy, loader, squares, schedule=schedule)
