"""Delayed gradient averaging and local SGD by replicas that run one after the other in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.support.replicas import ASKED, CASES, INNER, OUTER, STEPS, Model, data, loss_of


# ---- in one process
class Simulation:
    """Replicas one after the other, by the equations of the modules' docstrings."""

    def __init__(self, case: str) -> None:
        _, self.parts, self.count, inner, self.delay, self.every, outer = CASES[case]
        self.models = [Model().double() for _ in range(self.count)]
        self.weights = [[p for p in model.parameters() if p.requires_grad] for model in self.models]
        self.inner = [INNER[inner](weights) for weights in self.weights]
        self.anchor = [nn.Parameter(w.detach().clone()) for w in self.weights[0]]
        make = OUTER[outer] or (lambda ps: torch.optim.SGD(ps, lr=1.0))
        self.outer = make(self.anchor)
        self.late: list[list[list[torch.Tensor]]] = []  # step → replica → gradients not yet averaged
        self.sent: list[list[torch.Tensor]] = []
        self.since = 0
        self.clip = ASKED.get(case, {}).get("clip_grad_norm")

    def step(self, step: int) -> list[float]:
        x, y = data(step)
        losses, grads = [], []
        for r, (model, weights) in enumerate(zip(self.models, self.weights, strict=True)):
            # its share of every microbatch
            xs, ys = (torch.cat([part.chunk(self.count)[r] for part in z.chunk(self.parts)]) for z in (x, y))
            loss = loss_of(model(xs), ys)
            losses.append(loss.item())
            grads.append(list(torch.autograd.grad(loss, weights)))
        if self.every == 1:
            self.late.append(grads)
            old = self.late.pop(0) if len(self.late) > self.delay else None
        for r in range(self.count):
            for k, weight in enumerate(self.weights[r]):
                weight.grad = grads[r][k].clone()
                if self.every == 1 and old is not None:
                    weight.grad += sum(g[k] for g in old) / self.count - old[r][k]
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.weights[r], self.clip)
            self.inner[r].step()
        if self.every > 1:
            self.since += 1
            if self.sent and self.since == self.delay:
                self.land(True)
            if self.since == self.every:
                self.send()
        return losses

    def send(self) -> None:
        self.since = 0
        self.sent = [[w.detach().clone() for w in weights] for weights in self.weights]
        if not self.delay:
            self.land(False)

    @torch.no_grad()
    def land(self, moved: bool) -> None:
        for k, anchor in enumerate(self.anchor):
            anchor.grad = anchor - sum(sent[k] for sent in self.sent) / self.count
        self.outer.step()
        for weights, sent in zip(self.weights, self.sent, strict=True):
            for weight, anchor, was in zip(weights, self.anchor, sent, strict=True):
                weight.copy_(weight + anchor - was if moved else anchor)
        self.sent = []

    @torch.no_grad()
    def flush(self) -> None:
        if self.every > 1:
            if self.sent:
                self.land(True)
            if self.since:
                delay, self.delay = self.delay, 0
                self.send()
                self.delay = delay
        self.late = []
        for group in zip(*self.weights, strict=True):
            mean = sum(group) / self.count
            for weight in group:
                weight.copy_(mean)
            states = [inner.state[weight] for inner, weight in zip(self.inner, group, strict=True)]
            for key in states[0]:
                if isinstance(states[0][key], torch.Tensor) and states[0][key].ndim:
                    mean = sum(state[key] for state in states) / self.count
                    for state in states:
                        state[key].copy_(mean)
        for anchor, weight in zip(self.anchor, self.weights[0], strict=True):
            anchor.copy_(weight)


def expected(case: str, flushes: Sequence[int]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    made, losses = Simulation(case), []
    for step in range(STEPS):
        losses.append(made.step(step))
        if step in flushes:
            made.flush()
    return losses, {name: x.detach() for name, x in made.models[0].state_dict().items()}
