"""The `icnn` command, also as `python -m icnn`."""

import sys

from icnn.extras import require


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        require("typer", "cli")
        from icnn.cli import app

        app()
    except ModuleNotFoundError as error:
        sys.exit(f"icnn: {error}")


if __name__ == "__main__":
    main()
