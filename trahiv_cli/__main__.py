"""`python -m trahiv_cli`, and the console script."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from trahiv_cli.cli.app import run

    run()


if __name__ == "__main__":
    main()
