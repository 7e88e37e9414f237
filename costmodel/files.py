"""Documents on disk: written complete or not at all, and read with the file's name in every complaint."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["parse_document", "parse_json", "read_document", "sync_folder", "write_atomically"]

T = TypeVar("T")


def write_atomically(path: str | os.PathLike[str], content: str | bytes | memoryview) -> None:
    """Write to a neighbour, flush to disk, rename: a reader never sees half a file. OSError where that fails."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes it private
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Flush the names in a folder to disk, so that files made or renamed there survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_document(path: str | os.PathLike[str], parse: Callable[[str], T]) -> T:
    """Read a file and return the value that ``parse`` makes of its text. ValueError names the file and its fault."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{os.fspath(path)}: cannot be read: {error}") from error
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def parse_json(text: str, what: str) -> Any:
    """The value that JSON ``text`` is. ValueError where it breaks off, or is nested or has digits beyond all measure.
    what: its name for people, such as "plan"."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        fault = f"breaks off or is corrupt ({error})"
    except RecursionError:
        fault = "is nested too deeply to be read"
    except ValueError:  # more digits than Python converts
        fault = "has a number of thousands of digits"
    raise ValueError(f"a {what} is a JSON document, but it {fault}")


def parse_document(text: str, what: str, form: str, schemas: Sequence[int], remedy: str) -> dict[str, Any]:
    """The JSON object that ``text`` is, with "format" ``form`` and one of these "schema" numbers; ValueError on any
    other document. ``what``: its name for people; ``remedy``: what to do about a corrupt or outdated one."""
    try:
        data = parse_json(text, what)
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    if not isinstance(data, dict) or data.get("format") != form:
        raise ValueError(f"a {what} has format {form!r}, but this document has none of it; is it another file?")
    if data.get("schema") not in schemas:
        known = f"schema{'s' * (len(schemas) > 1)} {' and '.join(map(str, schemas))}"
        raise ValueError(f"this release reads {what} {known}, but got {repr(data.get('schema'))[:40]}; {remedy}")
    return data
