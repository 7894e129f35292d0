"""Errors and doubts of a row, and the class that it names."""

import math

import pytest

from trahiv_cli.recipe.rows import CHATML, SHAREGPT, Form, class_of, is_conversation

USER = {"role": "user", "content": "Hi"}
YES = {"role": "assistant", "content": "Yes"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
MESSAGES = Form(("messages",), CHATML)
ANSWER = Form(("prompt", "completion"), None)
PREFERENCES = Form(("prompt", "chosen", "rejected"), CHATML)
LISTED = "has a list as a message's 'content' in 'messages', not text"


def talk(*messages):
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("form", "row", "error"),
    [
        (MESSAGES, talk(), "has something else in 'messages' than messages of role and content"),
        (MESSAGES, talk(USER), "has no message of the assistant in 'messages'"),
        (MESSAGES, talk(USER, YES | {"content": None}), "has a message without 'content' in 'messages'"),
        (
            MESSAGES,
            talk({"role": "assistant", "value": "Yes"}),
            "has a message without 'content' but with value in 'messages'",
        ),
        *(
            (MESSAGES, talk(USER | {"content": parts}), LISTED)
            for parts in ([], ["Hi"], [{"type": "image"}], [{"type": "text", "text": 5}])
        ),
        (
            Form(("conversations",), SHAREGPT),
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": None}]},
            "has a message without 'value' in 'conversations'",
        ),
        (ANSWER, {"prompt": "a"}, "has no 'completion'"),
        (ANSWER, {"prompt": ["a"]}, "has list in 'prompt', not text"),
        (
            PREFERENCES,
            {"prompt": [USER], "chosen": [YES], "rejected": [USER]},
            "has no message of the assistant in 'rejected'",
        ),
    ],
)
def test_damaged_row_is_error(form, row, error):
    assert form.error(row) == error


def test_template_decides_unknown_role():
    row = talk(USER | {"role": "alice"}, YES | {"role": "bot"})
    unknown = "has an unknown role 'alice' in 'messages' (known: system, user, assistant, tool)"
    assert (MESSAGES.error(row), MESSAGES.doubt(row), MESSAGES.error(row, "")) == ("", unknown, unknown)
    named = "{% if m.role in ['alice', 'bot'] %}"
    assert (MESSAGES.error(row, named), MESSAGES.doubt(row, named)) == ("", "")


@pytest.mark.parametrize("template", [None, "{{ x }}"])
def test_content_parts_are_doubtful(template):
    row = talk(USER | {"content": [{"type": "text", "text": "Hi"}]}, YES)
    assert (MESSAGES.error(row, template), MESSAGES.doubt(row, template)) == ("", LISTED)


@pytest.mark.parametrize(
    ("form", "row", "warning"),
    [
        (
            MESSAGES,
            talk(
                {"role": "developer", "content": "Be."},
                USER,
                YES | {"name": None, "weight": 1},
                USER,
                CALL,
                {"role": "tool", "content": "7"},
                YES,
            ),
            "",
        ),
        (MESSAGES, talk(USER, YES | {"content": " \n"}), "has an empty answer in 'messages'"),
        (MESSAGES, talk(YES, USER), "begins with the assistant in 'messages'"),
        (MESSAGES, talk(USER, USER, YES), "has two messages of the user in a row in 'messages'"),
        (ANSWER, {"prompt": "", "completion": "b"}, ""),
        (ANSWER, {"prompt": "a", "completion": ""}, "has an empty 'completion'"),
        (PREFERENCES, {"prompt": [USER], "chosen": [YES], "rejected": [YES]}, ""),
    ],
)
def test_doubtful_row_warns(form, row, warning):
    assert (form.error(row), form.warning(row)) == ("", warning)


NAMES = ["bad", "good"]
STARS = ["1", "2", "3"]
TRUTH = ["true", "false"]


@pytest.mark.parametrize(
    ("labels", "number", "written"),
    [
        (NAMES, 1, ["good", "1", 1, 1.0, "1.0"]),
        (NAMES, None, ["01", 2, -1, math.nan, None, [1, 0], True]),
        (TRUTH, 0, [True, "true"]),
        (TRUTH, 1, [1]),
        (["True", "False"], 1, [False]),
        (["true", "True"], None, [True]),
        (STARS, 2, [3, "3", 3.0]),
        (STARS, None, [0, True, 1e300]),
        (["01", "02"], 1, ["02"]),
        (["01", "02"], None, [1]),
        (["0.5", "1.5"], 0, [0.5]),
        (["1", "0"], 0, [1]),
        (["1", "0"], 1, ["0"]),
    ],
)
def test_class_number_matches_written_label(labels, number, written):
    assert {class_of(said, labels) for said in written} == {number}


def test_tool_call_needs_no_content():
    assert is_conversation([USER, CALL], CHATML)
    assert not is_conversation([{"role": "user"}], CHATML)
