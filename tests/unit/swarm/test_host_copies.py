"""What was copied is what was there when the copy began; what only a GPU does is in `tests/gpu`."""

import torch

from trahiv_cli.swarm.host_copies import NO_CHANGES, HostCopies, host_values

TURNED = torch.arange(6.0).reshape(2, 3).T


def test_a_copy_holds_the_values_of_the_moment_when_it_began_in_the_same_memory_each_time():
    weight = torch.nn.Parameter(torch.ones(3))
    live = [TURNED.clone(), torch.tensor(7.0), torch.arange(4).bfloat16(), weight]
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


def test_tensors_in_host_memory_are_read_where_they_are():
    live = [torch.nn.Parameter(torch.ones(3)), torch.arange(4)]
    values = list(host_values(live, NO_CHANGES))
    assert [value.data_ptr() for value in values] == [tensor.data_ptr() for tensor in live]
    assert not any(value.requires_grad for value in values)
    [turned] = host_values([TURNED], NO_CHANGES)
    assert turned.is_contiguous() and turned[0].tolist() == [0.0, 3.0]
