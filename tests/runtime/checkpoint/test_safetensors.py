"""Weights go to and from Hugging Face's files, under any plan."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.runtime.checkpoint.safetensors import header, write_safetensors

from tests.support.clusters import fast_links


def llama(tied: bool, seed: int = 5) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied, use_cache=False,
        )
    )  # fmt: skip


def through_ranks(source: str, run: str, tied: bool) -> float:
    """The loss of a model with other weights that takes those of ``source``; and a checkpoint."""
    model = llama(tied, seed=6)
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    parallel = mw.parallelize(
        model,
        fast_links(2),
        example_kwargs={"input_ids": tokens, "labels": tokens},
        state_dict=mw.open_safetensors(source),
        strategy="tp2" if tied else "pp2",
        microbatches=2,
    )
    parallel.save_checkpoint(run)
    return float(parallel.forward_backward(input_ids=tokens, labels=tokens))


@pytest.mark.ranks
@pytest.mark.parametrize("tied", [False, True])
def test_from_hugging_face_and_back(ranks: Any, tmp_path: Path, tied: bool) -> None:
    from transformers import LlamaForCausalLM

    model, run = llama(tied), str(tmp_path / "run")
    model.save_pretrained(tmp_path / "given", max_shard_size="20kB")
    assert (tmp_path / "given" / "model.safetensors.index.json").is_file()
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=tokens, labels=tokens).loss.item()
    for loss in ranks.run(2, through_ranks, str(tmp_path / "given"), run, tied):
        assert loss == pytest.approx(expected, rel=1e-6)
    for size in (20_000, 10**9):
        out = tmp_path / f"out-{size}"
        files = mw.export_safetensors(run, out, max_file_bytes=size)
        assert sorted(files) == sorted(out.iterdir())
        model.config.save_pretrained(out)
        again = LlamaForCausalLM.from_pretrained(out)
        for (name, x), (_, y) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
            assert torch.equal(x, y), name


def test_every_type_comes_back(tmp_path: Path) -> None:
    values = {
        "a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7), "c": torch.zeros(0, 3), "d": torch.tensor([True]),
        "e": torch.randn(3).bfloat16(), "f": torch.randn(2, dtype=torch.complex64),
    }  # fmt: skip
    entries = [(name, x.dtype, x.shape) for name, x in values.items()]
    (file,) = write_safetensors(tmp_path, entries, values.__getitem__, 10**9)
    for found in (mw.open_safetensors(file), mw.open_safetensors(tmp_path)):
        assert list(found) == list(values)
        assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in values.items())
    found["a"][0, 0] = 9.0
    assert mw.open_safetensors(file)["a"][0, 0] == 0.0


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read: .*No such file"):
        mw.open_safetensors(tmp_path)
    file, draw = tmp_path / "model.safetensors", random.Random(0)
    good = header([("w", torch.float32, (4, 4)), ("v", torch.float32, (2,))]) + bytes(72)
    refused = 0
    for case in range(400):
        data = bytearray(good)
        if case % 2:
            data = data[: draw.randrange(len(data))]
        else:
            data[draw.randrange(len(good) - 72)] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        try:
            mw.open_safetensors(file)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017 - some are still whole
            refused += 1
    assert refused > 300
    index = tmp_path / "model.safetensors.index.json"
    for text in ("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"w": 3}}', "[" * 10**5):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"index\.json: "):
            mw.open_safetensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match=r"names files beside it, but got '\.\./elsewhere"):
        mw.open_safetensors(tmp_path)
