"""Hand-written models of graphs, molecules, fields, tables, images and users."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from architectures.recurrent import model
from architectures.registry import BATCH, Case, images
from architectures.vision import classes

# ---- graphs


class GraphNet(nn.Module):
    """Graph convolutions on one graph: nodes [node, feature], edges [2, edge]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 8)])

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        degree = torch.zeros(x.shape[0], dtype=x.dtype).index_add(0, target, torch.ones_like(target, dtype=x.dtype))
        for k, layer in enumerate(self.layers):
            h = layer(x)
            if k % 2:
                sums = torch.zeros_like(h).scatter_add(0, target[:, None].expand(-1, h.shape[1]), h[source])
            else:
                sums = torch.zeros_like(h).index_add(0, target, h[source])
            x = h + sums / degree.clamp(min=1)[:, None]
            x = functional.relu(x) if k < 2 else x
        return functional.cross_entropy(x, labels)


@model("Graph convolution, one graph", "graph")
def _graph() -> Case:
    inputs = torch.randn(40, 16), torch.randint(0, 40, (2, 96)), torch.randint(0, 8, (40,))
    return Case(GraphNet(), inputs, batch_dims={f"args.{k}": None for k in range(3)}, global_batch=8)


class GraphBatch(nn.Module):
    """Graph convolutions on a batch of graphs that share their edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 8)])
        self.register_buffer("edges", torch.randint(0, 20, (2, 60)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = functional.relu(h + torch.zeros_like(h).index_add(1, self.edges[1], h[:, self.edges[0]]))
        return functional.cross_entropy(x.mean(1), labels)


@model("Graph convolution, batch of graphs", "graph")
def _graphs() -> Case:
    return Case(GraphBatch(), (torch.randn(BATCH, 20, 16), torch.randint(0, 8, (BATCH,))))


class GraphAttention(nn.Module):
    """Attention over the edges of a batch of graphs: a softmax by scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score, self.head = nn.Linear(16, 64), nn.Linear(128, 1), nn.Linear(64, 8)
        self.register_buffer("edges", torch.randint(0, 20, (2, 60)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.value(x)
        source, target = h[:, self.edges[0]], h[:, self.edges[1]]
        score = functional.leaky_relu(self.score(torch.cat([source, target], -1))).squeeze(-1).exp()
        place = self.edges[1].expand(x.shape[0], -1)
        total = torch.zeros(x.shape[0], 20, dtype=x.dtype).scatter_add(1, place, score)
        weight = score / total.gather(1, place)
        y = torch.zeros_like(h).index_add(1, self.edges[1], weight[..., None] * source)
        return functional.cross_entropy(self.head(functional.elu(y)).mean(1), labels)


@model("Graph attention", "graph")
def _graph_attention() -> Case:
    return Case(GraphAttention(), (torch.randn(BATCH, 20, 16), torch.randint(0, 8, (BATCH,))))


class Equivariant(nn.Module):
    """Messages between all atoms by distance, which also move the atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(33, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
        self.move, self.update = nn.Linear(32, 1), nn.Sequential(nn.Linear(48, 32), nn.SiLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 1)

    def forward(self, features: Tensor, places: Tensor, energy: Tensor) -> Tensor:
        for _ in range(2):
            n = places.shape[1]
            apart = places[:, :, None] - places[:, None]
            pairs = [features[:, :, None].expand(-1, -1, n, -1), features[:, None].expand(-1, n, -1, -1)]
            message = self.message(torch.cat([*pairs, torch.log1p(apart.square().sum(-1, keepdim=True))], -1))
            places = places + (apart * torch.tanh(self.move(message))).mean(2)
            features = features + self.update(torch.cat([features, message.sum(2)], -1))
        return functional.mse_loss(self.head(features).mean((1, 2)), energy)


@model("Equivariant graph network", "molecule")
def _equivariant() -> Case:
    return Case(Equivariant(), (torch.randn(BATCH, 12, 16), torch.randn(BATCH, 12, 3), torch.randn(BATCH)))


class Triangles(nn.Module):
    """One block of pair representations: triangle multiplication and triangle attention, as in the Evoformer."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.left, self.right, self.gate, self.out = (nn.Linear(width, width) for _ in range(4))
        self.qkv, self.bias, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, heads), nn.Linear(width, width)
        self.transition = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, z: Tensor) -> Tensor:
        x = self.norms[0](z)
        product = torch.einsum("bikc,bjkc->bijc", self.left(x), self.right(x))
        z = z + torch.sigmoid(self.gate(x)) * self.out(product)
        x = self.norms[1](z)
        query, key, value = self.qkv(x).view(*x.shape[:3], 3, self.heads, -1).unbind(3)
        scores = torch.einsum("bijhc,bikhc->bhijk", query, key) + self.bias(x).permute(0, 3, 1, 2)[:, :, None]
        z = z + self.mix(torch.einsum("bhijk,bikhc->bijhc", scores.softmax(-1), value).flatten(3))
        return z + self.transition(self.norms[2](z))


