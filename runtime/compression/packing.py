"""Several small integers in one byte, as digits of a number, by arithmetic on floats: exact, and the same on any
device.

A vector of k·m digits 0 ≤ q < base, base^k ≤ 256, becomes m bytes: byte i is Σ_j q[j·m + i] base^j − 128. Digits of one
byte stand m apart, so that every operation runs over contiguous memory. Base 2 gives 8 signs per byte, base 3 gives 5.
"""

from __future__ import annotations

from functools import lru_cache

import torch

__all__ = ["pack", "unpack"]


def pack(digits: torch.Tensor, base: int, out: torch.Tensor) -> None:
    """digits: fp32 [k·m], used up; out: int8 [m]."""
    digits = digits.view(-1, len(out))
    total = digits[-1]
    for digit in reversed(digits[:-1]):
        torch.add(digit, total, alpha=base, out=total)
    out.copy_(total.sub_(128))


def unpack(data: torch.Tensor, base: int, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """data: int8 [m]; out: fp32 [k·m], the digits; scratch: as large. Digit j is Q_j − base Q_{j+1} with
    Q_j = ⌊byte / base^j⌋."""
    if len(data) == len(out):
        out.copy_(data).add_(128)
        return
    digits, quotients = out.view(-1, len(data)), scratch.view(-1, len(data))
    whole = digits[:1].copy_(data).add_(128.5)  # half a unit: no quotient is near an integer
    torch.mul(whole, _powers(base, len(digits), data.device), out=quotients).floor_()
    torch.sub(quotients[:-1], quotients[1:], alpha=base, out=digits[:-1])
    digits[-1].copy_(quotients[-1])


@lru_cache(maxsize=32)
def _powers(base: int, count: int, device: torch.device) -> torch.Tensor:
    """base^-j, [count, 1]."""
    return torch.tensor([[float(base) ** -j] for j in range(count)], device=device)
