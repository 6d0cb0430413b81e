"""A module whose layers have weights for many clients: one forward pass computes all of them.

A batch holds the samples of the first client, then those of the second, and so on. What works on every sample by
itself (activations, pooling, reshaping, adding up) needs no change; the layers with weights are exchanged for ones
that give every client's samples to that client's weights. That is far faster than `vmap` on a GPU, where vmap turns
the convolutions of many clients into one grouped convolution whose groups run one after the other.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _NormBase

from gluefl.vectors.layout import Layout, split

ALIGNED = 32  # every tensor of a stack starts at a multiple of so many numbers: products read 16 bytes at a time


class Layer(nn.Module):
    """Has its own weights of every client put in place before a forward pass: (clients, …), views of a matrix."""

    clients: int
    calls: int  # since the forward pass began
    weight: Tensor
    slot: Tensor | None  # where the gradient of the weight belongs
    bias: Tensor | None

    def __init__(self, original: Any) -> None:
        super().__init__()
        self._original = [original]  # in a list: its own weights are not this layer's
        self.bias = self.slot = None

    def place(self) -> Tensor | None:
        """Where to write the gradient of the weight: only the first call may, further ones are added to it."""
        self.calls += 1
        return self.slot if self.calls == 1 else None

    @property
    def how(self) -> Any:
        """The layer it stands for: strides, momentum, …"""
        return self._original[0]

    def __getattr__(self, name: str) -> Any:  # a forward pass may ask for `in_features` and the like
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
    """As `nn.Conv2d`: a product where the kernel is one pixel, a kernel of our own elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        """(clients · batch, in, h, w) → (clients · batch, out, h', w'), channels last in memory."""
        from gluefl.accel.kernels.convolve import Convolve
        from gluefl.accel.kernels.depthwise import Depthwise

        how = self.how
        if how.kernel_size == (1, 1) and how.padding == (0, 0) and how.groups == 1:
            last = x.permute(0, 2, 3, 1)[:, :: how.stride[0], :: how.stride[1]]
            slot = self.place()
            slot = None if slot is None else slot.flatten(2)
            # Not copied where rows lie apart from each other, as half of the channels do: a product can read that.
            y = _product(last.reshape(self.clients, -1, last.shape[-1]), self.weight.flatten(2), self.bias, slot)
            return y.view(*last.shape[:-1], y.shape[-1]).permute(0, 3, 1, 2)
        x = _pixels(x, self.clients)
        size = how.stride[0], how.padding[0], how.dilation[0]
        if _by_tap(how):
            y = Convolve.apply(x, self.weight, *size, self.place())
        else:
            y = Depthwise.apply(x, self.weight, *size)
        return _picture(y if self.bias is None else y + self.bias[:, None, None, None])


class BatchNorm(Layer):
    """As `nn.BatchNorm1d` and `nn.BatchNorm2d` in training; the running statistics are moved in place."""

    running_mean: Tensor | None = None
    running_var: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Every client's samples are normalised by themselves."""
        from gluefl.accel.kernels import normalise

        self.calls += 1
        last = x.movedim(1, -1).contiguous()  # (clients · batch, …, c)
        rows = last.view(self.clients, -1, last.shape[-1])
        running = None if self.running_mean is None else (self.running_mean, self.running_var)
        y: Tensor = normalise.BatchNorm.apply(rows, self.weight, self.bias, running, self.how.momentum, self.how.eps)
        return y.view(last.shape).movedim(-1, 1)


class GroupNorm(Layer):
    """As `nn.GroupNorm`: normalises sample by sample, so that only scale and shift differ between clients."""

    def forward(self, x: Tensor) -> Tensor:
        """(clients · batch, c, …)."""
        unit = nn.functional.group_norm(x, self.how.num_groups, eps=self.how.eps)
        unit = unit.unflatten(0, (self.clients, -1))
        each = (self.clients, 1, -1, *[1] * (x.dim() - 2))
        assert self.bias is not None
        scaled: Tensor = unit * self.weight.reshape(each) + self.bias.reshape(each)
        return scaled.flatten(0, 1)


def _by_tap(how: nn.Module) -> bool:
    """Whether a layer's weights are kept as (kh, kw, out, in): what a product reads side by side lies side by side."""
    return isinstance(how, nn.Conv2d) and how.groups == 1 and (how.kernel_size, how.padding) != ((1, 1), (0, 0))


