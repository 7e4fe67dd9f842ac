"""The base of all sections, and checks that several of them use."""

from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
)


class Mark(Enum):
    """Facts about a key; `config.keys_marked` lists the keys. A field has one by the outermost type
    of its annotation: `seconds: MayChange[float | None]`."""

    MAY_CHANGE = "how long, where and how fast a run is, not what is trained: free on resuming"
    COMPARED = "answers of an evaluation depend on it, and eval.json has it in no other form"
    PROMPT_FORM = "how a row becomes a prompt; evaluations compare it, too"
    NAMES_FILES = "may name files or folders"


MAY_CHANGE, COMPARED, PROMPT_FORM, NAMES_FILES = Mark

T = TypeVar("T")
MayChange = Annotated[T, MAY_CHANGE]
"""Type of a key that may have another value when a run is resumed."""
Compared = Annotated[T, COMPARED]
"""Type of a key that two evaluations are compared by."""
PromptForm = Annotated[T, PROMPT_FORM]
"""Type of a key that decides how a row becomes a prompt."""
NamesFiles = Annotated[T, NAMES_FILES]
"""Type of a key whose value may be a path."""

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
NonEmptyStr = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_type(cls, value: Any, info: Any) -> Any:
        field = cls.model_fields[info.field_name]
        annotation = field.annotation
        if value is None and isinstance(annotation, type) and issubclass(annotation, Section):
            return {}  # a section whose keys are all commented out
        if value == "none" and AS_LIST in field.metadata:
            return [value]  # the reward `none`
        accepted = kinds(annotation)
        if isinstance(value, str) and value.lower() == "none" and NoneType in accepted:
            return None  # as Python writes it
        takes_number = int in accepted or float in accepted
        if isinstance(value, bool) and takes_number:  # a bool is an int, too
            raise ValueError("expected a number")
        return value


def kinds(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type, without what `Annotated` adds to them: of
    `PositiveInt | None` int and NoneType."""
    members = (annotation,)
    if get_origin(annotation) in (Union, UnionType):  # Union, if a member is Annotated
        members = get_args(annotation)
    return tuple(_without_metadata(each) for each in members)


def _without_metadata(annotation: Any) -> Any:
    return annotation.__origin__ if get_origin(annotation) is Annotated else annotation


def _check_each_once(value: Any) -> Any:
    if isinstance(value, list) and (len(set(value)) < len(value) or "" in value):
        raise ValueError("expected each name once, and none empty")
    return value


AS_LIST = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
"""Accepts a string for a list of one."""
EACH_ONCE = AfterValidator(_check_each_once)
"""Refuses a list that has a string twice, or an empty string."""
