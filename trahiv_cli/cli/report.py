"""`report`: an archive for a person who helps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from trahiv_cli.cli.options import option
from trahiv_cli.cli.output import FormatOption, out
from trahiv_cli.cli.watch import RunArgument, newest_run


def report(
    run_dir: RunArgument = None,
    output: Annotated[
        Path | None, option("--output FILE", "Where to write it. Default: trahiv-report-RUN-TIME.tar.gz.")
    ] = None,
    format: FormatOption = None,
) -> None:
    """Pack events, log, recipe and versions for somebody who helps.

    Keys, invitations, what looks like a token, and the path of your home are left out.
    """
    out.use(format)
    from trahiv_cli.doctor.report import write_report

    folder = run_dir or newest_run()
    name = f"trahiv-report-{folder.resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"
    archive = output or Path(name)
    names = write_report(folder, archive)
    size = archive.stat().st_size
    text = f"{archive}: {size / 1e6:.1f} MB, with {', '.join(names)}"
    out.record(text, "report", path=str(archive), bytes=size, names=names)
    out.hint("look into it before you send it: the names and addresses of peers are in it")
