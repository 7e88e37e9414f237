"""meshwright: an auto-parallelization compiler for PyTorch.

``plan`` finds how to train a model on a cluster; ``parallelize`` trains by it; a ``Plan`` can be read, compared, edited
and saved, and ``verify`` checks it without its cluster.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.compiler.plan_methods import provide as _provide

if TYPE_CHECKING:
    from meshwright.api import parallelize, pareto, plan
    from meshwright.compiler.plan import Plan
    from meshwright.compiler.strategy import InfeasibleError
    from meshwright.costmodel.cluster import Cluster, Mesh
    from meshwright.parallel import Parallel
    from meshwright.profiling import profile
    from meshwright.runtime.verification import verify

__all__ = [
    "Cluster", "InfeasibleError", "Mesh", "Parallel", "Plan", "parallelize", "pareto", "plan", "profile", "verify",
]  # fmt: skip
__version__ = "0.1.0"

# what lies above a plan gives it some of its methods
_provide(
    explain="meshwright.compiler.explain:explain",
    why="meshwright.compiler.why:why",
    not_executable="meshwright.compiler.executable:not_executable",
    require_executable="meshwright.compiler.executable:require_executable",
)

_HOMES = {
    "Cluster": "costmodel.cluster",
    "InfeasibleError": "compiler.strategy",
    "Mesh": "costmodel.cluster",
    "Parallel": "parallel",
    "Plan": "compiler.plan",
    "parallelize": "api",
    "pareto": "api",
    "plan": "api",
    "profile": "profiling",
    "verify": "runtime.verification",
}


def __getattr__(name: str) -> Any:
    """Public names are imported at first use, so that ``meshwright --help`` does not wait for torch (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"meshwright.{_HOMES[name]}"), name)
