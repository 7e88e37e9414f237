"""Hand-written models of sequences: recurrent nets, state spaces, and transformers with unusual parts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from architectures.registry import BATCH, VOCABULARY, Case, register, tokens

LENGTH, WIDTH, HEADS = 16, 64, 4


def model(name: str, kind: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register a hand-written model."""
    return register(name, kind, "handwritten")


class LanguageModel(nn.Module):
    """Embedding, a body on [batch, time, width], and a head; forward gives the loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(VOCABULARY, WIDTH), body, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of the next words."""
        return functional.cross_entropy(self.head(self.body(self.embedding(words))).flatten(0, 1), labels.flatten())


def language(body: nn.Module) -> Case:
    """A body as a language model."""
    return Case(LanguageModel(body), (tokens(LENGTH), tokens(LENGTH)))


class Recurrent(nn.Module):
    """A recurrent net of torch.nn, without its state."""

    def __init__(self, kind: str, layers: int = 2) -> None:
        super().__init__()
        self.net = getattr(nn, kind)(WIDTH, WIDTH, num_layers=layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0]


@model("LSTM language model", "recurrent")
def _lstm() -> Case:
    return language(Recurrent("LSTM"))


@model("GRU language model", "recurrent")
def _gru() -> Case:
    return language(Recurrent("GRU"))


@model("Elman network", "recurrent")
def _elman() -> Case:
    return language(Recurrent("RNN"))


class CellLoop(nn.Module):
    """An LSTM cell, stepped in Python, that attends over its own past."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.mix = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[0], WIDTH)
        past: list[Tensor] = []
        for step in range(x.shape[1]):
            hidden, cell = self.cell(x[:, step], (hidden, cell))
            past.append(hidden)
            memory = torch.stack(past, 1)
            weights = torch.softmax((memory @ hidden[:, :, None]) / math.sqrt(WIDTH), 1)
            hidden = torch.tanh(self.mix(torch.cat([hidden, (weights * memory).sum(1)], -1)))
        return torch.stack(past, 1)


@model("LSTM cell with attention (loop)", "recurrent")
def _cell() -> Case:
    return language(CellLoop())


class SpeechRecognizer(nn.Module):
    """Convolution, bidirectional LSTM, and connectionist temporal classification."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 32, 3, padding=1)
        self.net, self.head = nn.LSTM(32, 32, bidirectional=True, batch_first=True), nn.Linear(64, 12)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        features, _ = self.net(functional.relu(self.convolution(x)).transpose(1, 2))
        scores = functional.log_softmax(self.head(features), -1).transpose(0, 1)
        lengths = torch.full((x.shape[0],), 24), torch.full((x.shape[0],), 5)
        return functional.ctc_loss(scores, labels, *lengths)


@model("Bidirectional LSTM with CTC", "speech")
def _ctc() -> Case:
    return Case(SpeechRecognizer(), (torch.randn(BATCH, 8, 24), torch.randint(1, 12, (BATCH, 5))))


class SelectiveScan(nn.Module):
    """A selective state space, scanned step by step."""

    def __init__(self, states: int = 8) -> None:
        super().__init__()
        self.rate, self.project = nn.Parameter(torch.rand(WIDTH, states)), nn.Linear(WIDTH, WIDTH + 2 * states)
        self.states = states

    def forward(self, x: Tensor) -> Tensor:
        step, write, read = self.project(x).split([WIDTH, self.states, self.states], -1)
        step = functional.softplus(step)
        state, out = x.new_zeros(x.shape[0], WIDTH, self.states), []
        for t in range(x.shape[1]):
            decay = torch.exp(-step[:, t, :, None] * self.rate)
            state = decay * state + (step[:, t] * x[:, t])[:, :, None] * write[:, t, None]
            out.append((state * read[:, t, None]).sum(-1))
        return torch.stack(out, 1) + x


@model("Selective state space (loop)", "state space")
def _scan() -> Case:
    return language(SelectiveScan())


class Block(nn.Module):
    """A transformer block around a way to mix tokens."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.mixer = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), mixer
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.first(x))
        return x + self.down(functional.gelu(self.up(self.second(x))))


def blocks(mixer: Callable[[], nn.Module]) -> Case:
    """Two blocks as a language model."""
    return language(nn.Sequential(Block(mixer()), Block(mixer())))


class ComplexRotary(nn.Module):
    """Attention whose positions are complex rotations, as in the reference code of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(LENGTH).float(), 100.0 ** (-torch.arange(0, 16, 2).float() / 16))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[None, :, None]).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[0], x.shape[1], HEADS, WIDTH // HEADS
        query, key = self.turn(self.query(x).view(shape)), self.turn(self.key(x).view(shape))
        value = self.value(x).view(shape)
        y = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


