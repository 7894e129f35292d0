"""What was copied is what was there when the copy began."""

import torch

from trahiv_cli.swarm.host_copies import NO_CHANGES, HostCopies, host_values


def tensors():
    return [torch.arange(6.0).reshape(2, 3), torch.tensor(7.0), torch.arange(4, dtype=torch.bfloat16)]


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_a_copy_holds_the_values_of_the_moment_when_it_began():
    live = tensors()
    copies = HostCopies(live)
    copies.begin(live)
    for tensor in live:
        tensor.fill_(-1)
    assert equal(copies.wait(), tensors())
    assert [copy.dtype for copy in copies.wait()] == [tensor.dtype for tensor in live]


def test_the_next_copy_overwrites_the_last_in_the_same_memory():
    live = tensors()
    copies = HostCopies(live)
    copies.begin(live)
    before = copies.wait()
    for tensor in live:
        tensor.add_(1)
    copies.begin(live)
    assert equal(copies.wait(), live)
    assert [now.data_ptr() for now in copies.wait()] == [then.data_ptr() for then in before]


def test_what_does_not_lie_in_one_piece_is_copied_in_its_order():
    live = [torch.arange(6.0).reshape(2, 3).T]
    copies = HostCopies(live)
    copies.begin(live)
    assert torch.equal(copies.wait()[0], torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))


def test_weights_that_are_trained_are_copied_without_their_gradients():
    weight = torch.nn.Parameter(torch.ones(3))
    copies = HostCopies([weight])
    copies.begin([weight])
    assert not copies.wait()[0].requires_grad and torch.equal(copies.wait()[0], torch.ones(3))


def test_a_copy_may_go_into_memory_that_is_there():
    live, memory = tensors(), [torch.zeros_like(tensor) for tensor in tensors()]
    copies = HostCopies(live, memory)
    copies.begin(live)
    copies.wait()
    assert equal(memory, live)


def test_tensors_in_host_memory_are_read_where_they_are():
    live = [torch.nn.Parameter(torch.ones(3)), torch.arange(4)]
    values = list(host_values(live, NO_CHANGES))
    assert [value.data_ptr() for value in values] == [tensor.data_ptr() for tensor in live]
    assert not any(value.requires_grad for value in values)
    [turned] = host_values([torch.arange(6.0).reshape(2, 3).T], NO_CHANGES)
    assert turned.is_contiguous() and turned[0].tolist() == [0.0, 3.0]
