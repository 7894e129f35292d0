"""What a process must do after it was forked, before it has threads of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)

FORKS, THREADS = 10, 8

FORK = """
import os, sys, threading
import torch
from trahiv_cli.swarm.corrections.processes import renew_thread_pool

def add(start, failed):
    start.wait()
    try:
        torch.zeros(200_000).add_(1.0)
    except RuntimeError as error:
        failed.append(error)

torch.set_num_threads(torch.get_num_threads())
failed_in = 0
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if not child:
        if sys.argv[3] == "renewed":
            renew_thread_pool()
        start, failed = threading.Barrier(int(sys.argv[2])), []
        threads = [threading.Thread(target=add, args=(start, failed)) for _ in range(int(sys.argv[2]))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(bool(failed))
    failed_in += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(failed_in)
"""


@pytest.mark.parametrize("pool", ["renewed", "inherited"])
def test_threads_of_a_forked_process_share_a_pool_once_it_is_renewed(pool: str) -> None:
    """When none fails with the pool that it has inherited, `renew_thread_pool` can go."""
    command = [sys.executable, "-c", FORK, str(FORKS), str(THREADS), pool]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert (int(done.stdout) > 0) == (pool == "inherited")
