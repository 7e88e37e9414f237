"""The order of an elimination, from sizes alone: a recipe that any number of problems of one shape then follow.

The mathematics is that of ``elimination``: operators, state variables (functions of one operator's choice) and set
variables (which targets of a tensor are paid); a variable leaves by a minimum over the tables that mention it, a state
whose operator is still there by substitution, an operator whose states are still there by scattering. Here nothing is
computed: tables are numbers (ids) with a scope, and each instruction says which tables it takes and which it leaves.

**The last consumer of a tensor.** Consumer v of a tensor pays for its target t(v) unless another consumer a of it wants
the same. With f(v, R) the sum of all other tables that mention v, source state s and prices c ≥ 0, its minimum is ::

    min( min_v f(v, R) + c(s, t(v)),  min over a of min_{v: t(v) wanted by a} f(v, R) )

so that no sum has the axes of v, s and all a together: the first table is over (s, R), the others are over (a, R).

**Bounds of what is too wide** (``plan_relaxation``). The tables that mention a variable are dealt into *mini-buckets*
(Dechter and Rish, 2003), each of which takes its own minimum within the limit: the result is never above the true one.
A state whose substitution is too wide is minimised as if it were free of its operator. Of the sets of targets of a
tensor only the small ones are listed; one more stands for all larger ones, at the price of the cheapest of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from ...errors import TooWide
from .presolve import TensorEdges

__all__ = [
    "HANDED_ON",
    "NO_STEP",
    "Fixed",
    "Instruction",
    "Joined",
    "Least",
    "Limits",
    "Minimum",
    "Recipe",
    "Scatter",
    "Substitute",
    "SumOperand",
    "plan_elimination",
]

NO_STEP, HANDED_ON = -1, -2

_JOINT_CELLS = (
    2**18
)  # up to this size the joint table of a link is always built as it is: sets cost more to minimise over
_LARGEST_JOINT = 2**20  # … and no larger one is built, …
_LARGEST_SPLIT = 2**22  # … but one of up to this size may be taken apart by the consumers that leave
_PAID_SETS = 4096  # up to this many subsets of targets are listed
_FEW_SETS = 512  # … and this many, of up to so many targets, in a relaxation
_RELAXED_COPIES = 3
_COUNTLESS = 10**60  # cells: what is wider still is as wide
_HEAVY = 2**19  # cells per row: a recipe that touches more is worth comparing with others
_ORDERS = ((True, False), (False, False), (True, True), (False, True))  # by growth, and whether states are held
_LESS_WORK = 2  # times less work makes it worth while to take a minimum apart
_FEW = 4  # times fewer values than its operator has a state that may stay for longer


@dataclass(frozen=True, eq=False)
class Joined:
    """Table ``out`` from link ``link``: over (source, states of the consumers) the sum of the wanted targets' costs.

    rows: [S] original source states; members: [unions, R] original targets of each set, -1 = none; index: an int array
    with one axis per consumer (or one for a set variable), into the unions; None where it is 0, 1, 2, …. others: a
    last state, for every larger set, costs as much as the cheapest ``others[1]`` of the targets ``others[0]`` together.
    """

    out: int
    link: int
    rows: np.ndarray
    members: np.ndarray
    index: np.ndarray | None
    alone: bool  # there is one source state, which has no axis
    others: tuple[np.ndarray, int] | None = None

    @property
    def cells(self) -> int:
        """The cells of the table, per row."""
        return len(self.rows) * (len(self.members) if self.index is None else self.index.size)


@dataclass(frozen=True, eq=False)
class Fixed:
    """Table ``out`` is the same in every row."""

    out: int
    table: np.ndarray


@dataclass(frozen=True)
class SumOperand:
    """An operand of a sum: its axes are put in this order, then new ones go where ``index`` says None."""

    table: int
    order: tuple[int, ...]
    index: tuple[slice | None, ...]


@dataclass(frozen=True, eq=False)
class Substitute:
    """Table ``out`` from ``table``: axis ``axis`` (a state) by its map over the operator, whose axis is ``onto`` if the
    table has it already."""

    out: int
    table: int
    axis: int
    onto: int | None
    values: np.ndarray


@dataclass(frozen=True, eq=False)
class Minimum:
    """Table ``out`` over ``shape``: the minimum over the leading axis (``size``) of the sum of ``parts``; the first
    ``before`` of them are summed before the joint axes are complete. The argmin is that of step ``step``, or
    for ``Least`` (``HANDED_ON``), or not needed (``NO_STEP``): in all mini-buckets of a variable but the largest."""

    out: int
    step: int
    size: int
    shape: tuple[int, ...]
    parts: tuple[SumOperand, ...]
    before: int


@dataclass(frozen=True, eq=False)
class Scatter:
    """As ``Minimum``, but the choices are grouped by their states: choice c goes to ``cells[c]`` of the table and is
    read at ``reads[c]`` of the sum of parts."""

    out: int
    step: int
    size: int
    shape: tuple[int, ...]
    parts: tuple[SumOperand, ...]
    before: int
    cells: tuple[tuple[int | slice, ...], ...]
    reads: tuple[tuple[int | slice, ...], ...]


@dataclass(frozen=True, eq=False)
class Least:
    """Table ``out`` over ``shape``: in each cell the least of minima over one variable, with its argmin."""

    out: int
    step: int
    shape: tuple[int, ...]
    parts: tuple[SumOperand, ...]


Instruction = Joined | Fixed | Substitute | Minimum | Scatter | Least


@dataclass(frozen=True, eq=False)
class EliminationStep:
    """Variable ``variable`` follows from those of ``scope``: by ``values`` where they are given, else by the argmin."""

    variable: int
    scope: tuple[int, ...]
    sizes: tuple[int, ...]
    values: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Recipe:
    """The instructions for the tables of operators (ids 0, 1, …: the costs of ``alive`` choices) and links.

    last: by instruction the tables that nothing needs after it. result: the tables that are left, over ``keep``.
    most_cells: of the widest table, without the axis that leaves. work: the cells that all minima are taken over.
    """

    keep: tuple[int, ...]
    alive: tuple[np.ndarray, ...]
    kept_shape: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    last: tuple[tuple[int, ...], ...]
    steps: tuple[EliminationStep, ...]
    result: tuple[SumOperand, ...]
    most_cells: int
    work: int
    #: The operators that made tables too wide, where these were relaxed.
    relaxed: tuple[frozenset[int], ...] = ()
    order: int = 0


def plan_elimination(
    alive: Sequence[np.ndarray], links: Sequence[TensorEdges], keep: Sequence[int], limits: Limits
) -> Recipe:
    """The recipe for operators with these choices and the links of ``simplify_links``. Raises TooWide where that is
    above the limits."""
    if math.prod(len(alive[i]) for i in keep) > limits.max_cells:
        raise TooWide(f"the table of the kept operators has more than {limits.max_cells} cells")
    recipes: list[Recipe] = []
    wide: list[TooWide] = []
    for order in _ORDERS:
        try:
            recipes.append(_Planner(alive, links, tuple(keep), limits, *order).run())
        except TooWide as error:
            wide.append(error)
        if recipes and min(one.work for one in recipes) < _HEAVY:
            break
    if not recipes:
        raise wide[0]
    return min(recipes, key=lambda one: one.work)


def plan_relaxation(
    alive: Sequence[np.ndarray],
    links: Sequence[TensorEdges],
    keep: Sequence[int],
    max_cells: float,
    orders: Sequence[int] = range(len(_ORDERS)),
) -> Recipe:
    """The recipe of a lower bound by minima over tables of at most ``max_cells`` cells per row. Its walk gives every
    operator a choice, without a promise that they are possible together."""
    limits = Limits(max_cells, relaxed=True)
    recipes = [_Planner(alive, links, tuple(keep), limits, *_ORDERS[k]).run() for k in orders]
    return min(recipes, key=lambda one: (len(one.relaxed), one.work))


@dataclass(frozen=True)
class Limits:
    """The limits of an elimination, per row."""

    #: Cells of one table.
    max_cells: float
    #: Cells of all minima.
    max_work: float = math.inf
    #: True if what is above ``max_cells`` is relaxed: the result is then a lower bound.
    relaxed: bool = False


class _Planner:
    """The scopes of the tables that are left, and the instructions so far."""

    def __init__(
        self,
        alive: Sequence[np.ndarray],
        links: Sequence[TensorEdges],
        keep: tuple[int, ...],
        limits: Limits,
        by_growth: bool,
        holds: bool,
    ) -> None:
        self.alive, self.keep, self.limits, self.by_growth, self.holds = alive, keep, limits, by_growth, holds
        self.size = [len(choices) for choices in alive]
        self.scopes: dict[int, tuple[int, ...]] = {}  # table → its variables
        self.at: list[set[int]] = [set() for _ in alive]  # variable → tables that mention it
        self.owner: dict[int, tuple[int, np.ndarray]] = {}  # state variable → (operator, its map)
        self.states: list[set[int]] = [set() for _ in alive]  # variable → state variables it still owns
        self.operators: dict[int, tuple[int, ...]] = {}  # state or set variable → operators that make it as large
        self.instructions: list[Instruction] = []
        self.steps: list[EliminationStep] = []
        self.next_table = 0
        self.most_cells = 1
        self.work = 0
        self.relaxed: list[frozenset[int]] = []
        self.joined: dict[int, _Joint] = {}  # tables that are those of links as they were
        for i in range(len(alive)):
            self._table((i,))
        for number, link in enumerate(links):
            if link.consumers and not link.free().all():
                self._add_link(number, link)

    # ---- tables and variables

    def _variable(self, size: int) -> int:
        self.size.append(size)
        self.at.append(set())
        self.states.append(set())
        return len(self.size) - 1

    def _state(self, operator: int, values: np.ndarray) -> int:
        """A variable for the states in ``values``; the operator itself where that is as small."""
        used, index = np.unique(values, return_inverse=True)
        if len(used) == len(values):
            return operator
        variable = self._variable(len(used))
        self.owner[variable] = operator, index.reshape(-1)
        self.states[operator].add(variable)
        self.operators[variable] = (operator,)
        return variable

    def _number(self) -> int:
        self.next_table += 1
        return self.next_table - 1

    def _table(self, scope: tuple[int, ...]) -> int:
        number = self._number()
        self.scopes[number] = scope
        for v in scope:
            self.at[v].add(number)
        return number

    def _prod(self, variables: Sequence[int] | set[int]) -> int:
        return min(math.prod(self.size[u] for u in variables), _COUNTLESS)

    # ---- links

    def _add_link(self, number: int, link: TensorEdges) -> None:
        used = np.unique(link.source)
        source = () if len(used) == 1 else (self._state(link.producer, link.source),)
        rows = link.rows[used if len(used) < len(link.source) else link.source]
        free = link.free()
        wants: dict[int, list[np.ndarray]] = {}
        for k, target in link.consumers:
            wants.setdefault(k, []).append(target)
        # per consuming operator with a choice its variable and, for each value of that, the set of targets it wants
        ends: list[tuple[int, list[frozenset[int]]]] = []
        sure: frozenset[int] = frozenset()
        for k, targets in wants.items():
            sets = [frozenset(column) for column in zip(*(t.tolist() for t in targets))]
            kinds = {s: j for j, s in enumerate(dict.fromkeys(sets))}
            if len(kinds) == 1:
                sure |= sets[0]
            else:
                variable = self._state(k, np.array([kinds[s] for s in sets]))
                ends.append((variable, sets if variable == k else list(kinds)))
        paid = frozenset(np.flatnonzero(~free).tolist())
        sure &= paid
        others = sorted(paid - sure)
        most = min(len(others), sum(max(len(s & paid - sure) for s in sets) for _, sets in ends))
        listed = min(most, _RELAXED_COPIES) if self.limits.relaxed else most
        while self.limits.relaxed and listed > 1 and _num_sets(len(others), listed) > _FEW_SETS:
            listed -= 1
        cells = len(rows) * math.prod(len(sets) for _, sets in ends)
        widest = max([len(rows), *(len(sets) for _, sets in ends)])
        num_sets = _num_sets(len(others), listed)
        if cells > _JOINT_CELLS and num_sets <= _PAID_SETS and num_sets * widest < cells:
            sets = [sure.union(c) for r in range(listed + 1) for c in combinations(others, r)]
            larger = None
            if self.limits.relaxed and listed < most:
                larger = link.columns[others], listed + 1
                self.relaxed.append(frozenset({link.producer, *wants} - {*self.keep}))
            self._add_paid_set(number, link, rows, source, ends, paid, sets, larger)
            return
        if cells > min(self.limits.max_cells, _LARGEST_SPLIT) and not self.limits.relaxed:
            raise TooWide(f"the table of a tensor would have {cells} cells")
        wanted = tuple((v, tuple(s & paid for s in sets)) for v, sets in ends)
        self._join(_Joint(number, link, rows, source, wanted, sure))

    def _join(self, joint: _Joint, out: int | None = None) -> int:
        """Add the table of a link, by default as one that is to leave."""
        if out is None:
            out = self._table(joint.scope)
            self.joined[out] = joint
        unions, index = _unions(joint.sure, [sets for _, sets in joint.ends])
        members = _members(joint.link, unions)
        self.instructions.append(Joined(out, joint.number, joint.rows, members, index, alone=not joint.source))
        return out

    def _add_paid_set(
        self,
        number: int,
        link: TensorEdges,
        rows: np.ndarray,
        source: tuple[int, ...],
        ends: Sequence[tuple[int, list[frozenset[int]]]],
        paid: frozenset[int],
        sets: Sequence[frozenset[int]],
        larger: tuple[np.ndarray, int] | None,
    ) -> None:
        """Add the set of targets that is paid as a variable. larger: as in ``Joined``."""
        bought = self._variable(len(sets) + (larger is not None))
        self.operators[bought] = tuple(self.operators.get(v, (v,))[0] for v, _ in ends)
        out = self._table((*source, bought))
        self.instructions.append(Joined(out, number, rows, _members(link, sets), None, not source, larger))
        for variable, wanted in ends:
            lacking = np.array([[bool(w & paid - s) for w in wanted] for s in sets] + [[False] * len(wanted)])
            table = np.where(lacking[: self.size[bought]], np.inf, 0.0)
            self.instructions.append(Fixed(self._table((bought, variable)), table))

    # ---- order

    def _cells(self, v: int) -> int:
        """The largest table that v's elimination touches."""
        if v in self.owner:
            x = self.owner[v][0]
            return max((self._prod({u for u in self.scopes[f] if u != v} | {x}) for f in self.at[v]), default=0)
        if shared := self._shared(v, {f: self.scopes[f] for f in self.at[v]}):
            return shared[1]
        others = {u for f in self.at[v] for u in self.scopes[f]} - {v}
        return self._prod(others) * max(self.size[v], self._prod(self.states[v] - others))

    def _rank(self, v: int) -> float:
        """The order of elimination, least first: by the cells touched per cell that goes, or by the cells touched. A
        state that ``holds`` much fewer values than its operator stays until that leaves."""
        if self.holds and v in self.owner:
            x = self.owner[v][0]
            if x not in self.keep and _FEW * self.size[v] <= self.size[x]:
                return math.inf
        gone = sum(self._prod(self.scopes[f]) for f in self.at[v]) if self.by_growth else 1
        return self._cells(v) / max(gone, 1.0)

    def run(self) -> Recipe:
        """Eliminate every variable that is not kept, in greedy order."""
        kept = set(self.keep)
        todo = {v for v in range(len(self.size)) if v not in kept}
        # a kept operator with one state takes its place at the end; several would be a product until then
        last = {v for v in todo if v in self.owner and self.owner[v][0] in kept}
        last = {v for v in last if len(self.states[self.owner[v][0]]) == 1}
        for group in (todo - last, last):
            self._run(group)
        assert all(set(scope) <= kept for scope in self.scopes.values())
        shape = tuple(self.size[v] for v in self.keep)
        result = tuple(self._part(f, self.keep) for f in self.scopes)
        instructions, unused = _trimmed(self.instructions, {part.table for part in result})
        built = max((do.cells for do in instructions if isinstance(do, Joined)), default=0)
        if built > _LARGEST_JOINT and not self.limits.relaxed:
            raise TooWide(f"the table of a tensor would have {built} cells")
        return Recipe(
            self.keep,
            tuple(self.alive),
            shape,
            instructions,
            unused,
            tuple(self.steps),
            result,
            max(self.most_cells, math.prod(shape)),
            self.work,
            tuple(self.relaxed),
            _ORDERS.index((self.by_growth, self.holds)),
        )

    def _run(self, todo: set[int]) -> None:
        ranks = {v: self._rank(v) for v in todo}
        heap = [(rank, v) for v, rank in ranks.items()]
        heapq.heapify(heap)
        while heap:
            rank, v = heapq.heappop(heap)
            if v not in todo or ranks[v] != rank:
                continue
            wide = self._cells(v) > self.limits.max_cells
            if wide and not self.limits.relaxed:
                raise TooWide(f"eliminating the next variable takes a table of {self._cells(v)} cells")
            if wide and self.states[v]:  # these go first: tables then mention the operator itself
                ranks[v] = math.nan
                v = min(self.states[v])
                wide = self._cells(v) > self.limits.max_cells
            todo.discard(v)
            touched = {u for f in self.at[v] for u in self.scopes[f]} | self.states[v] | {v}
            if v in self.owner:
                touched.add(self.owner[v][0])
            if wide:
                self._relax(v)
            else:
                self._eliminate(v)
            if self.work > self.limits.max_work:
                raise TooWide(f"minima over more than {self.limits.max_work} cells")
            touched |= {s for u in touched for s in self.states[u]}
            touched |= {self.owner[u][0] for u in touched if u in self.owner}
            for u in touched & todo:
                new = self._rank(u)
                if new != ranks[u]:
                    ranks[u] = new
                    heapq.heappush(heap, (new, u))

    def _operators(self, scope: Iterable[int]) -> frozenset[int]:
        """The operators that are not kept behind some variables."""
        return frozenset(i for u in scope for i in self.operators.get(u, (u,)) if i not in self.keep)

    # ---- one elimination

    def _taken(self, tables: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Table → scope of tables that leave."""
        scopes = {f: self.scopes.pop(f) for f in tables}
        for f, scope in scopes.items():
            for u in scope:
                self.at[u].discard(f)
        return scopes

    def _eliminate(self, v: int) -> None:
        scopes = self._taken(sorted(self.at[v]))
        if v in self.owner:
            self._substitute(v, scopes)
        else:
            self._minimise(v, scopes)

    def _relax(self, v: int) -> None:
        """Eliminate v by tables within the limit, from below."""
        self.relaxed.append(self._operators({u for f in self.at[v] for u in self.scopes[f]} | {v}))
        tables = sorted(self.at[v], key=lambda f: (-self._prod(self.scopes[f]), f))
        if v in self.owner:
            x = self.owner[v][0]
            wide = [f for f in tables if self._prod({*self.scopes[f], x} - {v}) > self.limits.max_cells]
            narrow = self._taken([f for f in tables if f not in wide])
            for f in wide:
                self._minimise(v, self._taken([f]), counted=False)
            self._substitute(v, narrow)
            return
        buckets: list[tuple[list[int], set[int]]] = []
        for f in tables:
            scope = set(self.scopes[f])
            for members, joint in buckets:
                if self._prod(joint | scope) <= self.limits.max_cells:
                    members.append(f)
                    joint |= scope
                    break
            else:
                buckets.append(([f], scope))
        for number, (members, _) in enumerate(buckets):
            self._minimise(v, self._taken(members), counted=number == 0)

    def _minimise(self, v: int, scopes: dict[int, tuple[int, ...]], counted: bool = True) -> None:
        """Take the minimum over v of these tables. counted: whether its argmin is that of v."""
        step = len(self.steps) if counted else NO_STEP
        if shared := self._shared(v, scopes):
            others = self._minimise_shared(v, scopes, shared[0], step)
        elif self.states[v]:
            self._scatter(v, scopes)
            return
        else:
            others = _others(v, scopes)
            self._minimum(v, scopes, self._table(others), step)
        if counted:
            self.steps.append(EliminationStep(v, others, self._shape(others)))

    def _shape(self, scope: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.size[u] for u in scope)

    def _sum(self, v: int, scopes: Mapping[int, tuple[int, ...]]) -> tuple[tuple[SumOperand, ...], int]:
        """(the operands of the sum of these tables, narrow ones first, v in front; ``Minimum.before``)."""
        others = _others(v, scopes)
        tables = sorted(scopes, key=lambda f: self._prod(scopes[f]))
        seen: set[int] = set()
        before = 0
        for f in tables:
            seen |= set(scopes[f])
            before += len(seen) < len(others) + 1
        self.most_cells = max(self.most_cells, self._prod(others))
        return tuple(self._part(f, (v, *others), scopes[f]) for f in tables), before

    def _minimum(self, v: int, scopes: Mapping[int, tuple[int, ...]], out: int, step: int) -> tuple[int, ...]:
        """Add the minimum over v of the sum of these tables, and return its scope."""
        (parts, before), others = self._sum(v, scopes), _others(v, scopes)
        self.work += self._prod(others) * self.size[v]
        self.instructions.append(Minimum(out, step, self.size[v], self._shape(others), parts, before))
        return others

    def _shared(self, v: int, scopes: Mapping[int, tuple[int, ...]]) -> tuple[int, int] | None:
        """(the table of a link of whose tensor v is a consumer, the cells that its minimum touches if taken apart), if
        that touches much fewer."""
        if self.states[v] or not any(f in self.joined for f in scopes):
            return None
        found = []
        every = self._prod({u for scope in scopes.values() for u in scope} - {v})
        for f in scopes:
            if (joint := self.joined.get(f)) is None or v not in joint.single or len(joint.ends) < 2:
                continue
            rest = {u for g, scope in scopes.items() if g != f for u in scope} - {v}
            tables = [rest | set(joint.source), *(rest | {a} for a, _ in joint.ends if a != v)]
            work = len(tables) * every + self.size[v] * sum(self._prod(one) for one in tables)
            found.append((work, f))
        work, f = min(found, default=(0, -1))
        return (f, work) if found and _LESS_WORK * work <= every * self.size[v] else None

    def _minimise_shared(self, v: int, scopes: Mapping[int, tuple[int, ...]], f: int, step: int) -> tuple[int, ...]:
        """Take the minimum over v, a consumer of the tensor of table ``f``, in parts; return what is left."""
        joint, scopes, others = self.joined[f], dict(scopes), _others(v, scopes)
        part_step = HANDED_ON if step >= 0 else step
        del scopes[f]
        ends = dict(joint.ends)
        wanted = [one - joint.sure for one in ends.pop(v)]
        self._join(replace(joint, ends=tuple(ends.items())))
        parts: dict[int, tuple[int, ...]] = {}  # minima over v, by their scopes
        for a, sets in ends.items():
            mask, out = self._number(), self._number()
            both = np.array([[one <= other for other in sets] for one in wanted])
            self.instructions.append(Fixed(mask, np.where(both, 0.0, np.inf)))
            parts[out] = self._minimum(v, {**scopes, mask: (v, a)}, out, part_step)
        alone = replace(joint, ends=((v, tuple(wanted)),), sure=frozenset())
        price, out = self._join(alone, self._number()), self._number()
        parts[out] = self._minimum(v, {**scopes, price: alone.scope}, out, part_step)
        self.most_cells = max(self.most_cells, self._prod(others))
        self.work += len(parts) * self._prod(others)
        operands = tuple(self._part(one, others, scope) for one, scope in parts.items())
        self.instructions.append(Least(self._table(others), step, self._shape(others), operands))
        return others

    def _substitute(self, v: int, scopes: dict[int, tuple[int, ...]]) -> None:
        x, values = self.owner.pop(v)
        self.states[x].discard(v)
        self.steps.append(EliminationStep(v, (x,), (self.size[x],), values))
        for f, scope in scopes.items():
            axis = scope.index(v)
            if x in scope:
                new, onto = (x, *(u for u in scope if u not in (v, x))), scope.index(x)
            else:
                new, onto = tuple(x if u == v else u for u in scope), None
            self.most_cells = max(self.most_cells, self._prod(new))
            self.instructions.append(Substitute(self._table(new), f, axis, onto, values))

    def _scatter(self, v: int, scopes: Mapping[int, tuple[int, ...]]) -> None:
        """Take the minimum over v of the sum of these tables for each combination of the states that it owns."""
        owned, others, (parts, before) = sorted(self.states[v]), _others(v, scopes), self._sum(v, scopes)
        values = {s: self.owner.pop(s)[1].tolist() for s in owned}
        self.states[v].clear()
        scope = (*(s for s in owned if s not in others), *others)
        shape = self._shape(scope)
        self.most_cells = max(self.most_cells, math.prod(shape))
        cells = tuple(tuple(values[u][c] if u in values else slice(None) for u in scope) for c in range(self.size[v]))
        reads = tuple((c, *(values[u][c] if u in values else slice(None) for u in others)) for c in range(self.size[v]))
        step = len(self.steps)
        self.work += self.size[v] * math.prod(shape)
        self.steps.append(EliminationStep(v, scope, shape))
        self.instructions.append(Scatter(self._table(scope), step, self.size[v], shape, parts, before, cells, reads))

    def _part(self, table: int, scope: tuple[int, ...], own: tuple[int, ...] | None = None) -> SumOperand:
        """The operand by which ``table`` enters a sum over ``scope``."""
        own = self.scopes[table] if own is None else own
        order = tuple(sorted(range(len(own)), key=lambda a: scope.index(own[a])))
        return SumOperand(table, order, tuple(slice(None) if u in own else None for u in scope))


@dataclass(frozen=True, eq=False)
class _Joint:
    """What the table of a link is made of: its source variable, if it has one; per consuming variable the set of paid
    targets for each of its values; the targets that are paid whatever is chosen."""

    number: int
    link: TensorEdges
    rows: np.ndarray
    source: tuple[int, ...]
    ends: tuple[tuple[int, tuple[frozenset[int], ...]], ...]
    sure: frozenset[int]

    @property
    def scope(self) -> tuple[int, ...]:
        """The axes of the table."""
        return (*self.source, *(v for v, _ in self.ends))

    @cached_property
    def single(self) -> frozenset[int]:
        """The consuming variables that want one more target at most."""
        return frozenset(v for v, sets in self.ends if all(len(one - self.sure) < 2 for one in sets))


def _others(v: int, scopes: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """The variables of these tables without v, in order."""
    return tuple(sorted({u for scope in scopes.values() for u in scope} - {v}))


def _trimmed(
    instructions: Sequence[Instruction], needed: set[int]
) -> tuple[tuple[Instruction, ...], tuple[tuple[int, ...], ...]]:
    """(the instructions that what is needed follows from, by instruction the tables that nothing needs after it)."""
    found: list[Instruction] = []
    last: list[tuple[int, ...]] = []
    needed = set(needed)
    for do in reversed(instructions):
        if do.out not in needed:
            continue
        read = {do.table} if isinstance(do, Substitute) else {part.table for part in getattr(do, "parts", ())}
        found.append(do)
        last.append(tuple(read - needed))
        needed |= read
    return tuple(reversed(found)), tuple(reversed(last))


def _num_sets(num: int, most: int) -> int:
    """The number of sets of at most ``most`` out of ``num``."""
    return sum(math.comb(num, r) for r in range(most + 1))


def _members(link: TensorEdges, sets: Sequence[frozenset[int]]) -> np.ndarray:
    """[sets, R]: ``Joined.members`` of sets of the link's columns."""
    members = np.full((len(sets), max(1, *(len(one) for one in sets))), -1)
    for line, one in zip(members, sets):
        line[: len(one)] = link.columns[sorted(one)]
    return members


def _unions(
    sure: frozenset[int], ends: Sequence[Sequence[frozenset[int]]]
) -> tuple[list[frozenset[int]], np.ndarray | None]:
    """(distinct unions of ``sure`` and one set per end, their index over all combinations; None where that is 0, 1,
    2, …)."""
    codes = np.full((), sum(1 << g for g in sure), dtype=object)
    for sets in ends:
        bits = np.array([sum(1 << g for g in s) for s in sets], dtype=object)
        codes = codes[..., None] | bits
    flat = np.asarray(codes, dtype=object).reshape(-1).tolist()
    kinds = {code: j for j, code in enumerate(dict.fromkeys(flat))}
    unions = [frozenset(g for g in range(code.bit_length()) if code >> g & 1) for code in kinds]
    index = np.array([kinds[code] for code in flat]).reshape([len(sets) for sets in ends])
    plain = index.ndim == 1 and np.array_equal(index, np.arange(len(unions)))
    return unions, None if plain else index
