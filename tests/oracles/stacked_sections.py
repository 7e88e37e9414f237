"""A layer's section for several cases, stacked from scalar sections: an oracle that shares no code with the templates.

Choices and states that some cases lack are inf there. Parameters are replicated, so all they take is per step.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from meshwright.compiler.intra_op.section import label
from meshwright.compiler.plan.recompute import recompute_of

from tests.oracles.scalar_composer import Composer
from tests.support.cases import graph_of


def scalar_composers(variants, restriction, modes, schedule="1f1b"):
    """Per case a scalar composer per mode."""
    found = []
    for v, case in enumerate(variants.cases):
        graph = graph_of(variants, v)
        found.append(
            {
                mode: Composer(
                    graph,
                    variants.layering,
                    variants.pricer(v),
                    case.microbatches,
                    restriction,
                    recompute=recompute_of(variants.source, variants.layering, mode, schedule),
                )
                for mode in modes
            }
        )
    return found


def stacked_section(variants, layer, into, out, restriction, modes):
    """The section of one layer for all cases, as ``BatchSection``."""
    cases = scalar_composers(variants, restriction, modes)
    sections = []
    for composers in cases:
        one = next(iter(composers.values()))
        ends = one.states(layer), one.states(layer + 1)
        sections.append({m: c.section(layer, layer + 1, *ends) for m, c in composers.items()})
    base = [next(iter(by_mode.values())) for by_mode in sections]
    names, kinds = base[0].names, base[0].kinds
    assert all(s.names == names and s.kinds == kinds for by_mode in sections for s in by_mode.values())
    choices = []
    for i in range(len(names)):
        union = {}
        for section in base:
            for choice in section.choices[i]:
                union.setdefault(label(choice), choice)
        choices.append(union)

    def stack(field, mode, empty):
        arrays = []
        for i, union in enumerate(choices):
            place = {text: c for c, text in enumerate(union)}
            array = np.full((len(sections), len(union)), empty)
            for v, by_mode in enumerate(sections):
                section = by_mode[mode]
                values = getattr(section, field)
                if values:
                    array[v, [place[label(c)] for c in section.choices[i]]] = values[i]
            arrays.append(array)
        return arrays

    seconds = {m: stack("seconds", m, np.inf) for m in modes}
    plain = seconds[modes[0]]
    again = [{m: _difference(seconds[m][i], plain[i]) for m in modes} for i in range(len(names))]
    saved, held = ({m: stack(f, m, 0.0) for m in modes} for f in ("saved", "transient"))
    zero = [np.zeros_like(s) for s in plain]
    step = [np.where(np.isfinite(s), s, 0.0) if kind == "parameter" else z for s, kind, z in zip(plain, kinds, zero)]
    edges = [_stacked_edge(t, sections, modes, choices) for t in range(len(base[0].edges))]
    return SimpleNamespace(
        names=names,
        kinds=kinds,
        choices=tuple(tuple(union.values()) for union in choices),
        seconds=tuple(plain),
        step_seconds=tuple(step),
        weight_seconds=tuple(zero),
        gradient_seconds=tuple(zero),
        again=tuple(again),
        resident=tuple(stack("resident", modes[0], 0.0)),
        saved=tuple({m: saved[m][i] for m in modes} for i in range(len(names))),
        transient=tuple({m: held[m][i] for m in modes} for i in range(len(names))),
        floor_seconds=tuple(plain),
        edges=tuple(edges),
        index=base[0].index,
        label=lambda operator, choice, v: list(choices[operator])[choice],
    )


def _difference(one, other):
    return np.where(np.isfinite(other), one - np.where(np.isfinite(other), other, 0.0), 0.0)


def _stacked_edge(t, sections, modes, choices):
    base = [next(iter(by_mode.values())) for by_mode in sections]
    first = base[0].edges[t]
    sources, targets = {}, {}
    source = np.zeros(len(choices[first.producer]), dtype=int)
    wants = [np.zeros(len(choices[k]), dtype=int) for k, _ in first.consumers]
    for section in base:
        edge, (theirs, wanted) = section.edges[t], section.edge_states[t]
        assert edge.name == first.name
        at = [sources.setdefault(pair, len(sources)) for pair in theirs]
        to = [targets.setdefault(pair, len(targets)) for pair in wanted]
        _place(source, choices[edge.producer], section.choices[edge.producer], [at[s] for s in edge.source])
        for into, (k, target) in zip(wants, edge.consumers):
            _place(into, choices[k], section.choices[k], [to[s] for s in target])
    shape = len(sections), len(sources), len(targets)
    arrays = {name: {m: np.zeros(shape) for m in modes} for name in ("seconds", "bytes", "transient")}
    for v, by_mode in enumerate(sections):
        for mode, section in by_mode.items():
            edge, (theirs, wanted) = section.edges[t], section.edge_states[t]
            cells = np.ix_([v], [sources[p] for p in theirs], [targets[p] for p in wanted])
            arrays["seconds"][mode][cells] = edge.seconds
            arrays["bytes"][mode][cells] = edge.bytes
            if section.edge_transient:
                arrays["transient"][mode][cells] = section.edge_transient[t]
    plain = arrays["seconds"][modes[0]]
    return SimpleNamespace(
        name=first.name,
        producer=first.producer,
        source=source,
        consumers=tuple((k, want) for (k, _), want in zip(first.consumers, wants)),
        seconds=plain,
        again={m: _difference(s, plain) for m, s in arrays["seconds"].items()},
        bytes=arrays["bytes"],
        transient=arrays["transient"],
        floor=1.0,
    )


def _place(into, union, own, states):
    place = {text: c for c, text in enumerate(union)}
    for choice, state in zip(own, states):
        into[place[label(choice)]] = state