@model("Llama with complex rotations", "decoder")
def _complex() -> Case:
    return blocks(ComplexRotary)


class LinearAttention(nn.Module):
    """Causal attention without softmax, by cumulative sums."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).unbind(2)
        query, key = functional.elu(query) + 1, functional.elu(key) + 1
        memory = torch.einsum("bthk,bthv->bthkv", key, value).cumsum(1)
        y = torch.einsum("bthk,bthkv->bthv", query, memory)
        return self.out((y / torch.einsum("bthk,bthk->bth", query, key.cumsum(1))[..., None]).flatten(2))


@model("Linear attention (cumulative sums)", "linear attention")
def _linear() -> Case:
    return blocks(LinearAttention)


class Retention(nn.Module):
    """Attention with exponential decay in place of softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.GroupNorm(HEADS, WIDTH)
        distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]
        decay = 1 - 2.0 ** (-5 - torch.arange(HEADS))
        self.register_buffer("decay", (decay[:, None, None] ** distance.clamp(min=0)) * (distance >= 0))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = ((query @ key.mT) * self.decay @ value).transpose(1, 2).flatten(2)
        return self.out(self.norm(y.flatten(0, 1)).view_as(x))


@model("Retention", "linear attention")
def _retention() -> Case:
    return blocks(Retention)


class LongConvolution(nn.Module):
    """A gated convolution as long as the sequence, by Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kernel = nn.Parameter(torch.randn(WIDTH, LENGTH) / LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gates(x).chunk(2, -1)
        spectrum = torch.fft.rfft(value.mT, n=2 * LENGTH) * torch.fft.rfft(self.kernel, n=2 * LENGTH)
        return self.out(torch.fft.irfft(spectrum, n=2 * LENGTH)[..., :LENGTH].mT * torch.sigmoid(gate))


@model("Long convolution (Hyena)", "convolution")
def _hyena() -> Case:
    return blocks(LongConvolution)


class RelativeAttention(nn.Module):
    """Attention of nn.MultiheadAttention under a causal mask with linear biases."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        distance = torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]
        self.register_buffer("mask", (0.1 * distance).masked_fill(distance > 0, float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]


@model("nn.MultiheadAttention with a mask", "decoder")
def _multihead() -> Case:
    return blocks(RelativeAttention)


@model("nn.TransformerEncoder", "encoder")
def _transformer() -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    return language(nn.TransformerEncoder(layer, 2))


class Experts(nn.Module):
    """The two best of four experts for each token, by a weighted sum over all."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype).scatter(-1, chosen, scores)
        hidden = functional.silu(torch.einsum("bth,ehf->btef", x, self.up))
        return torch.einsum("btef,efh,bte->bth", hidden, self.down, weights)


@model("Experts by weighted sum", "mixture of experts")
def _experts() -> Case:
    return blocks(Experts)


class DilatedConvolutions(nn.Module):
    """Causal convolutions whose reach doubles, with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**k) for k in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT
        for k, layer in enumerate(self.layers):
            x = x + functional.glu(layer(functional.pad(x, (2**k, 0))), 1)
        return x.mT


@model("WaveNet", "convolution")
def _wavenet() -> Case:
    return language(DilatedConvolutions())


class Shift(nn.Module):
    """Tokens mixed with the one before, by an assignment to a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.now = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, 1:] = self.before(x[:, :-1])
        return y + self.now(x)


@model("Assignment to a slice", "decoder")
def _shift() -> Case:
    return blocks(Shift)


class Windows(nn.Module):
    """Attention of each token over a window before it, by ``unfold``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        key, value = (functional.pad(t, (0, 0, 3, 0)).unfold(1, 4, 1) for t in (key, value))
        weights = torch.softmax(torch.einsum("bth,bthw->btw", query, key) / math.sqrt(WIDTH), -1)
        return self.out(torch.einsum("btw,bthw->bth", weights, value))


@model("Windowed attention (unfold)", "decoder")
def _windows() -> Case:
    return blocks(Windows)


class TiedTranslator(nn.Module):
    """nn.Transformer from sources to targets with one embedding for both and for the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.net = nn.Transformer(WIDTH, HEADS, 1, 1, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu(1), persistent=False)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        y = self.net(self.embedding(source), self.embedding(target), tgt_mask=self.mask)
        return functional.cross_entropy((y @ self.embedding.weight.T).flatten(0, 1), labels.flatten())


@model("nn.Transformer, tied", "encoder-decoder")
def _translator() -> Case:
    return Case(TiedTranslator(), (tokens(LENGTH), tokens(LENGTH), tokens(LENGTH)))
