"""Errors and doubts of a row, and the class that it names."""

import math

import pytest

from trahiv_cli.recipe.rows import CHATML, SHAREGPT, Form, Tally, class_of, is_conversation, label_error

USER, YES = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
TOOL = {"role": "tool", "content": "7"}
MESSAGES, ANSWER = Form(("messages",), CHATML), Form(("prompt", "completion"), None)
PREFERENCES = Form(("prompt", "chosen", "rejected"), CHATML)


def talk(*messages):
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("form", "row", "error"),
    [
        (MESSAGES, talk(USER, YES), ""),
        (MESSAGES, talk({"role": "developer", "content": "Be."}, USER, CALL, TOOL, YES), ""),
        (MESSAGES, talk(USER, YES | {"name": None, "weight": 1}), ""),
        (MESSAGES, talk(), "has something else in 'messages' than messages of role and content"),
        (MESSAGES, talk(USER), "has no message of the assistant in 'messages'"),
        (MESSAGES, talk(USER, YES | {"content": None}), "has a message without 'content' in 'messages'"),
        (
            MESSAGES,
            talk(USER, {"role": "assistant", "value": "Yes"}),
            "has a message without 'content' but with value in 'messages'",
        ),
        *(
            (
                MESSAGES,
                talk(USER | {"content": parts}, YES),
                "has a list as a message's 'content' in 'messages', not text",
            )
            for parts in ([], ["Hi"], [{"type": "image"}], [{"type": "text", "text": 5}])
        ),
        (
            Form(("conversations",), SHAREGPT),
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": None}]},
            "has a message without 'value' in 'conversations'",
        ),
        (ANSWER, {"prompt": "a", "completion": "b"}, ""),
        (ANSWER, {"prompt": "a"}, "has no 'completion'"),
        (ANSWER, {"prompt": ["a"], "completion": "b"}, "has list in 'prompt', not text"),
        (
            PREFERENCES,
            {"prompt": [USER], "chosen": [YES], "rejected": [USER]},
            "has no message of the",
        ),
    ],
)
def test_damaged_row_is_error(form, row, error):
    assert form.error(row).startswith(error) and bool(form.error(row)) == bool(error)


PARTS = [{"type": "text", "text": "Hi"}]


@pytest.mark.parametrize("answer", ["assistant", "bot"])
def test_template_decides_unknown_role(answer):
    row = talk(USER | {"role": "alice"}, YES | {"role": answer})
    unknown, named = (
        "has an unknown role 'alice' in 'messages' (known: ",
        "{% if m.role in ['alice', 'bot'] %}",
    )
    assert MESSAGES.error(row) == "" and MESSAGES.doubt(row).startswith(unknown)
    assert MESSAGES.error(row, "").startswith(unknown)
    assert MESSAGES.error(row, named) == MESSAGES.doubt(row, named) == ""


def test_content_parts_are_doubtful():
    row, said = (
        talk(USER | {"content": PARTS}, YES),
        "has a list as a message's 'content' in 'messages', not text",
    )
    for template in (None, "{{ x }}"):
        assert MESSAGES.error(row, template) == "" and MESSAGES.doubt(row, template) == said


@pytest.mark.parametrize(
    ("form", "row", "warning"),
    [
        (MESSAGES, talk(USER, YES, USER, CALL, TOOL, YES), ""),
        (MESSAGES, talk(USER, YES | {"content": " \n"}), "has an empty answer in 'messages'"),
        (MESSAGES, talk(YES, USER), "begins with the assistant in 'messages'"),
        (MESSAGES, talk(USER, USER, YES), "has two messages of the user in a row in 'messages'"),
        (ANSWER, {"prompt": "", "completion": "b"}, ""),
        (ANSWER, {"prompt": "a", "completion": ""}, "has an empty 'completion'"),
        (PREFERENCES, {"prompt": [USER], "chosen": [YES], "rejected": [YES]}, ""),
    ],
)
def test_doubtful_row_warns(form, row, warning):
    assert form.error(row) == "" and form.warning(row) == warning


STARS, TRUTH = ["1", "2", "3"], ["true", "false"]


@pytest.mark.parametrize(
    ("said", "labels", "number"),
    [
        *(("good", ["bad", "good"], 1), ("1", ["bad", "good"], 1), (1, ["bad", "good"], 1)),
        *((1.0, ["bad", "good"], 1), ("1.0", ["bad", "good"], 1), ("01", ["bad", "good"], None)),
        *((2, ["bad", "good"], None), (-1, ["bad", "good"], None), (math.nan, ["bad", "good"], None)),
        *((None, ["bad", "good"], None), ([1, 0], ["bad", "good"], None), (True, ["bad", "good"], None)),
        *((True, TRUTH, 0), ("true", TRUTH, 0), (False, ["True", "False"], 1), (1, TRUTH, 1)),
        *((3, STARS, 2), ("3", STARS, 2), (3.0, STARS, 2), (0, STARS, None), (True, STARS, None)),
        *(("02", ["01", "02"], 1), (1, ["01", "02"], None), (0.5, ["0.5", "1.5"], 0)),
        *((1, ["1", "0"], 0), ("0", ["1", "0"], 1), (True, ["true", "True"], None), (1e300, STARS, None)),
    ],
)
def test_class_number_matches_written_label(said, labels, number):
    assert class_of(said, labels) == number


def test_label_error_lists_classes():
    assert label_error(0, STARS) == "has the label 0, and `seq_cls.labels` names 3 classes: 1, 2, 3"
    assert label_error(0, ["a", "b"]) == ""


def test_tool_call_needs_no_content():
    assert is_conversation([USER, CALL], CHATML) and not is_conversation([{"role": "user"}], CHATML)


def test_tally_counts_rows_from_one():
    tally = Tally("'x'")
    for row in range(1, 13):
        tally.add(row, "is odd" if row % 2 else "", "is late" if row == 12 else "")
    assert tally.sentences(tally.errors) == ["Row 1 of 'x' is odd (6 rows: 1, 3, 5, 7, 9, 11)."]
    assert tally.sentences(tally.warnings) == ["Row 12 of 'x' is late."]
