"""The command line within this process."""

import pytest

from trahiv_cli.cli.app import run


@pytest.fixture
def trahiv(capfd):
    """`trahiv("check", ...)` runs a command: its exit code, stdout and stderr."""

    def trahiv(*args):
        with pytest.raises(SystemExit) as left:
            run(args)
        said = capfd.readouterr()
        return left.value.code, said.out, said.err

    return trahiv
