"""What all recipes are made of: settings that refuse what they do not know, and say what was meant."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from crosscurrent.suggestions import did_you_mean


class Settings(BaseModel):
    """Settings with names and types; others are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, given: Any) -> Any:
        for key, value in given.items() if isinstance(given, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(f"there is no key {key!r}.{nearest(str(key), list(cls.model_fields))}")
            if _has_bool(value) and "bool" not in str(cls.model_fields[key].annotation):
                raise ValueError(f"{key}={value} is not allowed: it is not a yes-or-no question.")
        return given


def _has_bool(value: Any) -> bool:
    """Whether it is a truth value, or a list with one in it, which would be taken for numbers."""
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(_has_bool, value)))


def nearest(given: str, allowed: Collection[str]) -> str:
    """What was meant, if something is near, and all that is allowed."""
    return f"{did_you_mean(given, allowed)} Allowed: {', '.join(sorted(allowed))}."


AnySettings = TypeVar("AnySettings", bound=Settings)


def validated(kind: type[AnySettings], values: Any, source: str) -> AnySettings:
    """Settings from plain values.

    Args:
        kind: the class.
        values: as read from YAML.
        source: named in errors, such as the file.

    Raises:
        ValueError: a key or value is not allowed; the message names the source, the key and what is allowed.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{source}: keys with values are needed, not {type(values).__name__}.")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = [f"{_path(problem['loc'], kind)}{_message(problem)}" for problem in error.errors()]
        raise ValueError(f"{source}: {'; '.join(problems)}") from None


def _message(problem: Any) -> str:
    if problem["type"] == "union_tag_invalid":
        allowed = [tag.strip("'") for tag in str(problem["ctx"]["expected_tags"]).split(", ")]
        return f"there is no {problem['ctx']['tag']!r}.{nearest(str(problem['ctx']['tag']), allowed)}"
    text = str(problem["msg"]).removeprefix("Value error, ")
    is_plain = isinstance(problem["input"], str | int | float | bool | list | type(None))
    needs_value = is_plain and problem["type"] != "missing" and repr(problem["input"]) not in text
    return f"{text} (given: {problem['input']!r})" if needs_value else text


def _path(location: tuple[int | str, ...], kind: type[BaseModel]) -> str:
    """The key as a user writes it: without the tags that tell the kinds of a union apart."""
    written: list[str] = []
    here: list[type[BaseModel]] = [kind]
    for part in location:
        fields = [field for one in here if (field := one.model_fields.get(str(part))) is not None]
        if not fields and here and written and part in _tags(here):
            continue
        written.append(str(part))
        here = [found for field in fields for found in _classes(field.annotation)]
    return f"{'.'.join(written)}: " if written else ""


def _classes(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _classes(part)]


def _tags(kinds: list[type[BaseModel]]) -> set[Any]:
    """What the fields with one allowed value allow."""
    return {value for kind in kinds for field in kind.model_fields.values() for value in get_args(field.annotation)}


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, the later ones over the earlier ones.

    Example:
        >>> merge({"a": {"b": 1, "c": 2}}, {"a": {"c": None}})
        {'a': {'b': 1, 'c': None}}
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def overrides(assignments: list[str]) -> dict[str, Any]:
    """Nested values from `key.key=value`, the value as in YAML.

    Raises:
        ValueError: one has no "=", or its value is not YAML.

    Example:
        >>> overrides(["training.max_steps=2", "model.feedback_interval=null"])
        {'training': {'max_steps': 2}, 'model': {'feedback_interval': None}}
    """
    layers = []
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        if not separator or not all(path.split(".")):
            raise ValueError(f"{assignment!r} is not an override: write key.key=value, as in training.max_steps=100.")
        try:
            value: Any = yaml.load(text, _UniqueKeys)
        except (yaml.YAMLError, RecursionError):
            raise ValueError(f"{assignment!r}: the value is not YAML. Quote it if it is text.") from None
        for key in reversed(path.split(".")):
            value = {key: value}
        layers.append(value)
    paths = [assignment.partition("=")[0] for assignment in assignments]
    for path in paths:
        others = [other for other in paths if other == path or other.startswith(f"{path}.")]
        if len(others) > 1:
            raise ValueError(f"{path} is given twice ({', '.join(others)}): give it once.")
    return merge(*layers)


class _UniqueKeys(yaml.SafeLoader):
    """A key written twice is a mistake, which plain YAML passes over."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if not key.tag.endswith(":merge")]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """The plain values in a YAML file.

    Raises:
        ValueError: it is not valid YAML, or not text.
        OSError: it cannot be read.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from None


def write_yaml(settings: Settings) -> str:
    """Settings as YAML, every value written out."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=120)
