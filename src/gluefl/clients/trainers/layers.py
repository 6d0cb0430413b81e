"""A module whose layers have weights for many clients: one forward pass computes all of them.

A batch holds the samples of the first client, then those of the second, and so on. Operations on single
samples (activations, pooling, reshaping, sums) need no change; layers with weights are replaced by layers that apply
every client's weights to that client's samples. That is far faster than `vmap` on a GPU, which turns the
convolutions of many clients into one grouped convolution whose groups run one after the other.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _NormBase

from gluefl.vectors.layout import Layout, split

ALIGNED = 32  # every tensor of a stack starts at a multiple of so many entries: products load 16 bytes at a time


class Layer(nn.Module):
    """A layer whose weights (clients, …), views of a matrix, are set before every forward pass."""

    clients: int
    calls: int  # in this forward pass
    weight: Tensor
    slot: Tensor | None  # where the gradient of the weight belongs
    bias: Tensor | None

    def __init__(self, original: Any) -> None:
        super().__init__()
        self._original = [original]  # in a list: its parameters are not registered here
        self.bias = self.slot = None

    def place(self) -> Tensor | None:
        """Where to write the gradient of the weight: only for the first call, autograd adds those of further calls."""
        self.calls += 1
        return self.slot if self.calls == 1 else None

    @property
    def original(self) -> Any:
        """The layer it stands for: strides, momentum, …"""
        return self._original[0]

    def __getattr__(self, name: str) -> Any:  # a forward pass may read `in_features` and the like
        if name == "_original":
            raise AttributeError(name)
        return getattr(self._original[0], name)


class Linear(Layer):
    """As `nn.Linear`, one product for all clients."""

    def forward(self, x: Tensor) -> Tensor:
        """(clients · batch, …, in) → (clients · batch, …, out)."""
        rows = x.reshape(self.clients, -1, x.shape[-1])
        y = _product(rows, self.weight, self.bias, self.place())
        return y.reshape(*x.shape[:-1], y.shape[-1])


class Convolution(Layer):
    """As `nn.Conv2d`: a product for kernels of one pixel, a kernel of our own for others."""

    def forward(self, x: Tensor) -> Tensor:
        """(clients · batch, in, h, w) → (clients · batch, out, h', w'), channels last in memory."""
        from gluefl.accel.kernels.convolve import Convolve
        from gluefl.accel.kernels.depthwise import Depthwise

        original = self.original
        if original.kernel_size == (1, 1) and original.padding == (0, 0) and original.groups == 1:
            last = x.permute(0, 2, 3, 1)[:, :: original.stride[0], :: original.stride[1]]
            slot = self.place()
            slot = None if slot is None else slot.flatten(2)
            # No copy for strided rows, such as half of the channels: a product can read them.
            y = _product(last.reshape(self.clients, -1, last.shape[-1]), self.weight.flatten(2), self.bias, slot)
            return y.view(*last.shape[:-1], y.shape[-1]).permute(0, 3, 1, 2)
        x = _pixels(x, self.clients)
        size = original.stride[0], original.padding[0], original.dilation[0]
        if _by_tap(original):
            y = Convolve.apply(x, self.weight, *size, self.place())
        else:
            y = Depthwise.apply(x, self.weight, *size)
        return _picture(y if self.bias is None else y + self.bias[:, None, None, None])


class BatchNorm(Layer):
    """As `nn.BatchNorm1d` and `nn.BatchNorm2d` in training; the running statistics are updated in place."""

    running_mean: Tensor | None = None
    running_var: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Every client's samples are normalised separately."""
        from gluefl.accel.kernels import normalise

        self.calls += 1
        last = x.movedim(1, -1).contiguous()  # (clients · batch, …, c)
        rows = last.view(self.clients, -1, last.shape[-1])
        running = None if self.running_mean is None else (self.running_mean, self.running_var)
        y: Tensor = normalise.BatchNorm.apply(
            rows, self.weight, self.bias, running, self.original.momentum, self.original.eps
        )
        return y.view(last.shape).movedim(-1, 1)


