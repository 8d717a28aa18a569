"""A run's tools as Python functions: imported by name, described to the model, called with what it said."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from protocol.errors import OperatorError
from protocol.spec import first_fault


class ToolFunction:
    """One function that the model may call. Its signature is what it takes, its docstring what it is for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises OperatorError if parameters have no types that can be described."""
        self.name = function.__name__
        self._call = function
        self._what = inspect.cleandoc(function.__doc__ or "")
        try:
            self._arguments = _model_of(function)
            self._parameters = _untitled(self._arguments.model_json_schema())
        except Exception as exc:
            text = str(exc).strip().partition("\n")[0]
            raise OperatorError(f"tool {self.name}: its parameters cannot be described: {text}") from exc

    @property
    def schema(self) -> dict[str, Any]:
        """What a chat template is told of it, in the form of OpenAI's function calling."""
        described = {"name": self.name, "description": self._what, "parameters": self._parameters}
        return {"type": "function", "function": described}

    def reply(self, arguments: Mapping[str, Any]) -> str:
        """What it says: its text, or its value as JSON. Arguments that do not fit are told to the model.

        Raises what the function raises.
        """
        try:
            given = self._arguments.model_validate(dict(arguments))
        except ValidationError as exc:
            return f"error: {first_fault(exc)}"
        value = self._call(**{name: getattr(given, name) for name in type(given).model_fields})
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def import_functions(names: list[str]) -> list[ToolFunction]:
    """The functions of these names. Raises OperatorError if one is none, or two are called the same."""
    tools = [ToolFunction(imported(name, "tool")) for name in names]
    seen: set[str] = set()
    for name, tool in zip(names, tools, strict=True):
        if tool.name in seen:
            raise OperatorError(f"tools.functions: {name} is another tool of the name {tool.name}")
        seen.add(tool.name)
    return tools


def imported(name: str, what: str) -> Callable[..., Any]:
    """The function ``module:function``; raises OperatorError, which says ``what`` it was to be."""
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except AttributeError as exc:
        raise OperatorError(f"{what} {name}: module {module_name} has no {function_name}") from exc
    except Exception as exc:
        text = str(exc).strip().partition("\n")[0]
        raise OperatorError(f"{what} {name}: cannot import it: {type(exc).__name__}: {text}") from exc
    if not inspect.isfunction(function):
        raise OperatorError(f"{what} {name}: a {type(function).__name__} is no function")
    return function


def _model_of(function: Callable[..., Any]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
            raise TypeError(f"{name} is not a parameter that can be named")
        if parameter.annotation is parameter.empty:
            raise TypeError(f"{name} has no type")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (parameter.annotation, default)
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def _untitled(schema: Any) -> Any:
    """Without the titles that pydantic makes of names: they would only cost tokens."""
    if isinstance(schema, list):
        return [_untitled(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _untitled(part) for name, part in value.items()}
        if key == "properties"
        else _untitled(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }


async def _awaited(value: Any) -> Any:
    return await value
