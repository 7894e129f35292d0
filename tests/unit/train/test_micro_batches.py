"""Parts of a batch hold each sample once, whatever rows a sample has."""

import pytest
import torch

from trahiv_cli.train.micro_batches import split


def test_each_sample_is_in_one_part():
    batch = {"input_ids": torch.arange(10).reshape(5, 2), "labels": torch.arange(5), "names": list("abcde")}
    sizes, parts = zip(*split(batch, 5, 2), strict=True)
    assert sizes == (2, 3)
    assert [part["names"] for part in parts] == [["a", "b"], ["c", "d", "e"]]
    for name in ("input_ids", "labels"):
        assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
        assert parts[0][name].untyped_storage().data_ptr() == batch[name].untyped_storage().data_ptr()


def test_pairs_of_texts_stay_pairs():
    batch = {
        "input_ids": torch.tensor([[1], [2], [3], [-1], [-2], [-3]]),
        "ref_chosen_logps": torch.tensor([10.0, 20.0, 30.0]),
    }
    sizes, parts = zip(*split(batch, 3, 3), strict=True)
    assert sizes == (1, 1, 1)
    assert [part["input_ids"].flatten().tolist() for part in parts] == [[1, -1], [2, -2], [3, -3]]
    assert [part["ref_chosen_logps"].tolist() for part in parts] == [[10.0], [20.0], [30.0]]


def test_what_has_no_rows_goes_with_each_part():
    parts = split({"labels": torch.arange(2), "return_loss": True, "scale": torch.tensor(2.0)}, 2, 2)
    assert all(part["return_loss"] is True and part["scale"] == 2 for _, part in parts)


def test_one_part_is_the_whole_whatever_is_in_it():
    batch = {"pixel_values": torch.zeros(7, 3)}
    assert split(batch, 2, 1) == [(2, batch)]


@pytest.mark.parametrize(
    ("batch", "batch_size"),
    [
        ({"labels": torch.arange(1)}, 1),
        ({"input_ids": torch.zeros(1, 64), "position_ids": torch.zeros(1, 64)}, 4),
        ({"input_ids": torch.zeros(2, 8), "pixel_values": torch.zeros(7, 3)}, 2),
        ({"return_loss": True}, 4),
    ],
    ids=["one sample", "packed into one row", "images of several pieces", "nothing with rows"],
)
def test_what_cannot_be_divided(batch, batch_size):
    assert split(batch, batch_size, 2) is None
