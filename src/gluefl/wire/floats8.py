"""Statistics in uploads: eight bits each, with one exponent per tensor."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gluefl.accel import kernels
from gluefl.errors import WireError
from gluefl.vectors.grid import Segments, two_to

LARGEST = 448.0  # of the format E4M3: four exponent bits, three mantissa bits
LEAST_EXPONENT, MOST_EXPONENT = -120, 110  # of a tensor's scale
NAN_BITS = 0x7F


def rounded(values: Tensor, segments: Segments) -> Tensor:
    """The nearest values that these bytes can hold; what is not finite stays so."""
    if kernels.serve(values) and values.dtype == torch.float32:
        from gluefl.accel.kernels.small import round_tensors

        return round_tensors(values, segments.bounds, LARGEST, LEAST_EXPONENT, MOST_EXPONENT)
    scales = segments.spread(two_to(_exponents(values, segments)))
    coded = (values / scales).to(torch.float8_e4m3fn).to(torch.float32) * scales
    return torch.where(torch.isfinite(values), coded, values)


@dataclass(frozen=True)
class Floats8:
    """Flat tensors of these sizes: an exponent for each, a signed byte, then a byte for every value.

    A value is E4M3 · 2^exponent, where E4M3 is the eight-bit float of four exponent bits and three mantissa bits
    without infinities.
    """

    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.sizes)

    @property
    def length(self) -> int:
        """The length of the data."""
        return len(self.sizes) + self.count

    def encode(self, values: Tensor) -> bytes:
        """The bytes of values that `rounded` returned; what is not finite becomes NaN, which `decode` refuses."""
        host = values.detach().cpu()
        segments = Segments(self.sizes, host.device)
        exponents = _exponents(host, segments)
        # A conversion to eight bits makes the largest number of infinity; the receiver must see that it is none.
        finite = torch.where(torch.isfinite(host), host / segments.spread(two_to(exponents)), torch.nan)
        coded = finite.to(torch.float8_e4m3fn).view(torch.uint8)
        return exponents.numpy().astype(np.int8).tobytes() + coded.numpy().tobytes()

    def decode(self, data: memoryview) -> Tensor:
        """The values, exactly, or `WireError`."""
        if len(data) != self.length:
            raise WireError(f"{self.length} bytes of statistics were expected, {len(data)} were found")
        exponents = torch.from_numpy(np.frombuffer(data[: len(self.sizes)], np.int8).astype(np.int32))
        coded = torch.from_numpy(np.frombuffer(data[len(self.sizes) :], np.uint8).copy())
        if bool((coded & NAN_BITS == NAN_BITS).any()) or bool((exponents > MOST_EXPONENT).any()):
            raise WireError("a statistic is not a finite number")
        scales = Segments(self.sizes, coded.device).spread(torch.ldexp(torch.ones(len(self.sizes)), exponents))
        return coded.view(torch.float8_e4m3fn).to(torch.float32) * scales


def _exponents(values: Tensor, segments: Segments) -> Tensor:
    """For every tensor the exponent of the smallest power of two with which its largest value can be written."""
    largest = segments.largest(torch.nan_to_num(values, posinf=0.0, neginf=0.0))
    mantissas, exponents = torch.frexp(largest / LARGEST)
    exponents = (exponents - (mantissas == 0.5).int()).clamp(LEAST_EXPONENT, MOST_EXPONENT)
    return torch.where(largest > 0, exponents, 0)