class GroupNorm(Layer):
    """As `nn.GroupNorm`: normalises sample by sample, so that only scale and shift differ between clients."""

    def forward(self, x: Tensor) -> Tensor:
        """(clients · batch, c, …)."""
        unit = nn.functional.group_norm(x, self.original.num_groups, eps=self.original.eps)
        unit = unit.unflatten(0, (self.clients, -1))
        each = (self.clients, 1, -1, *[1] * (x.dim() - 2))
        assert self.bias is not None
        scaled: Tensor = unit * self.weight.reshape(each) + self.bias.reshape(each)
        return scaled.flatten(0, 1)


def _by_tap(layer: nn.Module) -> bool:
    """Whether the weights are stored as (kh, kw, out, in), so that a product reads contiguous memory."""
    return isinstance(layer, nn.Conv2d) and layer.groups == 1 and (layer.kernel_size, layer.padding) != ((1, 1), (0, 0))


def _is_plain_convolution(layer: nn.Conv2d) -> bool:
    square = all(len(set(pair)) == 1 for pair in (layer.stride, layer.dilation)) and isinstance(layer.padding, tuple)
    depthwise = layer.groups == layer.in_channels == layer.out_channels and layer.bias is None
    return (
        square and len(set(layer.padding)) == 1 and layer.padding_mode == "zeros" and (layer.groups == 1 or depthwise)
    )


LAYERS: dict[type[nn.Module], tuple[type[Layer], Callable[..., bool]]] = {
    nn.Linear: (Linear, lambda layer: True),
    nn.Conv2d: (Convolution, _is_plain_convolution),
    nn.BatchNorm1d: (BatchNorm, lambda layer: layer.affine and layer.momentum is not None),
    nn.BatchNorm2d: (BatchNorm, lambda layer: layer.affine and layer.momentum is not None),
    nn.GroupNorm: (GroupNorm, lambda layer: layer.affine),
}


