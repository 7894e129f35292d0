"""The notebooks as their readers run them: in real kernels, interrupted, and run again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import time
from functools import partial
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from tests.kit.commands import LOOPBACK, ORIGINAL, ROOT, VANISH_S
from tests.kit.stand_ins import write_original
from tests.kit.verdicts import group_of
from tests.kit.warm import MARK
from tests.swarm.conftest import told

pytestmark = pytest.mark.timeout(300)

NOTEBOOKS = ROOT / "notebooks"
CELL_S = 120
"""After this a cell, or a condition that a test waits for in one, has failed."""

STOP_S = 30.0
KEEPER = {"torch_shm_manager"}
"""Torch's manager of shared memory, which a process has until it ends."""

INVITATION = re.compile(r"initial_peers = \['(trahiv1:[^']+)'\]")
RHYME = """Row, row, row your boat
Gently down the stream,
Merrily, merrily, merrily, merrily,
Life is but a dream.

"""

ROW = re.compile(r"<td>(\d+)</td>\s*<td>([\d.]+)</td>")
"""A step and its loss in the table that transformers draws."""


@pytest.fixture(autouse=True)
def unchanged_handler():
    """Restore the handler of SIGINT: nbclient leaves Python's, also where a shell has the signal ignored."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Session:
    """A notebook in a kernel of its own. Use as a context manager: processes that it started end with it."""

    def __init__(self, name, workplace, **settings):
        book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        self._cells = {cell.id: cell for cell in book.cells}
        [self._settings] = (cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ()))
        self.set(**settings)
        self._indexes = {cell.id: index for index, cell in enumerate(book.cells)}
        self._client = NotebookClient(book, timeout=CELL_S, skip_cells_with_tag="install")
        self._environment = workplace.environment()
        self.folder = workplace.folder
        self.output_dir = settings.get("output_dir")

    async def __aenter__(self):
        self._kernel = self._client.async_setup_kernel(env=self._environment, cwd=str(self.folder))
        await self._kernel.__aenter__()
        self._pid = self._client.km.provisioner.pid
        return self

    async def __aexit__(self, *_):
        try:
            await self._kernel.__aexit__(None, None, None)
        finally:
            for process in self.processes():
                process.kill()

    def set(self, **settings):
        """Type other values into the cell of settings, which is not run."""
        lines = self._settings.source.splitlines()
        for name, value in settings.items():
            [at] = (number for number, line in enumerate(lines) if line.startswith(f"{name} = "))
            lines[at] = f"{name} = {value!r}"
        self._settings.source = "\n".join(lines)

    async def run(self, *cells):
        """Run cells to their ends; CellExecutionError for an exception in one."""
        for cell in cells:
            await self._client.async_execute_cell(self._cells[cell], self._indexes[cell])

    def begin(self, cell):
        """Run a cell in the background."""
        self._cells[cell].outputs, self._begun = [], cell
        self._task = asyncio.create_task(self.run(cell))

    async def until(self, condition):
        """Return a condition's value once it is true, while the cell that was begun runs."""
        deadline = time.monotonic() + CELL_S
        while not (found := condition()):
            has_failed = time.monotonic() >= deadline or self._task.done()
            assert not has_failed, f"the cell showed: {self.shown(self._begun)}"
            await asyncio.sleep(0.05)
        return found

    def shown(self, cell):
        """The output that a reader sees under a cell."""
        outputs = self._cells[cell].outputs
        texts = [output.get("text") or "\n".join(output.get("traceback", ())) for output in outputs]
        return re.sub(r"\x1b\[[0-9;]*m", "", "".join(texts))  # IPython paints tracebacks

    def cell(self, name):
        return self._cells[name]

    async def interrupt(self):
        """Press the button that stops a cell, and wait for the end of the one that was begun."""
        await self._client.km.interrupt_kernel()
        await asyncio.wait_for(self._task, STOP_S)

    async def kill(self):
        """End the kernel at once, as a restart of the session does while a cell runs."""
        await self._client.km.shutdown_kernel(now=True)
        with pytest.raises(DeadKernelError):
            await self._task

    async def left(self, seconds=VANISH_S):
        """The names of processes that the kernel has started and that do not end within some seconds."""
        deadline = time.monotonic() + seconds
        while (processes := self.processes()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return {process.name() for process in processes}

    def processes(self):
        """All processes that descend from the kernel, without the kernel itself."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_own = process.environ().get(MARK) == self._environment[MARK]
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if is_own and is_alive and process.pid != self._pid:
                    found.append(process)
        return found


def html_of(cell):
    """The HTML that a reader sees under a cell, such as a progress bar and a table of losses."""
    return "".join(output["data"].get("text/html", "") for output in cell.outputs if "data" in output)


def events_of(run):
    file = run / "events.jsonl"
    whole, _, _ = file.read_text().rpartition("\n") if file.exists() else ("", "", "")
    return [json.loads(line) for line in whole.splitlines()]


def newest_checkpoint(run):
    return max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def steps_together(run):
    """Count the steps of a run that were taken in a group of two."""
    steps = told(events_of(run), "step")
    return sum(len(group_of(step)) == 2 for step in steps)


def trained_by_two(session):
    """Losses and steps in the Trainer's table that were taken in a group of two."""
    steps = told(events_of(session.folder / session.output_dir), "step")
    by_two = {step["step"] for step in steps if len(group_of(step)) == 2}
    rows = ROW.findall(html_of(session.cell("train")))
    return [(float(loss), int(step)) for step, loss in rows if int(step) in by_two]


@pytest.mark.parametrize("name", ["join", "drop_in"])
def test_notebook_is_clean_and_installs_trahiv(name):
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    assert set(book.metadata) == {"kernelspec"}
    assert book.metadata.kernelspec.name == "python3"
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all((cell.outputs, cell.execution_count) == ([], None) for cell in code)
    [install] = (cell.source for cell in code if "install" in cell.metadata.get("tags", ()))
    assert install == "%pip install -q trahiv"


def test_interrupted_join_cell_resumes(start_paced, endless, workplace):
    first = start_paced("init", endless(), "--output-dir", "first", *LOOPBACK)
    invitation = Path(first.address.removeprefix("@")).read_text()
    folder = workplace.folder / "notebook"
    settings = {
        "invitation": f"trahiv join --peer {invitation}",
        "folder": str(folder),
        "options": list(LOOPBACK),
    }

    async def story():
        async with Session("join", workplace, **settings) as session:
            await session.run("install", "settings")
            session.begin("join")
            await session.until(lambda: steps_together(folder) >= 2)
            await session.interrupt()
            stopped = newest_checkpoint(folder)
            assert await session.left() == set()
            assert f"done at step {stopped} (signal)" in session.shown("join")

            before = steps_together(folder)
            session.begin("join")
            await session.until(lambda: steps_together(folder) >= before + 2)
            await session.until(lambda: "round of 2" in session.shown("join"))
            shown = session.shown("join")
            assert len(shown.splitlines()) <= 35
            assert "trahiv1:" not in shown
            _, again = told(events_of(folder), "joined")
            assert again["step"] >= stopped

            assert session.processes()
            await session.kill()
            assert await session.left(STOP_S) == set()

    asyncio.run(story())
    assert first.is_running


def test_original_example_draws_bar_and_table(workplace):
    model, quotes = write_original(workplace.folder)
    code = f"import sys; sys.argv = ['', {str(model)!r}, {str(quotes)!r}]\n" + ORIGINAL.read_text()
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    client = NotebookClient(book, timeout=CELL_S, kernel_name="python3")
    client.execute(env=workplace.environment(), cwd=str(workplace.folder))
    drawn = html_of(book.cells[0])
    assert "<progress value='10' max='10'" in drawn
    assert [int(step) for step, _ in ROW.findall(drawn)] == list(range(1, 11))


def test_interrupted_trainer_notebook_resumes(workplace):
    async def story():
        endless = {"max_steps": 100_000}
        first = Session("drop_in", workplace, output_dir="first", **endless)
        second = Session("drop_in", workplace, output_dir="second", **endless)
        async with first, second:
            cells = "install", "settings", "model"
            await asyncio.gather(first.run(*cells), second.run(*cells))
            first.begin("train")
            invited = await first.until(lambda: INVITATION.search(first.shown("train")))
            second.set(initial_peers=[invited[1]])
            await second.run("settings")
            second.begin("train")
            for session in (first, second):
                await session.until(partial(trained_by_two, session))

            with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
                await first.interrupt()
            stopped = newest_checkpoint(workplace.folder / "first")
            assert f"Stopped at step {stopped}." in first.shown("train")
            assert await first.left() <= KEEPER

            first.begin("train")
            again = await first.until(lambda: trained_by_two(first))
            assert again[0][1] > stopped
            for session in (first, second):  # until a model knows the rhyme by heart
                await session.until(lambda one=session: trained_by_two(one)[-1][0] < 0.1)
            for session in (first, second):
                with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
                    await session.interrupt()
                await session.run("use")
                assert session.shown("use") == RHYME
                assert await session.left() <= KEEPER

    asyncio.run(story())