class Evoformer(nn.Module):
    """Pairs of residues from a sequence, two triangle blocks, and a distance histogram."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rows, self.columns, self.head = (nn.Embedding(20, width), nn.Embedding(20, width), nn.Linear(width, 8))
        self.blocks = nn.ModuleList(Triangles(width) for _ in range(2))

    def forward(self, residues: Tensor, distances: Tensor) -> Tensor:
        z = self.rows(residues)[:, :, None] + self.columns(residues)[:, None]
        for block in self.blocks:
            z = block(z)
        return functional.cross_entropy(self.head(z + z.transpose(1, 2)).flatten(0, 2), distances.flatten())


@model("Evoformer pairs", "molecule")
def _evoformer() -> Case:
    return Case(Evoformer(), (torch.randint(0, 20, (BATCH, 12)), torch.randint(0, 8, (BATCH, 12, 12))))


# ---- users and tables


class Recommender(nn.Module):
    """Bags of embeddings, a bottom and a top net, and the products of all pairs, as in DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(256, 16, mode="sum") for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 10, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.tril_indices(5, 5, -1), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x] + [table(sparse[:, k]) for k, table in enumerate(self.tables)], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        y = self.top(torch.cat([x, products], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(y, clicked)


@model("DLRM", "recommender")
def _recommender() -> Case:
    inputs = torch.randn(BATCH, 13), torch.randint(0, 256, (BATCH, 4, 3)), torch.rand(BATCH).round()
    return Case(Recommender(), inputs)


class CrossNetwork(nn.Module):
    """Explicit crosses of features beside a deep net."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 8)
        self.cross = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 32))
        self.head = nn.Linear(80, 1)

    def forward(self, sparse: Tensor, clicked: Tensor) -> Tensor:
        first = x = self.table(sparse).flatten(1)
        for layer in self.cross:
            x = first * layer(x) + x
        y = self.head(torch.cat([x, self.deep(first)], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(y, clicked)


@model("Deep and cross network", "recommender")
def _cross() -> Case:
    return Case(CrossNetwork(), (torch.randint(0, 512, (BATCH, 6)), torch.rand(BATCH).round()))


class TwoTowers(nn.Module):
    """Users and items, against all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (nn.Sequential(nn.Linear(n, 64), nn.GELU(), nn.Linear(64, 32)) for n in (24, 40))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        p, q = functional.normalize(self.users(users), dim=-1), functional.normalize(self.items(items), dim=-1)
        scores, own = p @ q.T * self.scale.exp(), torch.arange(users.shape[0])
        return (functional.cross_entropy(scores, own) + functional.cross_entropy(scores.T, own)) / 2


@model("Two towers, negatives in the batch", "recommender")
def _towers() -> Case:
    return Case(TwoTowers(), (torch.randn(BATCH, 24), torch.randn(BATCH, 40)))


class Triplets(nn.Module):
    """One encoder for anchors, likes and unlikes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 32))

    def forward(self, anchor: Tensor, like: Tensor, unlike: Tensor) -> Tensor:
        return functional.triplet_margin_loss(*(self.encoder(x) for x in (anchor, like, unlike)))


@model("Triplets", "vision")
def _triplets() -> Case:
    return Case(Triplets(), (images(16), images(16), images(16)))


# ---- fields and equations


class FourierOperator(nn.Module):
    """A Fourier neural operator: products of spectra with complex weights."""

    def __init__(self, real: bool) -> None:
        super().__init__()
        self.real, self.first, self.last = real, nn.Linear(3, 32), nn.Linear(32, 1)
        weights = [torch.randn(32, 32, 9, 2) / 32 for _ in range(2)]
        self.weights = nn.ParameterList(nn.Parameter(w if real else torch.view_as_complex(w)) for w in weights)
        self.local = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for weight, local in zip(self.weights, self.local):
            spectrum = torch.fft.rfft(x, dim=1, norm="ortho")
            product = torch.einsum("bki,iok->bko", spectrum, torch.view_as_complex(weight) if self.real else weight)
            x = functional.gelu(torch.fft.irfft(product, n=16, dim=1, norm="ortho") + local(x))
        return functional.mse_loss(self.last(x), y)


@model("Fourier operator, complex weights", "field")
def _fourier() -> Case:
    return Case(FourierOperator(False), (torch.randn(BATCH, 16, 3), torch.randn(BATCH, 16, 1)))


@model("Fourier operator, real weights", "field")
def _fourier_real() -> Case:
    return Case(FourierOperator(True), (torch.randn(BATCH, 16, 3), torch.randn(BATCH, 16, 1)))


class PhysicsInformed(nn.Module):
    """The residual of a heat equation, by derivatives of the net by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        u = self.net(x)
        slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        curve = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)[0][:, 0]
        return ((slope[:, 1] - 0.1 * curve) ** 2).mean() + u.square().mean()


@model("Physics-informed net (autograd.grad)", "field")
def _physics() -> Case:
    return Case(PhysicsInformed(), (torch.randn(4 * BATCH, 2),))


class RadianceField(nn.Module):
    """Colours along rays: encoded positions, a net with a skip, and alpha compositing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(39, 64), nn.Linear(64 + 39, 64), nn.Linear(64, 4)

    def forward(self, points: Tensor, colour: Tensor) -> Tensor:
        angles = [points * 2.0**k for k in range(6)]
        x = torch.cat([points, *(f(a) for a in angles for f in (torch.sin, torch.cos))], -1)
        h = functional.relu(self.first(x))
        h = functional.relu(self.second(torch.cat([h, x], -1)))
        rgb, density = self.head(h).split([3, 1], -1)
        alpha = 1 - torch.exp(-functional.softplus(density))
        seen = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
        return functional.mse_loss((seen * alpha * torch.sigmoid(rgb)).sum(1), colour)


@model("Radiance field", "field")
def _radiance() -> Case:
    return Case(RadianceField(), (torch.randn(BATCH, 16, 3), torch.rand(BATCH, 3)))


class NeuralEquation(nn.Module):
    """A differential equation whose right side is a net, by four Runge-Kutta steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 16)), nn.Linear(16, 4)

    def slope(self, t: float, y: Tensor) -> Tensor:
        return self.net(torch.cat([y, torch.full_like(y[:, :1], t)], 1))

    def forward(self, y: Tensor, labels: Tensor) -> Tensor:
        step = 0.25
        for k in range(4):
            t = k * step
            first = self.slope(t, y)
            second = self.slope(t + step / 2, y + step / 2 * first)
            third = self.slope(t + step / 2, y + step / 2 * second)
            fourth = self.slope(t + step, y + step * third)
            y = y + step / 6 * (first + 2 * second + 2 * third + fourth)
        return functional.cross_entropy(self.head(y), labels)


