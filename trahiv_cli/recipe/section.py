"""The base of a recipe's sections, the marks of their fields, and the types that several fields have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

OWN = "own"
SUGGESTED = "suggested"
COMPARED = "compared"
LOOKED_UP = "looked up"
"""Marks of fields; see `Own`, `Suggested`, `Compared` and `LookedUp`."""
_Type = TypeVar("_Type")

Own = Annotated[_Type, OWN]
"""A field or section that each peer decides for itself. All others are shared by all peers."""

Suggested = Annotated[_Type, OWN, SUGGESTED]
"""An own field that a newcomer without a recipe copies from the swarm; it may then choose otherwise."""

Compared = Annotated[_Type, COMPARED]
"""Text that is never looked up anywhere: a class may be called `/r/python`, whoever wrote that."""

LookedUp = Annotated[_Type, LOOKED_UP]
"""Text that may name a file or folder here, and is looked up on this machine before the hub is asked."""

NAME_PATTERN = r"^[A-Za-z0-9_-]{1,48}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""Letters, digits, `-` and `_`, at most 48: it becomes a folder, a DHT key and a libp2p namespace."""

Word = Annotated[str, Field(min_length=1)]
"""A name that something else gave: a layer, a column, a class. Any text but none."""

Count = Annotated[int, Field(ge=1, le=10**9)]
"""A number of things, at least one. The limit catches typing errors."""

CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
"""The same, where 0 has a meaning."""

NumTokens = Annotated[int, Field(ge=2, le=10**9)]
"""Length of a sample. It needs two tokens: the second is what is predicted."""

Some = Annotated[list[_Type], Field(min_length=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
AutoBool = bool | Literal["auto"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Rules: TypeAlias = Iterator[tuple[str, ...]]
"""Errors in a section, each with the places to point at: the first of them that is in the recipe counts."""


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, nothing is converted, values are frozen once checked."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,  # `max_steps: true` is no step and `fp16: "no"` is no choice
        validate_default=True,  # so that a default of 32 and a written 32 are the same float
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    def changed(self, name: str, **values: Any) -> Self:
        """Return a copy with other values, which are not checked, in the section `name`."""
        section = getattr(self, name).model_copy(update=values)
        return self.model_copy(update={name: section})

    def _broken_rules(self) -> Rules:
        """Yield what is wrong in this section, whose fields are of the right types by now."""
        yield from ()

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        if rules := list(self._broken_rules()):
            said = "; ".join(f"`{place}` {message}" for message, place, *_ in rules)
            raise PydanticCustomError("broken_rules", "{said}", {"said": said, "rules": rules})
        return self
