"""`trahiv report`: the run, the place of the archive, and the message."""

import tarfile

import pytest


@pytest.fixture
def runs(here):
    for name in ("old", "new"):
        folder = here / "runs" / name
        folder.mkdir(parents=True)
        (folder / "events.jsonl").write_text('{"event": "ready"}\n')


def test_report_needs_run(trahiv, here):
    trahiv("report", code=3)


@pytest.mark.usefixtures("runs")
def test_report_packs_newest_run(trahiv):
    out, err = trahiv("report")
    path = out.partition(":")[0]
    assert path.startswith("trahiv-report-new-")
    assert "look into it before you send it" in err
    assert any(name.endswith("/machine.json") for name in tarfile.open(path).getnames())


@pytest.mark.usefixtures("runs")
def test_report_packs_named_run(trahiv, here):
    out = trahiv("report runs/old --output mine.tar.gz --format json").out
    assert '"path": "mine.tar.gz"' in out
    assert (here / "mine.tar.gz").exists()
