"""Whether a chat template is Jinja, as transformers reads it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


def mistake_in(template: str) -> str:
    """Say what is wrong with a template's syntax, and on which of its lines; nothing if it can be read."""
    from jinja2 import TemplateSyntaxError

    try:
        _environment().parse(template)
    except TemplateSyntaxError as error:
        return f"{str(error.message).rstrip('.')} (line {error.lineno} of the template)"
    except RecursionError:
        return "it is nested too deeply"
    return ""


@cache
def _environment() -> Environment:
    """Make what knows the tags of chat templates (transformers 5.23, `utils/chat_template_utils.py`)."""
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class Generation(Extension):
        """`{% generation %}` marks what the assistant says."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
