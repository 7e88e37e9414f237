"""Errors of a capture name the line that did it, be it a library's, the user's line that called it, and the cause:
models of transformers inside a wrapper of the user's."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from meshwright.compiler.errors import CaptureError
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.opaque_modules import Choice
from meshwright.compiler.verification.capture_check import check_capture
from torch import Tensor, nn

BATCH, LENGTH, PREDICTED = 4, 8, 4
Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Wrapper(nn.Module):
    """A loss of the user's around a model of a library."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.body(*args, **kwargs).last_hidden_state.mean()


CALL = Wrapper.forward.__code__.co_firstlineno + 1


def _text(kind: str, **settings: Any) -> Case:
    config = getattr(transformers, kind + "Config")(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32, **settings
    )
    model = getattr(transformers, kind + "Model")(config, add_pooling_layer=False)
    return model, (torch.ones(BATCH, LENGTH, dtype=torch.int64),), {}


def longformer() -> Case:
    return _text("Longformer", attention_window=LENGTH)


def detr() -> Case:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, layer_type="basic", out_features=["stage4"]
    )
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 16))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, backbone=None, use_pretrained_backbone=False, d_model=16,
        num_queries=4, **sizes, **heads,
    )  # fmt: skip
    return transformers.DetrModel(config), (torch.randn(BATCH, 3, 32, 32),), {}


def _series(kind: str, **settings: Any) -> Case:
    both = {"layers": 2, "attention_heads": 2, "ffn_dim": 16}
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in both.items()}
    config = getattr(transformers, kind + "Config")(
        prediction_length=PREDICTED, context_length=LENGTH, num_time_features=1, lags_sequence=[1], d_model=16,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, **sizes, **settings,
    )  # fmt: skip
    past = LENGTH + 1
    inputs = {
        "past_values": torch.randn(BATCH, past),
        "past_time_features": torch.randn(BATCH, past, 1),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.randn(BATCH, PREDICTED),
        "future_time_features": torch.randn(BATCH, PREDICTED, 1),
    }
    return getattr(transformers, kind + "Model")(config), (), inputs


@pytest.mark.parametrize(
    ("make", "line", "advice"),
    [
        (longformer, "modeling_longformer.py:", "`if is_global_attn:`"),
        (detr, "modeling_detr.py:", "branches on a tensor's value; use torch.where"),
        (lambda: _series("Autoformer"), "modeling_autoformer.py:", "keep it a tensor"),
    ],
)
def test_the_line_of_the_library_is_named_with_its_caller(
    make: Callable[[], Case], line: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Choice, "after", lambda self, error, final: final)  # no module is one op
    torch.manual_seed(0)
    model, args, kwargs = make()
    with pytest.raises(CaptureError) as caught:
        capture(Wrapper(model), args, kwargs)
    text = str(caught.value)
    assert text.startswith("transformers/models/")
    assert line in text
    assert f"(called by tests/compiler/frontend/test_source_errors.py:{CALL})" in text
    assert advice in text


def test_a_mask_that_does_not_fit_and_hides_nothing_is_left_out_as_in_training() -> None:
    """An Informer's layer shortens the sequence, and not the mask that transformers makes for exports."""
    model, args, kwargs = _series("Informer")
    before = transformers.masking_utils._ignore_bidirectional_mask_sdpa
    graph = capture(Wrapper(model), args, kwargs)
    assert check_capture(Wrapper(model), graph, args, kwargs, (), None) == ""
    assert transformers.masking_utils._ignore_bidirectional_mask_sdpa is before


def test_ops_of_a_wrapped_model_have_the_lines_of_the_model() -> None:
    model, args, kwargs = _text("Bert")
    lines = [node.meta["line"] for node in capture(Wrapper(model), args, kwargs).ops()]
    of_library = [line for line in lines if line.startswith("transformers/models/bert/modeling_bert.py:")]
    assert len(of_library) > 0.8 * len(lines)
    assert lines[-1] == f"tests/compiler/frontend/test_source_errors.py:{CALL}"


@pytest.mark.parametrize("folder", ["torch", "importlib", "einops"])
def test_a_folder_with_the_name_of_a_library_is_the_users(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    file = tmp_path / folder / "net.py"
    file.write_text("def forward(self, x):\n    return self.line(x).mean()\n")
    module = runpy.run_path(str(file))
    net = type("Net", (nn.Module,), {"forward": module["forward"]})()
    net.line = nn.Linear(4, 4)
    graph = capture(net, (torch.randn(2, 4),))
    assert {node.meta["line"] for node in graph.ops()} == {f"{file}:2"}


def test_tensor_lengths_of_ctc_are_the_cause() -> None:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 5)

        def forward(self, x: Tensor, y: Tensor, frames: Tensor, letters: Tensor) -> Tensor:
            y = y.flatten()  # of all samples in one row, which ``ir.ops.ctc`` leaves to PyTorch
            return F.ctc_loss(self.last(x).log_softmax(-1).transpose(0, 1), y, frames, letters)

    lengths = torch.full((BATCH,), LENGTH), torch.full((BATCH,), 3)
    inputs = torch.randn(BATCH, LENGTH, 3), torch.ones(BATCH, 3, dtype=torch.int64), *lengths
    with pytest.raises(CaptureError, match=r"test_source_errors.py:\d+: `return F\.ctc_loss.*lengths of `ctc_loss`"):
        capture(Speech(), inputs)


@pytest.mark.parametrize("training", [True, False])
def test_a_derivative_inside_forward_is_the_cause(training: bool) -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.body(x).sin().sum(), x, create_graph=True)
            return slope.square().mean()

    with pytest.raises(CaptureError, match=r"torch\.autograd\.grad.*takes a derivative by autograd.*torch\.func\.jvp"):
        capture(Penalty(), (torch.randn(BATCH, 3),), training=training)
