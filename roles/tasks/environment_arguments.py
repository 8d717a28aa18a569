"""What a run may tell an environment: the settings that its author gave it, and none of the library's.

A library's own settings name files, other packages and functions to import. A run's owner must not choose
those for other people's machines, whose operators allowed the environment's module and nothing else.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from protocol.errors import OperatorError, one_line
from protocol.spec import first_fault

_LIBRARY, _ENVIRONMENTS_OF_THE_LIBRARY = "verifiers.", "verifiers.v1.tasksets."
_WITHOUT_A_LEVEL = {Union, UnionType, Annotated}
"""Types that say of a value what it is, not of what lies in it."""


def config_of(config_type: type[BaseModel], module: str, arguments: Mapping[str, Any]) -> Any:
    """The configuration of environment ``module`` with these arguments.

    Raises OperatorError for an argument that it does not take, or not so, and for settings of the library.
    """
    foreign = next(_settings_of_the_library(arguments, config_type, ()), None)
    if foreign is not None:
        raise OperatorError(
            f"tasks.arguments.{one_line('.'.join(foreign), 80)}: a run sets only what the environment's "
            "author added to its configuration, and this is the library's own"
        )
    try:
        return config_type.model_validate(copy.deepcopy(dict(arguments)) | {"id": module})
    except ValidationError as exc:
        own = sorted(name for name in config_type.model_fields if not _is_of_the_library(config_type, name))
        takes = ", ".join(own) or "none of its own"
        raise OperatorError(f"tasks.arguments.{first_fault(exc)}; it takes {takes}") from exc


def _settings_of_the_library(value: Any, annotation: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths in ``value``, which is to become an ``annotation``, that lead to settings of the library."""
    if _is_model(annotation):
        for key in value if isinstance(value, Mapping) else ():
            if key not in annotation.model_fields:
                continue  # an alias can only be the environment's: the library's configurations have none
            inner = annotation.model_fields[key].annotation
            if _is_of_the_library(annotation, key) and not _is_model(inner):
                yield (*path, key)
            yield from _settings_of_the_library(value[key], inner, (*path, key))
        return
    for part in get_args(annotation):
        if get_origin(annotation) in _WITHOUT_A_LEVEL:
            yield from _settings_of_the_library(value, part, path)
        elif isinstance(value, dict):
            for key, one in value.items():
                yield from _settings_of_the_library(one, part, (*path, key))
        elif isinstance(value, list):
            for one in value:
                yield from _settings_of_the_library(one, part, path)


def _is_model(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)


def _is_of_the_library(config_type: type[BaseModel], name: str) -> bool:
    """Whether a class of the library declares this setting, also where the environment declares it again."""
    owners = [one for one in config_type.__mro__ if name in inspect.get_annotations(one)]
    return any(f"{one.__module__}.".startswith(_LIBRARY) and not _in_an_environment(one) for one in owners)


def _in_an_environment(owner: type[Any]) -> bool:
    return f"{owner.__module__}.".startswith(_ENVIRONMENTS_OF_THE_LIBRARY)
