"""What was copied is what was there when the copy began; what only a GPU does is in `tests/gpu`."""

import torch

from trahiv_cli.swarm.host_copies import HostCopies


def test_a_copy_holds_the_values_of_the_moment_when_it_began_in_the_same_memory_each_time():
    weight = torch.nn.Parameter(torch.ones(3))
    live = [torch.arange(6.0).reshape(2, 3).T.clone(), torch.tensor(7.0), torch.arange(4).bfloat16(), weight]
    expected, copies = [tensor.detach().clone() for tensor in live], HostCopies(live)
    copies.begin(live)
    with torch.no_grad():
        for tensor in live:
            tensor.fill_(-1)
    before = copies.wait()
    assert all(map(torch.equal, before, expected)) and not any(copy.requires_grad for copy in before)
    places = [copy.data_ptr() for copy in before]
    copies.begin(live)
    assert all(map(torch.equal, copies.wait(), live)) and [one.data_ptr() for one in copies.wait()] == places
