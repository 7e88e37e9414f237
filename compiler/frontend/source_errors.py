"""Source lines of graph nodes, and capture errors that name the user's line and the change to make."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from functools import lru_cache

import torch

from ..errors import CaptureError

__all__ = ["capture_error", "current_line_error", "line_of", "node_error", "short_path"]


_COMPILER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the compiler
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_WRAPPER = os.path.join(_COMPILER, "frontend", "capture.py")

_VALUE = (
    r"GuardOnDataDependent|data-dependent|DataDependentOutput|Could not guard|Could not extract"
    r"|_local_scalar_dense|\.item\(\)"
)

#: (pattern of the error, pattern of the line of code, cause, change to make); the first row that matches counts
_ADVICE: tuple[tuple[str, str, str, str], ...] = (
    (
        r"\.numpy\(\)|__array__|numpy",
        "",
        "the code leaves PyTorch for NumPy",
        "use the torch function of the same name, or do it outside of forward",
    ),
    (
        r"shape depends on values|DynamicOutputShape",
        "",
        "the code makes a tensor whose shape depends on values (a boolean index, `nonzero`, `unique`)",
        "use torch.where or a mask of fixed shape",
    ),
    (
        _VALUE,
        r"\b(if|elif|while|assert|and|or|not)\b|\bbool\(",
        "the code branches on a tensor's value",
        "use torch.where(condition, a, b), or decide outside of forward",
    ),
    (
        _VALUE,
        "",
        "the code takes a tensor's value into Python (`.item()`, `.tolist()`, `float(tensor)`)",
        "keep it a tensor, or compute it outside of forward and pass it in",
    ),
    (
        r"DeviceMismatch|Unhandled FakeTensor Device Propagation|two devices|on the meta device",
        "",
        "the code mixes devices",
        "register plain tensor attributes with register_buffer, and make new tensors with device=x.device",
    ),
    (
        r"a graph is made of tensor ops",
        "",
        "the code calls a higher-order operator",
        "write it without torch.cond, torch.while_loop and the like",
    ),
)


def short_path(path: str) -> str:
    """A short form of the path: from the site-packages root, or relative to the working directory, or as it is."""
    _, marker, tail = path.rpartition("site-packages" + os.sep)
    if marker:
        return tail
    here = os.getcwd() + os.sep
    return path.removeprefix(here)


def _rank(path: str) -> int:
    """The rank of a file: 0 for torch, this package and generated code, 1 for transformers, 2 for the user's code."""
    if (
        path.startswith(("<", _TORCH + os.sep, _COMPILER + os.sep))
        or f"{os.sep}torch{os.sep}" in path
        or "importlib" in path
    ):
        return 0
    return 1 if f"{os.sep}transformers{os.sep}" in path else 2


def _deepest_user_frame(frames: list[tuple[str, int]]) -> tuple[str, int] | None:
    """The deepest frame of the user's below the wrapper, else the deepest in transformers."""
    start = max((i for i, (path, _) in enumerate(frames) if path == _WRAPPER), default=-1)
    best: tuple[str, int] | None = None
    best_rank = 0
    for path, line in frames[start + 1 :]:
        rank = _rank(path)
        if rank and rank >= best_rank:
            best, best_rank = (path, line), rank
    return best


@lru_cache(maxsize=65536)
def _frame_of(stack_trace: str) -> tuple[str, int] | None:
    return _deepest_user_frame([(path, int(line)) for path, line in _FRAME.findall(stack_trace)])


def line_of(stack_trace: str | None) -> str:
    """``"file.py:12"`` for the ``stack_trace`` of an exported node; "" if no frame is the user's."""
    frame = _frame_of(stack_trace or "")
    return f"{short_path(frame[0])}:{frame[1]}" if frame else ""


def node_error(stack_trace: str | None, text: str) -> CaptureError:
    """The CaptureError for an exported node that a graph cannot have; ``text`` describes it and selects the advice."""
    where = _frame_of(stack_trace or "")
    return _error(where, text)


def current_line_error(cause: str, change: str) -> CaptureError:
    """The CaptureError for the line of the model's code that is running now: the line, this cause, and the change."""
    where = _deepest_user_frame([(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack()])
    code = linecache.getline(*where).strip() if where else ""
    place = f"{short_path(where[0])}:{where[1]}: `{code}`: " if where else ""
    return CaptureError(f"{place}cannot be captured: {cause}; {change}")


def capture_error(error: BaseException) -> CaptureError:
    """The CaptureError for an error of ``torch.export``: the line of the model, its code, the cause and the change."""
    if isinstance(error, CaptureError):
        return error
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        if isinstance(link, CaptureError):
            return link
        chain.append(link)
        link = link.__cause__ or link.__context__
    where = None
    for link in chain:
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(link.__traceback__)]
        if any(path == _WRAPPER for path, _ in frames):
            where = where or _deepest_user_frame(frames)
    return _error(where, "\n".join(f"{type(link).__name__}: {link}" for link in chain))


def _error(where: tuple[str, int] | None, text: str) -> CaptureError:
    code = linecache.getline(*where).strip() if where else ""
    cause, change = _advice(code, text)
    place = f"{short_path(where[0])}:{where[1]}: `{code}`: " if where else ""
    return CaptureError(f"{place}cannot be captured: {cause}; {change}")


def _advice(code: str, text: str) -> tuple[str, str]:
    """(cause, change), by the error's text and then the line of code."""
    for in_text, in_code, cause, change in _ADVICE:
        if re.search(in_text, text) and re.search(in_code, code):
            return cause, change
    first = text.strip().splitlines()[0][:300]
    return (
        f"torch.export says {first}",
        "check that the model runs on such inputs, then write it with plain tensor ops or move it out of forward",
    )
