"""The families of pipeline schedules: who does what in which order, how long that takes, and what it holds.

For p stages, m ≥ p microbatches, v chunks per stage, and seconds f, i, w that a whole stage takes for one microbatch's
forward, backward of inputs and backward of weights (a chunk takes 1/v of each), equal on all stages, messages free::

    name         makespan                           idle / work if f = i = w   held at most, in microbatches of a stage
    gpipe        m (f+i+w) + (p−1)(f+i+w)           (p−1)/m                    m
    1f1b         m (f+i+w) + (p−1)(f+i+w)           (p−1)/m                    p − s on stage s
    eager-1f1b   m (f+i+w) + (p−1)(f+i+w)           (p−1)/m                    2 (p − s) − 1 on stage s
    interleaved  m (f+i+w) + (p−1)(f+i+w)/v         (p−1)/(v m)                (2(p−s−1) + (v−1) g + 1)/v on stage s
    zb-h1        m (f+i+w) + (p−1)(f+i−w)           (p−1)/(3 m)                p
    zb-v         m (f+i+w) + (p−1) f/2              (p−1)/(6 m)                p
    pipedream    m (f+i+w), steady                  0                          p − s on stage s, also if m is less

The zero-bubble ones need f = i = w to be exact in the order in which they are made here. What is idle under zb-v is the
way of the first microbatch to the last stage alone: from m = 2p − 1 on no stage idles between its first and its last
action.

- *GPipe* (Huang et al. 2019): all forwards, then all backwards.
- *1F1B* (PipeDream, Narayanan et al. 2019, with a flush): a backward as early as it can be.
- *Eager 1F1B* (Zhuang et al. 2023): 1F1B with twice as many forwards to warm up, so that messages of up to a stage's
  time delay nothing.
- *Interleaved* (Megatron-LM, Narayanan et al. 2021): stage s has chunks s, s + p, … of the model. Microbatches go
  through in groups: a whole group through a chunk, then through the next. Megatron's groups have p microbatches, and
  m is a multiple of p. Here m splits into ⌊m/p⌋ groups (at least one) that differ by one at most, g is the largest:
  for multiples of p the same schedule, and for every m ≥ p the same bubble.
- *ZB-H1* (Qi et al. 2023): the backward is split. I goes on to the stage before, W waits for nobody: stage s puts off
  s of them, which lets it answer sooner and fills the end, until it holds p microbatches as stage 0 does anyway.
- *PipeDream* (Harlap et al. 2018): 1F1B that goes on across the borders of steps (``families``). Made here are its
  actions from one flush to the next, those of 1F1B; as it goes on nothing idles, and stage s holds p − s whatever m is.
- *ZB-V* (Qi et al. 2024): two chunks per stage that lie in a V, so that the loss is on stage 0, whose backward can
  begin early; W fills what is left.

Asynchronous pipelines, which never drain between steps: PipeDream's 1F1B with weight stashing (Harlap et al. 2018,
Narayanan et al., SOSP 2019), its minibatches made of m microbatches.

Stage s of p runs F of microbatch j as soon as it has it and then B of microbatch j − w, w = p − 1 − s, across the
borders of steps, and updates its weights after the B of each batch's last microbatch. The B of a microbatch uses the
weights of its F, of which a version is kept (*stashed*) until then. So with microbatches counted from the last flush,
microbatch k of batch t meets at stage s the weights after ⌊(t m + k − w)/m⌋ updates, at least none: they are

    d(s, k) = ⌈(w − k)/m⌉ updates old, where that is positive; never more than t

and one update of batch t at stage s is, with g the gradient of a microbatch's loss,

    W_s[t + 1] = W_s[t] − step(1/m Σ_k g_s(W_0[t − d(0, k)], …, W_{p−1}[t − d(p − 1, k)]))

For m = 1 this is PipeDream's w[t+1] = w[t] − ν ∇f(w_1[t − p + 1], …, w_p[t]) (SOSP 2019, section 3.3); from m = p − 1
on no delay is above 1, and it meets only the first p − 1 − s microbatches of a batch. At the last stage nothing is old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain as chained

from .schedule import Action, Place, Schedule, placement_order

__all__ = [
    "EAGER_1F1B",
    "PIPEDREAM",
    "delay",
    "eager_one_f_one_b",
    "generate",
    "gpipe",
    "in_flight_formula",
    "interleaved",
    "is_split",
    "known_schedules",
    "lag_steps",
    "one_f_one_b",
    "stashed_versions",
    "virtual_order",
    "zb_h1",
    "zb_v",
]


EAGER_1F1B = "eager-1f1b"
PIPEDREAM = "pipedream"


def delay(stage: int, num_stages: int, num_microbatches: int, microbatch: int) -> int:
    """The age, in updates, of the weights that ``stage`` uses for this microbatch of a batch: d(s, k)."""
    return -(-max(0, num_stages - 1 - stage - microbatch) // num_microbatches)


def stashed_versions(stage: int, num_stages: int, num_microbatches: int) -> int:
    """Versions of its weights that ``stage`` keeps besides the newest."""
    return delay(stage, num_stages, num_microbatches, 0)


def lag_steps(num_stages: int, num_microbatches: int) -> int:
    """Steps after which the first stage has the gradients of a batch, and so everybody its loss without waiting."""
    return delay(0, num_stages, num_microbatches, 0)


def _check_size(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"a schedule needs at least one stage and one microbatch, but got {num_stages} stages and "
            f"{num_microbatches} microbatches; give both as positive numbers"
        )


@lru_cache(maxsize=4096)
def _line(stage: int, kind: str, num_microbatches: int, chunk: int = 0) -> tuple[Action, ...]:
    """The actions of one kind of all microbatches; made once, schedules share them."""
    return tuple(Action(stage, kind, k, chunk) for k in range(num_microbatches))


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order; every stage holds all microbatches."""
    _check_size(num_stages, num_microbatches)
    m = num_microbatches
    rows = tuple((*_line(s, "F", m), *_line(s, "B", m)) for s in range(num_stages))
    return Schedule("gpipe", num_stages, m, rows)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Stage s of p: min(m, p − s − 1) forwards to warm up, then forward and backward in turn, then what is left."""
    _check_size(num_stages, num_microbatches)
    p, m = num_stages, num_microbatches
    rows = tuple(_in_turn(_line(s, "F", m), _line(s, "B", m), p - s - 1) for s in range(p))
    return Schedule("1f1b", p, m, rows)


def eager_one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Stage s of p: min(m, 2 (p − s − 1)) forwards to warm up, then as 1F1B."""
    _check_size(num_stages, num_microbatches)
    p, m = num_stages, num_microbatches
    rows = tuple(_in_turn(_line(s, "F", m), _line(s, "B", m), 2 * (p - s - 1)) for s in range(p))
    return Schedule(EAGER_1F1B, p, m, rows)


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], warm: int) -> tuple[Action, ...]:
    """``warm`` forwards at most, then one forward and one backward in turn, then the backwards left."""
    warm = min(warm, len(forwards))
    pairs = zip(forwards[warm:], backwards)
    return (*forwards[:warm], *chained.from_iterable(pairs), *backwards[len(forwards) - warm :])


