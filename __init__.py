"""meshwright: an auto-parallelization compiler for PyTorch.

``plan`` finds how to train a model on a cluster; ``parallelize`` trains by it; a ``Plan`` can be read, compared, edited
and saved, ``verify`` checks it without its cluster, and ``simulate`` and ``diff`` say what another one would be.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.compiler.plan.methods import provide as _provide

if TYPE_CHECKING:
    from meshwright.api import parallelize, pareto, plan, simulate
    from meshwright.compiler.errors import InfeasibleError
    from meshwright.compiler.frontend.annotations import shard, stage
    from meshwright.compiler.frontend.opaque_modules import opaque
    from meshwright.compiler.plan.plan import Plan
    from meshwright.compiler.report.difference import diff
    from meshwright.compiler.verification import verify
    from meshwright.costmodel.cluster import Cluster, Mesh
    from meshwright.parallel import Parallel
    from meshwright.runtime.checkpoint.safetensors import open_safetensors
    from meshwright.runtime.checkpoint.storage import export_safetensors, latest_checkpoint
    from meshwright.runtime.data_loading import distributed_loader
    from meshwright.runtime.metrics import MetricsLogger
    from meshwright.runtime.profiling.cluster_profile import profile

__all__ = [
    "Cluster", "InfeasibleError", "Mesh", "MetricsLogger", "Parallel", "Plan", "diff", "distributed_loader",
    "export_safetensors", "latest_checkpoint", "opaque", "open_safetensors",
    "parallelize", "pareto", "plan", "profile", "shard", "simulate", "stage", "verify",
]  # fmt: skip
__version__ = "0.1.0"

# what lies above a plan gives it some of its methods
_provide(
    explain="meshwright.compiler.report.explain:explain",
    simulate="meshwright.compiler.report.what_if:simulate",
    why="meshwright.compiler.report.why:why",
    check="meshwright.compiler.plan.validation:validate",
    not_executable="meshwright.compiler.plan.validation:runtime_faults",
    outline="meshwright.compiler.report.outline:outline",
    to_html="meshwright.compiler.report.page:to_html",
    notebook_html="meshwright.compiler.report.page:notebook_html",
    to_chrome_trace="meshwright.compiler.report.chrome_trace:to_chrome_trace",
    require_valid="meshwright.compiler.plan.validation:require_valid",
)

_HOMES = {
    "Cluster": "costmodel.cluster",
    "InfeasibleError": "compiler.errors",
    "Mesh": "costmodel.cluster",
    "MetricsLogger": "runtime.metrics",
    "Parallel": "parallel",
    "Plan": "compiler.plan.plan",
    "diff": "compiler.report.difference",
    "distributed_loader": "runtime.data_loading",
    "export_safetensors": "runtime.checkpoint.storage",
    "latest_checkpoint": "runtime.checkpoint.storage",
    "opaque": "compiler.frontend.opaque_modules",
    "open_safetensors": "runtime.checkpoint.safetensors",
    "parallelize": "api",
    "pareto": "api",
    "plan": "api",
    "profile": "runtime.profiling.cluster_profile",
    "shard": "compiler.frontend.annotations",
    "simulate": "api",
    "stage": "compiler.frontend.annotations",
    "verify": "compiler.verification",
}


def __getattr__(name: str) -> Any:
    """Public names are imported at first use, so that ``meshwright --help`` does not wait for torch (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"meshwright.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names, imported or not yet, and none of this module's own imports."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
