"""What every dataclass of options needs: its types checked, its texts parsed, its file read; errors name the option."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from regrow.errors import ConfigError, UserError

T = TypeVar("T")

# Fields with a shorter option; a file spells them as the command line does. What files said before is still read.
SPELLED = {"protection": "protect", "redo_bytes_max": "redo_bytes"}


def check_types(config: Any, known: Mapping[str, Any]) -> None:
    """A wrong type comes from a file or a caller; named before any comparison trips over it. `known`: names in
    hints that are not loaded."""
    hints = typing.get_type_hints(type(config), localns=dict(known))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        hint = hints[field.name]
        if hint == tuple[str, ...]:
            if type(value) is not tuple or not all(type(item) is str for item in value):
                raise ConfigError(field.name, value, "must be a list of texts")
            continue
        allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        # `type(...)`, not isinstance: True is an int to Python, but not a number of servers.
        if type(value) not in allowed:
            names = [_TYPE_NAMES[kind] for kind in allowed if kind is not type(None)]
            raise ConfigError(field.name, value, f"must be {' or '.join(names)}")


_TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def parse_field(config: Any, name: str, parse: Callable[[str], T]) -> T:
    """What a text means; one that means nothing is named with its option."""
    text = getattr(config, name)
    try:
        return parse(text)
    except ValueError as error:
        # The error names the option and its value already.
        raise ConfigError(name, text, str(error).removeprefix(f"{text!r} ")) from None


def read_options(path: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """The options in a file by the names of their fields; `note` hears of names that were given up."""
    options = read_toml(path)
    for name, spelled in SPELLED.items():
        if name in options and spelled in options:
            raise UserError(f"{path}: {spelled} and {name} are one option", hint=f"keep {spelled}")
        if name in options:
            note(f"{path}: {name} is spelled {spelled} now, like the option --{spelled.replace('_', '-')}")
        elif spelled in options:
            options[name] = options.pop(spelled)
    return options


def read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read {path}: it is not text") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"cannot read {path}: {error}", hint="it holds one `option = value` per line; text needs quotes"
        ) from None