class ManyClients:
    """A module for a stack of clients. `of` is None for a module that has other layers with weights."""

    def __init__(self, module: nn.Module, layers: dict[str, Layer], layout: Layout) -> None:
        self.module, self.layers, self.layout = module, layers, layout
        self.starts, self.shapes, width = list[int](), list[torch.Size](), 0
        order, back = [], torch.empty(layout.size, dtype=torch.long)
        for part in layout.weights:
            place = torch.arange(part.start, part.start + part.size).view(part.shape)
            if len(part.shape) == 4 and _by_tap(layers[part.name.rpartition(".")[0]].original):
                place = place.permute(2, 3, 0, 1)
            self.starts.append(width)
            self.shapes.append(place.shape)
            back[place.flatten()] = torch.arange(width, width + part.size)
            order += [place.flatten(), torch.zeros(-part.size % ALIGNED, dtype=torch.long)]
            width += part.size + len(order[-1])
        device = next(iter(layers.values())).original.weight.device
        self._raised: Tensor | None = None
        self.order = torch.cat(order).to(device)  # the stack's weights are vector[order], with gaps of arbitrary values
        self.back = back.to(device)
        unused = torch.ones(width, dtype=torch.bool)
        unused[back] = False
        self.gaps = unused.nonzero().squeeze(1).to(device)

    @classmethod
    def of(cls, module: nn.Module, layout: Layout) -> "ManyClients | None":
        """Replace the layers of a copy."""
        everything = dict(module.named_modules(remove_duplicate=False))
        owners = {name: m for name, m in everything.items() if [*m.parameters(False), *m.buffers(False)]}
        parameters = [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]
        if "" in owners or not all(_is_ours(m) for m in owners.values()):
            return None
        if any(isinstance(m, _NormBase) and name not in owners for name, m in everything.items()):
            return None  # it normalises over the batch, and without tensors it is not among the owners
        if len(set(map(id, owners.values()))) < len(owners) or len(set(map(id, parameters))) < len(parameters):
            return None
        if not all(parameter.requires_grad for parameter in parameters):
            return None
        many, layers = copy.deepcopy(module), dict[str, Layer]()
        for name in owners:
            parent, _, child = name.rpartition(".")
            original = many.get_submodule(name)
            layers[name] = LAYERS[type(original)][0](original)
            setattr(many.get_submodule(parent), child, layers[name])
            for tensor in original.parameters():  # a forward pass that uses the original by another reference gets NaN
                tensor.detach().fill_(torch.nan)
        return cls(many, layers, layout)

    def pieces(self, weights: Tensor) -> list[Tensor]:
        """The tensors in the rows of a stack, as views: (clients, …)."""
        places = zip(self.starts, self.shapes)
        return [weights[:, start : start + shape.numel()].unflatten(1, shape) for start, shape in places]

    def _count(self, statistics: Tensor) -> None:
        """Add one batch to all counters in one operation."""
        if self._raised is None:
            raised = torch.zeros(self.layout.tracked_size)
            for part in self.layout.statistics:
                owner, _, name = part.name.rpartition(".")
                if name == "num_batches_tracked":
                    raised[part.start] = self.layers[owner].calls
            self._raised = raised.to(statistics.device)
        statistics += self._raised.to(statistics.dtype)

    def __call__(self, pieces: Sequence[Tensor], statistics: Tensor, inputs: Tensor, slots: Sequence[Tensor]) -> Tensor:
        """Outputs (clients, batch, …) for inputs (clients · batch, …). The statistics are updated in place;
        gradients of large pieces are written into their slots."""
        clients = len(statistics)
        for part, tensor, slot in zip(self.layout.weights, pieces, slots):
            owner, _, name = part.name.rpartition(".")
            setattr(self.layers[owner], name, tensor)
            if name == "weight":
                self.layers[owner].slot = slot
        for name, tensor in split(self.layout.statistics, statistics):
            owner, _, buffer = name.rpartition(".")
            setattr(self.layers[owner], buffer, tensor)
        for layer in self.layers.values():
            layer.clients, layer.calls = clients, 0
        outputs: Tensor = self.module(inputs)
        if self.layout.statistics:
            self._count(statistics)
        for layer in self.layers.values():  # autograd keeps its own references
            for name in ("weight", "bias", "slot", "running_mean", "running_var", "num_batches_tracked"):
                vars(layer).pop(name, None)
        return outputs.reshape(clients, -1, *outputs.shape[1:])


class Product(torch.autograd.Function):
    """(clients, rows, in) times (clients, out, in). Autograd's own gradient of the weights would be transposed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, slot: Tensor | None) -> Tensor:
        """The layer."""
        ctx.save_for_backward(rows, weight)
        ctx.slot = slot
        return torch.bmm(rows, weight.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        """The gradients of its inputs."""
        rows, weight = ctx.saved_tensors
        back = torch.bmm(gradient, weight) if ctx.needs_input_grad[0] else None
        return back, torch.bmm(gradient.transpose(1, 2), rows, out=ctx.slot), None


def _is_ours(layer: nn.Module) -> bool:
    kind, plain = LAYERS.get(type(layer), (None, None))
    hooks = [*layer._forward_hooks, *layer._forward_pre_hooks, *layer._backward_hooks, *layer._backward_pre_hooks]
    return kind is not None and plain is not None and plain(layer) and layer.training and not hooks


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor | None) -> Tensor:
    product: Tensor = Product.apply(rows, weight, slot)
    return product if bias is None else product + bias.unsqueeze(1)


def _pixels(x: Tensor, clients: int) -> Tensor:
    """(clients · batch, c, h, w) → (clients, batch, h, w, c): a view where the channels lie last already."""
    last = x.permute(0, 2, 3, 1).contiguous()
    return last.view(clients, -1, *last.shape[1:])


def _picture(x: Tensor) -> Tensor:
    return x.flatten(0, 1).permute(0, 3, 1, 2)
