"""The command line: thin doors to what the library does."""

import platform
from pathlib import Path
from typing import Annotated

import typer

import icnn

app = typer.Typer(
    help="Input convex neural networks: energies f(x, y) that are convex in y by construction.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of every random choice.")]


def writable(folder: Path) -> Path:
    """Make the folder now: nobody wants to hear after the work that there is no place for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make {folder}: {error.strerror}") from error
    return folder


Out = Annotated[
    Path, typer.Option(callback=writable, help="Folder for pictures and numbers; made if missing.")
]
Fast = Annotated[bool, typer.Option("--fast", help="Less of everything: a smoke test.")]


def show_version(wanted: bool) -> None:
    """Print the versions that a bug report needs."""
    if wanted:
        import torch

        typer.echo(
            f"icnn {icnn.__version__} (torch {torch.__version__}, "
            f"Python {platform.python_version()})"
        )
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Show versions and exit."
        ),
    ] = False,
) -> None:
    """Input convex neural networks: energies f(x, y) that are convex in y by construction."""


@app.command()
def demo(seed: Seed = 0, out: Out = Path("icnn-demo"), fast: Fast = False) -> None:
    """Half a minute through what works: four energies trained, measured and drawn."""
    import torch

    from icnn.experiments.demo import Settings, run

    torch.set_num_threads(1)  # the networks are small: more threads would only wait for each other
    run(Settings(seed=seed, out=out, fast=fast))


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Which ones; all of them by default.")
    ] = None,
    seed: Seed = 0,
    out: Out = Path("results"),
    fast: Fast = False,
) -> None:
    """What the argmin costs on this machine: each benchmark prints a table and writes its numbers.

    argmin (against its network passes), backward, growth, room (memory), profile, rivals, promises
    (of the compiled kernels). They are part of the repository, not of the package: run this in a
    clone.
    """
    from icnn.experiments.bench import Settings, run

    run(Settings(tuple(names or ()), seed=seed, out=out, fast=fast))


reproduce = typer.Typer(
    help="The paper's experiments, under an honest protocol.", no_args_is_help=True
)
app.add_typer(reproduce, name="reproduce")
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds, from --seed on.")]
Final = Annotated[
    bool,
    typer.Option("--final", help="Read the test set. Each reading is noted in readings.jsonl."),
]


@reproduce.command()
def synthetic(
    seed: Seed = 0,
    seeds: Seeds = 5,
    out: Out = Path("icnn-synthetic"),
    fast: Fast = False,
    final: Final = False,
) -> None:
    """Labels of points in the plane: FICNN and PICNN, a plain network, a support vector machine.

    Writes synthetic.json, synthetic.png and synthetic.html: some minutes.
    """
    import torch

    from icnn.experiments.synthetic import Settings, run

    torch.set_num_threads(1)  # the networks are small: more threads would only wait for each other
    run(Settings(seed=seed, seeds=seeds, out=out, fast=fast, final=final))


@reproduce.command()
def bibtex(
    seed: Seed = 0,
    seeds: Seeds = 5,
    out: Out = Path("icnn-bibtex"),
    fast: Fast = False,
    final: Final = False,
) -> None:
    """Tags of publications: the paper's table in its own protocol, and an honest one.

    Writes bibtex.json, pictures and bibtex.html: half an hour, with --final three quarters. The
    data are fetched once.
    """
    from icnn.experiments.bibtex import Settings, run

    run(Settings(seed=seed, seeds=seeds, out=out, fast=fast, final=final))


@reproduce.command()
def olivetti(
    seed: Seed = 0,
    seeds: Seeds = 5,
    out: Out = Path("icnn-olivetti"),
    fast: Fast = False,
    final: Final = False,
) -> None:
    """Halves of faces: the paper's networks in its own protocol, and an honest one.

    Writes olivetti.json, pictures and olivetti.html. The data are fetched once.
    """
    from icnn.experiments.olivetti import Settings, run

    run(Settings(seed=seed, seeds=seeds, out=out, fast=fast, final=final))


@reproduce.command()
def control(
    task: Annotated[
        list[str], typer.Option(help="A task, as Hopper; may be given several times.")
    ] = ["HalfCheetah", "Hopper", "Swimmer"],  # noqa: B006
    algo: Annotated[
        list[str],
        typer.Option(help="ICNNQ, ICNN (the paper's), NAF, SAC, TD3 or DDPG; several times."),
    ] = ["ICNNQ"],  # noqa: B006
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Add ICNNQ, ICNN, and each improvement by itself.")
    ] = False,
    seed: Seed = 0,
    seeds: Seeds = 5,
    steps: Annotated[
        int, typer.Option(min=1000, help="Of the environment, in each run.")
    ] = 100_000,
    engine: Annotated[
        str, typer.Option(help="`stack`: in one process, on a GPU if there is one; or `ray`.")
    ] = "stack",
    workers: Annotated[
        int, typer.Option(min=0, help="Processes for environments, of each stack; 0 for none.")
    ] = 0,
    film: Annotated[
        bool, typer.Option("--film", help="Draw a short film of an agent of each task.")
    ] = False,
    table: Annotated[
        bool,
        typer.Option(
            "--table",
            help="The whole table instead: ten tasks, six algorithms, ours first; "
            "5 seeds of ours and the paper's, 3 of others.",
        ),
    ] = False,
    out: Out = Path("icnn-control"),
    fast: Fast = False,
) -> None:
    """Q-learning without an actor on MuJoCo: runs that are missing in the folder are made.

    Writes a JSON file for each run, control.json, learning curves and control.html. A run that was
    stopped goes on.
    """
    import torch

    from icnn.experiments.control import Settings, run
    from icnn.experiments.control_algorithms import ALONE

    torch.set_num_threads(1)  # the networks are small: more threads would only wait for each other
    algos = dict.fromkeys((*algo, *(ALONE if ablation else ())))
    try:
        settings = Settings(
            tuple(task), tuple(algos), seed, seeds, steps, engine, workers, film, table, out, fast
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    run(settings)
