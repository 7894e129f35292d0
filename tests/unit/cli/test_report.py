"""`trahiv report`: the run, the place of the archive, and the message."""

import tarfile


def test_report_packs_newest_run(trahiv, events, here):
    assert trahiv("report")[0] == 3
    for name in ("old", "new"):
        folder = here / "runs" / name
        folder.mkdir(parents=True)
        (folder / "events.jsonl").write_text('{"event": "ready"}\n')
    code, out, err = trahiv("report")
    path = out.partition(":")[0]
    assert code == 0 and path.startswith("trahiv-report-new-") and "look into it before you send it" in err
    assert any(name.endswith("/machine.json") for name in tarfile.open(path).getnames())
    code, out, _ = trahiv("report", "runs/old", "--output", "mine.tar.gz", "--format", "json")
    assert code == 0 and '"path": "mine.tar.gz"' in out and (here / "mine.tar.gz").exists()
