"""Two plans held against each other, in a few lines each."""

from __future__ import annotations

from difflib import unified_diff

from meshwright.compiler.cost.parameter_sharding import sharding_text
from meshwright.compiler.ir.spec import spec_text
from meshwright.compiler.plan.plan import Plan


def text(plan: Plan) -> str:
    """A document in a few lines, to hold two against each other."""
    found = plan.prediction
    lines = [f"{found.step_s:.9g} s, {plan.microbatches} microbatches, {plan.schedule}, bound {found.bound_s:.9g} s"]
    for stage, price in zip(plan.stages, plan.prediction.stages):
        mesh = "x".join(map(str, stage.mesh_shape)) or "1"
        lines.append(
            f"  devices {stage.devices[0]}-{stage.devices[-1]} as {mesh}: forward {price.forward_s:.6g} backward "
            f"{price.backward_s:.6g} step {price.step_s:.6g}; {sum(price.memory_bytes.values()) / 2**20:.1f} MiB"
        )
        for chunk in stage.chunks:
            lines.append(
                f"    layers {chunk.layers[0]}-{chunk.layers[1]}: "
                + ", ".join(f"{name} {'/'.join(labels) or '-'}" for name, labels in chunk.ops.items())
            )
            lines.append("    " + ", ".join(f"{name} {sharding_text(r)}" for name, r in chunk.parameters.items()))
            lines.append(
                "    receives "
                + ", ".join(f"{n} {p}" for n, p in chunk.receives.items())
                + "; sends "
                + ", ".join(f"{n} {spec_text(p)}" for n, p in chunk.sends.items())
            )
    return "\n".join(lines)


def difference(ours: Plan, theirs: Plan) -> str:
    """What two plans do differently: lines of the first with -, of the second with +."""
    return "\n".join(
        unified_diff(text(ours).splitlines(), text(theirs).splitlines(), "ours", "exhaustive", lineterm="", n=1)
    )
