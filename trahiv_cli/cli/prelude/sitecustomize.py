"""Python imports this module at the start of each process of a program that `trahiv launch` runs.

It stands before the module of this name that the system or the program may have, and imports that one, too.
An interpreter without trahiv runs as usual.
"""

import contextlib
import importlib.util
import json
import os
import sys


def read_command_line() -> None:
    """Run the command line of `trahiv launch` in this process."""
    from trahiv_cli.cli.app import app
    from trahiv_cli.cli.launching import LAUNCH_VARIABLE

    app(json.loads(os.environ[LAUNCH_VARIABLE]), prog_name="trahiv", standalone_mode=False)


sys.path.remove(os.path.dirname(__file__))
own = sys.modules.pop(__name__)
with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module(__name__)
sys.modules.setdefault(__name__, own)  # the import of this module ends with it

if importlib.util.find_spec("trahiv_cli"):
    from trahiv_cli.cli.launching import prepare

    prepare(read_command_line)