# ---- interleaved


def _groups(p: int, m: int) -> list[int]:
    """The sizes of the groups of microbatches that pass a chunk together, largest first: ⌊m/p⌋ of them, or one."""
    count = max(1, m // p)
    return [m // count + (index < m % count) for index in range(count)]


def interleaved(num_stages: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """Stage s of p with chunks s, s + p, …: 2(p − s − 1) + (v − 1) g forwards to warm up, then both in turn."""
    _check_size(num_stages, num_microbatches)
    p, m = num_stages, num_microbatches
    groups = _groups(p, m)
    starts = [sum(groups[:index]) for index in range(len(groups))]
    rows = []
    for s in range(p):
        ahead, back = ([_line(s, kind, m, c) for c in range(chunks)] for kind in "FB")
        forwards = [a for at, g in zip(starts, groups) for line in ahead for a in line[at : at + g]]
        backwards = [a for at, g in zip(starts, groups) for line in reversed(back) for a in line[at : at + g]]
        rows.append(_in_turn(forwards, backwards, 2 * (p - s - 1) + (chunks - 1) * groups[0]))
    return Schedule("interleaved", p, m, tuple(rows), chunks)


# ---- zero bubble


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B's order of forwards and backwards of inputs; stage s does its first W after its I of microbatch s, and from
    then on one after each I."""
    _check_size(num_stages, num_microbatches)
    p, m = num_stages, num_microbatches
    rows = []
    for s in range(p):
        weights = _line(s, "W", m)
        row: list[Action] = []
        for action in _in_turn(_line(s, "F", m), _line(s, "I", m), p - s - 1):
            row.append(action)
            if action.kind == "I" and action.microbatch >= s:
                row.append(weights[action.microbatch - s])
        rows.append((*row, *weights[max(0, m - s) :]))
    return Schedule("zb-h1", p, m, tuple(rows))


def zb_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Two chunks per stage in a V, backwards split, at most 2p chunks of a microbatch held by any stage.

    From m = 2p − 1 on every stage runs through ``_vee`` without a pause. With fewer microbatches there are pauses; W is
    then put where the clock of equal actions shows one.
    """
    _check_size(num_stages, num_microbatches)
    p, m = num_stages, num_microbatches
    rows = [[a for a in _vee(p, max(m, 2 * p - 1), s) if a.microbatch < m] for s in range(p)]
    if m < 2 * p - 1:
        rows = _fill(rows, placement_order("vee", p, 2), 2 * p)
    return Schedule("zb-v", p, m, tuple(map(tuple, rows)), 2, "vee")


def _vee(p: int, m: int, stage: int) -> list[Action]:
    """One stage's actions for m ≥ 2p − 1, when f = i = w.

    Forward through the first chunk comes to stage s at s, through the second at 2p − 1 − s; the loss is on stage 0, and
    the gradient is back in the second chunk at 2p + s, in the first at 4p − 1 − s: before that time the stage has the
    forwards below to do, after it a period of six actions, one of each kind and chunk; at the end W is put off.
    """
    waiting = {(kind, c): iter(_line(stage, kind, m, c)) for kind in "FIW" for c in (0, 1)}
    row: list[Action] = []

    def do(text: str, times: int) -> None:
        steps = [waiting[step[0], int(step[1])] for step in text.split()]
        row.extend(action for _ in range(times) for step in steps if (action := next(step, None)))

    do("F0", 2 * (p - stage) - 1)
    do("F1 F0", stage)
    do("F1 I1 W1", p - stage)
    # Forwards of the first chunk are 2p − s − 1 so far, those of the second p: it needs m − p more periods.
    do("F0 I0 W0 F1 I1 W1", m - p)
    do("I0 I1", stage)
    do("I0 W0", p - stage)
    do("W1", stage)
    do("W0", stage)
    return row


def _fill(rows: Sequence[Iterable[Action]], places: Sequence[Place], limit: int) -> list[list[Action]]:
    """The rows with every W moved to where its stage would wait, on a clock on which all actions take equally long.

    A forward that would hold more than ``limit`` waits for a W as well.
    """
    todo = [[a for a in row if a.kind != "W"] for row in rows]
    weights = {(a.stage, a.chunk, a.microbatch): a for row in rows for a in row if a.kind == "W"}
    virtual = {place: q for q, place in enumerate(places)}
    out: list[list[Action]] = [[] for _ in todo]
    at, held = [0] * len(todo), [0] * len(todo)
    pending: list[list[Action]] = [[] for _ in todo]
    done: set[tuple[bool, int, int]] = set()  # (forward?, virtual stage, microbatch)
    while any(len(row) < 3 * len(others) // 2 for row, others in zip(out, todo)):
        ended = []
        for s, row in enumerate(todo):
            action = row[at[s]] if at[s] < len(row) else None
            if action is not None:
                forward, k = action.kind == "F", action.microbatch
                q = virtual[s, action.chunk]
                source = q - 1 if forward else q + 1
                arrived = not 0 <= source < len(places) or (forward, source, k) in done
                if arrived and not (forward and held[s] == limit):
                    at[s] += 1
                    ended.append((forward, q, k))
                    out[s].append(action)
                    if forward:
                        held[s] += 1
                    else:
                        pending[s].append(weights[s, action.chunk, k])
                    continue
            if pending[s]:
                held[s] -= 1
                out[s].append(pending[s].pop(0))
        done.update(ended)
    return out


# ---- by name


@dataclass(frozen=True)
class _Family:
    generate: Callable[[int, int, int], Schedule]  # (p, m, v)
    in_flight: Callable[[int, int, int, int], int]  # (stage, p, m, v)
    chunks: int = 1  # per stage, or the least of them
    any_chunks: bool = False
    placement: str = "loop"


_FAMILIES = {
    "gpipe": _Family(lambda p, m, v: gpipe(p, m), lambda s, p, m, v: m),
    "1f1b": _Family(lambda p, m, v: one_f_one_b(p, m), lambda s, p, m, v: min(m, p - s)),
    EAGER_1F1B: _Family(lambda p, m, v: eager_one_f_one_b(p, m), lambda s, p, m, v: min(m, 2 * (p - s) - 1)),
    "interleaved": _Family(
        interleaved, lambda s, p, m, v: min(m * v, 2 * (p - s - 1) + (v - 1) * _groups(p, m)[0] + 1), 2, True
    ),
    "zb-h1": _Family(lambda p, m, v: zb_h1(p, m), lambda s, p, m, v: min(m, p)),
    "zb-v": _Family(lambda p, m, v: zb_v(p, m), lambda s, p, m, v: 2 * min(m, p), 2, placement="vee"),
    PIPEDREAM: _Family(lambda p, m, v: replace(one_f_one_b(p, m), name=PIPEDREAM), lambda s, p, m, v: p - s),
}


def known_schedules() -> tuple[str, ...]:
    """The names that ``generate`` knows."""
    return tuple(_FAMILIES)


def _family(name: str, chunks: int | None) -> tuple[_Family, int]:
    """The family and its chunks per stage: as given, or by default the fewest that it can have."""
    if name not in _FAMILIES:
        raise ValueError(f"a schedule is one of {', '.join(known_schedules())}, but got {name!r}; choose one of these")
    family = _FAMILIES[name]
    chunks = family.chunks if chunks is None else chunks
    if chunks < family.chunks or (chunks > family.chunks and not family.any_chunks):
        count = f"at least {family.chunks}" if family.any_chunks else str(family.chunks)
        raise ValueError(
            f"schedule {name!r} has {count} chunk{'s' if family.chunks > 1 else ''} per stage, but got {chunks}; "
            "leave chunks out or choose another schedule"
        )
    return family, chunks


@lru_cache(maxsize=8)
def generate(name: str, num_stages: int, num_microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule of family ``name`` (the last ones asked for are kept).

    chunks: per stage; by default 1, for "interleaved" and "zb-v" 2. ValueError for a name that is not known (it lists
    those that are), for chunks that the family does not have, and for fewer than one stage or microbatch.
    """
    family, chunks = _family(name, chunks)
    return family.generate(num_stages, num_microbatches, chunks)


def is_split(name: str) -> bool:
    """True if this family runs the backward of inputs and that of weights as two actions."""
    return name.startswith("zb")


def virtual_order(name: str, num_stages: int, chunks: int | None = None) -> tuple[Place, ...]:
    """(stage, chunk) of every virtual stage in the order in which data flow through the model."""
    family, chunks = _family(name, chunks)
    return placement_order(family.placement, num_stages, chunks)


def in_flight_formula(name: str, stage: int, num_stages: int, num_microbatches: int, chunks: int | None = None) -> int:
    """``in_flight(generate(name, p, m, chunks))[stage]`` without generating: chunks of microbatches held at most.

    For "gpipe", "1f1b" and "interleaved" it depends on the stage only through p − stage (and, interleaved, on p through
    the size of a group); "zb-h1" and "zb-v" hold the same on all stages, by p. "pipedream" never drains: what it holds
    is that of m ≥ p.
    """
    assert 0 <= stage < num_stages, (stage, num_stages)
    family, chunks = _family(name, chunks)
    return family.in_flight(stage, num_stages, num_microbatches, chunks)
