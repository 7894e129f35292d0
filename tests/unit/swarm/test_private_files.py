"""Files that nobody else on this machine can read."""

import os

import pytest

from trahiv_cli.errors import SetupError
from trahiv_cli.swarm.private_files import require_private, write_private


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_private_file_is_private_under_any_umask(tmp_path, umask):
    path, before = tmp_path / "run" / "private", os.umask(umask)
    try:
        write_private(path, b"x")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600 and list(path.parent.iterdir()) == [path]
    require_private(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_one_that_others_can_read_or_change_is_refused_until_it_is_written_again(tmp_path, mode):
    path = tmp_path / "private"
    write_private(path, b"x")
    path.chmod(mode)
    with pytest.raises(SetupError, match="can be read by other users") as refused:
        require_private(path)
    assert f"chmod 600 {path}" in refused.value.hint
    write_private(path, b"y")
    require_private(path)