@model("Neural differential equation", "field")
def _equation() -> Case:
    return Case(NeuralEquation(), (torch.randn(BATCH, 16), torch.randint(0, 4, (BATCH,))))


# ---- densities


class Coupling(nn.Module):
    """A normalizing flow of affine couplings."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(x.shape[0])
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            x, volume = torch.cat([b * torch.exp(torch.tanh(scale)) + shift, a], 1), volume + torch.tanh(scale).sum(1)
        return (0.5 * x.square().sum(1) - volume).mean()


@model("Normalizing flow", "density")
def _flow() -> Case:
    return Case(Coupling(), (torch.randn(BATCH, 16),))


class Quantizer(nn.Module):
    """A vector-quantized autoencoder: the nearest code, passed straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)), nn.Linear(8, 16)
        self.codes = nn.Embedding(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        distance = torch.cdist(z.detach().flatten(0, 1), self.codes.weight.detach())
        q = self.codes(distance.argmin(1).view(z.shape[:-1]))
        loss = functional.mse_loss(self.decoder(z + (q - z).detach()), x)
        return loss + functional.mse_loss(q, z.detach()) + 0.25 * functional.mse_loss(z, q.detach())


@model("Vector-quantized autoencoder", "density")
def _quantizer() -> Case:
    return Case(Quantizer(), (torch.randn(BATCH, 8, 16),))


class Variational(nn.Module):
    """A variational autoencoder whose noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 32), nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        y = self.decoder(mean + torch.exp(0.5 * log_variance) * noise)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return functional.mse_loss(y, x) + 0.01 * divergence


@model("Variational autoencoder", "density")
def _variational() -> Case:
    return Case(Variational(), (torch.randn(BATCH, 64), torch.randn(BATCH, 16)))


class DrawnVariational(Variational):
    """A variational autoencoder that draws its noise in forward."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, torch.randn_like(x[:, :16]))


@model("Variational autoencoder (randn_like)", "density")
def _drawn() -> Case:
    return Case(DrawnVariational(), (torch.randn(BATCH, 64),))


# ---- images and points


class Normalized(nn.Module):
    """Spectral, instance, group and weight norm, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Conv2d(3, 16, 3, padding=1))
        self.instance, self.group = nn.InstanceNorm2d(16, affine=True), nn.GroupNorm(4, 16)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 4, 2, 1), parametrizations.weight_norm(nn.Linear(8, 10))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.group(functional.leaky_relu(self.instance(self.first(x))))
        return functional.cross_entropy(self.head(functional.relu(self.up(x)).mean((2, 3))), labels)


@model("Spectral, weight and instance norm", "vision")
def _norms() -> Case:
    return Case(Normalized(), (images(16), classes()))


class UNet(nn.Module):
    """Down, up, and skips between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.stage(3, 16), self.stage(16, 32)])
        self.middle, self.up = self.stage(32, 64), nn.ModuleList([self.stage(96, 32), self.stage(48, 16)])
        self.head = nn.Conv2d(16, 5, 1)

    @staticmethod
    def stage(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        skips = []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for stage in self.up:
            x = functional.interpolate(x, scale_factor=2, mode="bilinear")
            x = stage(torch.cat([x, skips.pop()], 1))
        return functional.cross_entropy(self.head(x), labels)


@model("U-Net", "segmentation")
def _unet() -> Case:
    return Case(UNet(), (images(16), torch.randint(0, 5, (BATCH, 16, 16))))


class SpatialTransformer(nn.Module):
    """An image resampled by a learned affine map."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 32), nn.ReLU(), nn.Linear(32, 6))
        self.head = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        theta = self.locate(x).view(-1, 2, 3) * 0.1 + torch.eye(2, 3)
        grid = functional.affine_grid(theta, [x.shape[0], 3, 16, 16], align_corners=False)
        return functional.cross_entropy(self.head(functional.grid_sample(x, grid, align_corners=False)), labels)


@model("Spatial transformer", "vision")
def _spatial() -> Case:
    return Case(SpatialTransformer(), (images(16), classes()))


class PointNet(nn.Module):
    """Points, a learned rotation, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 9))
        self.points, self.head = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64)), nn.Linear(64, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        turn = self.turn(x).amax(1).view(-1, 3, 3) + torch.eye(3)
        return functional.cross_entropy(self.head(self.points(x @ turn).amax(1)), labels)


@model("PointNet", "points")
def _points() -> Case:
    return Case(PointNet(), (torch.randn(BATCH, 24, 3), classes()))


class HyperNetwork(nn.Module):
    """A net whose weights another net makes for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.head = nn.Linear(8, 16 * 32), nn.Linear(32, 4)

    def forward(self, task: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        weight = self.maker(task).view(-1, 16, 32)
        return functional.cross_entropy(self.head(torch.bmm(x[:, None], weight).squeeze(1).relu()), labels)


@model("Hypernetwork", "adaptive")
def _hyper() -> Case:
    return Case(HyperNetwork(), (torch.randn(BATCH, 8), torch.randn(BATCH, 16), torch.randint(0, 4, (BATCH,))))


class Capsules(nn.Module):
    """Capsules with three rounds of routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.weight = nn.Conv2d(3, 32, 5, 4), nn.Parameter(torch.randn(36, 10, 8, 8) / 8)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        norm = x.square().sum(-1, keepdim=True)
        return x * norm / ((1 + norm) * (norm + 1e-6).sqrt())

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.squash(self.convolution(x).flatten(1).view(x.shape[0], 36, 8))
        votes = torch.einsum("bid,iodk->biok", x, self.weight)
        routes = torch.zeros(x.shape[0], 36, 10, dtype=x.dtype)
        for _ in range(3):
            out = self.squash(torch.einsum("bio,biok->bok", routes.softmax(-1), votes))
            routes = routes + torch.einsum("biok,bok->bio", votes, out)
        return functional.cross_entropy(10 * out.norm(dim=-1), labels)


@model("Capsules", "vision")
def _capsules() -> Case:
    return Case(Capsules(), (images(16), classes()))
