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
_PYTHON = os.path.dirname(os.path.abspath(os.__file__))
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
        r"_ctc_loss",
        "",
        "the lengths of `ctc_loss` are tensors, whose values say how much it keeps for its backward",
        "write the loss with plain tensor ops (a loop over time of torch.logsumexp), or use another",
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
        r"SyntaxError: invalid syntax \(proxy_tensor",
        "",
        "torch.export cannot write down a call of `random_(low, high)`",
        "use torch.randint_like(x, low, high)",
    ),
    (
        r"a graph is made of tensor ops",
        "",
        "the code calls a higher-order operator",
        "write it without torch.cond, torch.while_loop and the like",
    ),
    (
        r"the last states of an LSTM",
        "",
        f"torch {torch.__version__} exports the last states of an LSTM with a wrong shape",
        "use torch 2.13, or take what is needed from its whole result",
    ),
)


def short_path(path: str) -> str:
    """A short form of the path: from the site-packages root, or relative to the working directory, or as it is."""
    _, marker, tail = path.rpartition("site-packages" + os.sep)
    if marker:
        return tail
    here = os.getcwd() + os.sep
    return path.removeprefix(here)


def _is_plumbing(path: str) -> bool:
    """True for a file of torch, of this package's compiler, of Python, and for generated code: none says what the model
    does."""
    if path.startswith(("<", _TORCH + os.sep, _COMPILER + os.sep)):
        return True
    if _is_installed(path):
        return short_path(path).startswith("einops" + os.sep)
    return path.startswith(_PYTHON + os.sep)


def _is_installed(path: str) -> bool:
    return f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path


_Frame = tuple[str, int]  # file, line


def _deepest_frame(frames: list[_Frame]) -> tuple[_Frame | None, _Frame | None]:
    """The deepest frame of a model's code below the wrapper, be it the user's or a library's, and, where it is a
    library's, the deepest one of the user's, who called it."""
    start = max((i for i, (path, _) in enumerate(frames) if path == _WRAPPER), default=-1)
    model = [frame for frame in frames[start + 1 :] if not _is_plumbing(frame[0])]
    own = [frame for frame in model if not _is_installed(frame[0])]
    if not model:
        return None, None
    return model[-1], own[-1] if own and own[-1] != model[-1] else None


@lru_cache(maxsize=65536)
def _frames_of(stack_trace: str) -> tuple[_Frame | None, _Frame | None]:
    return _deepest_frame([(path, int(line)) for path, line in _FRAME.findall(stack_trace)])


def line_of(stack_trace: str | None) -> str:
    """``"file.py:12"`` for the ``stack_trace`` of an exported node: the line that made it, be it a library's. "" if no
    frame is a model's."""
    frame, _ = _frames_of(stack_trace or "")
    return _place(frame) if frame else ""


def node_error(stack_trace: str | None, text: str) -> CaptureError:
    """The CaptureError for an exported node that a graph cannot have; ``text`` describes it and selects the advice."""
    return _error(_frames_of(stack_trace or ""), text)


def current_line_error(cause: str, change: str) -> CaptureError:
    """The CaptureError for the line of the model's code that is running now: the line, this cause, and the change."""
    where = _deepest_frame([(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack()])
    return CaptureError(f"{_where(where)}cannot be captured: {cause}; {change}")


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
    where: tuple[_Frame | None, _Frame | None] = None, None
    for link in chain:
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(link.__traceback__)]
        if any(path == _WRAPPER for path, _ in frames):
            where = where if where[0] else _deepest_frame(frames)
    return _error(where, "\n".join(f"{type(link).__name__}: {link}" for link in chain))


def _place(frame: _Frame) -> str:
    return f"{short_path(frame[0])}:{frame[1]}"


def _where(frames: tuple[_Frame | None, _Frame | None]) -> str:
    """The beginning of a message: the line, its code, and the user's line that called it."""
    frame, caller = frames
    if frame is None:
        return ""
    called = f" (called by {_place(caller)})" if caller else ""
    return f"{_place(frame)}: `{linecache.getline(*frame).strip()}`{called}: "


def _error(frames: tuple[_Frame | None, _Frame | None], text: str) -> CaptureError:
    code = linecache.getline(*frames[0]).strip() if frames[0] else ""
    cause, change = _advice(code, text)
    return CaptureError(f"{_where(frames)}cannot be captured: {cause}; {change}")


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
