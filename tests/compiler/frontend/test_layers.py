"""Layers of deep models: which neighbours are joined."""

from collections import Counter

import pytest
import torch
from meshwright.compiler.frontend.capture import capture
from meshwright.compiler.frontend.layers import _merge_light_segments, cluster_layers
from meshwright.models.architectures import GPT


@pytest.fixture(scope="module")
def deep():
    with torch.device("meta"):
        return capture(GPT(64, 12, 32, 4, 16), (torch.zeros(2, 16, dtype=torch.int64),) * 2)


def test_half_blocks_join_before_an_embedding_joins_the_first(deep):
    whole = cluster_layers(deep)
    assert len(whole.layers) > 20
    layers = cluster_layers(deep, max_layers=20).layers
    assert len(layers) <= 20
    assert sorted(Counter(one.class_key for one in layers).values())[-1] == 12
    assert layers[0].flops == 0.0
    assert [name for one in layers for name in one.ops] == [name for one in whole.layers for name in one.ops]


def test_one_too_many_joins_the_lightest_pair(deep):
    whole = cluster_layers(deep).layers
    layers = cluster_layers(deep, max_layers=len(whole) - 1).layers
    assert len(layers) == len(whole) - 1
    assert layers[0].ops == (*whole[0].ops, *whole[1].ops)


def test_pairs_of_which_there_are_enough_come_first_and_else_the_lightest():
    weights = [1.0, 8.0, 1.0, 1.0, 8.0, 2.0, 1.0]
    # three pairs weigh 9, but two of them share the 8; so the lightest pair joins, and then two of weight 10 are enough
    assert _merge_light_segments(list(range(8)), weights, 4) == [0, 1, 4, 6, 7]
    assert _merge_light_segments(list(range(8)), weights, 5) == [0, 2, 3, 5, 6, 7]
    assert _merge_light_segments(list(range(8)), weights, 6) == [0, 1, 2, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def frozen():
    """Embeddings that are not trained before equal blocks that are."""
    with torch.device("meta"):
        model = GPT(64, 6, 32, 4, 16)
        for embedding in (model.token_embedding, model.position_embedding):
            embedding.requires_grad_(False)
        return capture(model, (torch.zeros(2, 16, dtype=torch.int64),) * 2)


def test_a_layer_that_no_gradient_leaves_is_a_class_of_its_own(frozen):
    layers = cluster_layers(frozen).layers
    first, *others = (layer.class_key for layer in layers if layer.name.endswith("attention"))
    assert len(set(others)) == 1
    assert first not in others