def _is_plain_convolution(how: nn.Conv2d) -> bool:
    alike = all(len(set(pair)) == 1 for pair in (how.stride, how.dilation)) and isinstance(how.padding, tuple)
    depthwise = how.groups == how.in_channels == how.out_channels and how.bias is None
    return alike and len(set(how.padding)) == 1 and how.padding_mode == "zeros" and (how.groups == 1 or depthwise)


LAYERS: dict[type[nn.Module], tuple[type[Layer], Callable[..., bool]]] = {
    nn.Linear: (Linear, lambda how: True),
    nn.Conv2d: (Convolution, _is_plain_convolution),
    nn.BatchNorm1d: (BatchNorm, lambda how: how.affine and how.momentum is not None),
    nn.BatchNorm2d: (BatchNorm, lambda how: how.affine and how.momentum is not None),
    nn.GroupNorm: (GroupNorm, lambda how: how.affine),
}


class ManyClients:
    """A module for a stack of clients. `of` is None for a module that has other layers with weights."""

    def __init__(self, module: nn.Module, layers: dict[str, Layer], layout: Layout) -> None:
        self.module, self.layers, self.layout = module, layers, layout
        self.starts, self.shapes, width = list[int](), list[torch.Size](), 0
        order, back = [], torch.empty(layout.size, dtype=torch.long)
        for part in layout.weights:
            place = torch.arange(part.start, part.start + part.size).view(part.shape)
            if len(part.shape) == 4 and _by_tap(layers[part.name.rpartition(".")[0]].how):
                place = place.permute(2, 3, 0, 1)
            self.starts.append(width)
            self.shapes.append(place.shape)
            back[place.flatten()] = torch.arange(width, width + part.size)
            order += [place.flatten(), torch.zeros(-part.size % ALIGNED, dtype=torch.long)]
            width += part.size + len(order[-1])
        device = next(iter(layers.values())).how.weight.device
        self._raised: Tensor | None = None
        self.order = torch.cat(order).to(device)  # the stack's weights are vector[order], with gaps that mean nothing
        self.back = back.to(device)
        unused = torch.ones(width, dtype=torch.bool)
        unused[back] = False
        self.gaps = unused.nonzero().squeeze(1).to(device)

    @classmethod
    def of(cls, module: nn.Module, layout: Layout) -> "ManyClients | None":
        """Exchange the layers of a copy."""
        everything = dict(module.named_modules(remove_duplicate=False))
        owners = {name: m for name, m in everything.items() if [*m.parameters(False), *m.buffers(False)]}
        parameters = [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]
        if "" in owners or not all(_is_ours(m) for m in owners.values()):
            return None
        if any(isinstance(m, _NormBase) and name not in owners for name, m in everything.items()):
            return None  # it normalises over the batch, and has nothing by which it would be exchanged
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
            for tensor in original.parameters():  # whoever reaches it another way than by its name shall notice
                tensor.detach().fill_(torch.nan)
        return cls(many, layers, layout)

    def pieces(self, weights: Tensor) -> list[Tensor]:
        """The tensors in the rows of a stack, as views: (clients, …)."""
        places = zip(self.starts, self.shapes)
        return [weights[:, start : start + shape.numel()].unflatten(1, shape) for start, shape in places]

    def _count(self, statistics: Tensor) -> None:
        """Raise the counters of batches, all in one go."""
        if self._raised is None:
            raised = torch.zeros(self.layout.statistics_size)
            for part in self.layout.statistics:
                owner, _, name = part.name.rpartition(".")
                if name == "num_batches_tracked":
                    raised[part.start] = self.layers[owner].calls
            self._raised = raised.to(statistics.device)
        statistics += self._raised.to(statistics.dtype)

    def __call__(self, pieces: Sequence[Tensor], statistics: Tensor, inputs: Tensor, slots: Sequence[Tensor]) -> Tensor:
        """Outputs (clients, batch, …) for inputs (clients · batch, …). The statistics are moved in place; gradients
        of the pieces that are large are written into their slots."""
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
        for layer in self.layers.values():  # what autograd needs of them it keeps itself
            for name in ("weight", "bias", "slot", "running_mean", "running_var", "num_batches_tracked"):
                vars(layer).pop(name, None)
        return outputs.reshape(clients, -1, *outputs.shape[1:])


class Product(torch.autograd.Function):
    """(clients, rows, in) times (clients, out, in). Autograd's own gradient of the weights lies transposed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, slot: Tensor | None) -> Tensor:
        """The layer."""
        ctx.save_for_backward(rows, weight)
        ctx.slot = slot
        return torch.bmm(rows, weight.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        """The gradients of what it was given."""
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
