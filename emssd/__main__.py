"""The command ``emssd``, and ``python -m emssd``: the first thing it does is to make sure that it can end quietly."""

from __future__ import annotations

from emssd.console.terminal import steady

__all__ = ["main"]


@steady("emssd")
def main() -> None:
    """Run the command line. Exits with 2 for an error of the user's, 130 for Ctrl-C."""
    from emssd.cli import (
        command as cli,  # here, because it brings Hydra: Ctrl-C while that is imported is dealt with already
    )

    cli.main()


if __name__ == "__main__":
    main()
