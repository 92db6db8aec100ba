"""Every benchmark of speed, one after another, each in a process of its own."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("argmin", "backward", "growth", "room", "profile", "rivals", "promises")


@dataclass(frozen=True)
class Settings:
    """Which benchmarks run, and how."""

    names: tuple[str, ...] = ()
    seed: int = 0
    out: Path = Path("results")
    fast: bool = False


def run(settings: Settings) -> dict[str, int]:
    """Run them; gives the exit status of each."""
    if not (ROOT / "benchmarks").is_dir():
        raise SystemExit(
            f"icnn bench: no folder `benchmarks` in {ROOT}: it is part of the repository, and not "
            "of the package. Clone it, and run this there."
        )
    unknown = [name for name in settings.names if name not in NAMES]
    if unknown:
        raise SystemExit(f"icnn bench: no benchmark {unknown[0]!r}: there are {', '.join(NAMES)}")
    found = {}
    for name in settings.names or NAMES:
        print(f"--- {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", "--seed", str(settings.seed)]
        command += ["--out", str(settings.out.absolute()), *(["--fast"] if settings.fast else [])]
        found[name] = subprocess.run(command, cwd=ROOT, check=False).returncode
    failed = [name for name, status in found.items() if status]
    if failed:
        raise SystemExit(f"icnn bench: failed: {', '.join(failed)}")
    return found
