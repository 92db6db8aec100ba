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

Seed = Annotated[int, typer.Option(help="Seed of every random choice.")]
Out = Annotated[Path, typer.Option(help="Folder for pictures and numbers; made if missing.")]
Fast = Annotated[bool, typer.Option("--fast", help="Fewer steps: seconds, and worse fits.")]


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
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Versions.")
    ] = False,
) -> None:
    """Input convex neural networks: energies f(x, y) that are convex in y by construction."""


@app.command()
def demo(seed: Seed = 0, out: Out = Path("icnn-demo"), fast: Fast = False) -> None:
    """Two minutes through what works: three energies trained, measured and drawn."""
    from icnn.experiments.demo import Settings, run

    run(Settings(seed=seed, out=out, fast=fast))
