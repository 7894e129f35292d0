"""`python -m trahiv_cli`, and the console script."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    try:
        from trahiv_cli.cli.app import run

        run()
    except KeyboardInterrupt:  # before a command could handle it
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
