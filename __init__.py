"""meshwright: an auto-parallelization compiler for PyTorch.

``plan`` finds how to train a model on a cluster; ``parallelize`` trains by it; a ``Plan`` can be read, compared, edited and saved.
"""

from meshwright.api import Parallel, parallelize, plan
from meshwright.compiler.driver import InfeasibleError
from meshwright.compiler.plan import Plan
from meshwright.costmodel.cluster import Cluster, Mesh

__all__ = ["Cluster", "InfeasibleError", "Mesh", "Parallel", "Plan", "parallelize", "plan"]
__version__ = "0.1.0"
