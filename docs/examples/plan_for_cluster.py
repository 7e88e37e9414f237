"""Plan one model for several clusters, none of which is here: which is worth renting?

python plan_for_cluster.py
"""

from __future__ import annotations

import meshwright as mw
import torch
from meshwright.models import GPT

CLUSTERS = ("p3.16xlarge", "dgx-a100-40")
BATCH, SEQUENCE = 64, 256


def main() -> None:
    """Print a line per cluster."""
    with torch.device("meta"):
        model = GPT(vocab=8192, layers=4, hidden=512, heads=8, sequence=SEQUENCE)
        tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    for name in CLUSTERS:
        plan = mw.plan(model, mw.Cluster.preset(name), example_inputs=(tokens, tokens), strategy="dp8")
        meshes = [stage.mesh_shape for stage in plan.stages]
        rate = BATCH * SEQUENCE / plan.prediction.step_s
        print(f"{name:12} {rate:12,.0f} tokens/s   stages {meshes}, {plan.microbatches} microbatches")


if __name__ == "__main__":
    main()
