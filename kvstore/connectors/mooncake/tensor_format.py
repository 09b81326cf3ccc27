"""How a tensor lies in an object: Mooncake's header of 304 bytes, then the data, row by row.

The header is that of 0.3.13, so programs that prepare or take apart such buffers go on doing so.
Imports torch when it is first asked to.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from torch import Tensor, dtype

DTYPES: Final = (
    "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "bool", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""By number in the header."""
DIMENSIONS_MAX: Final = 8
_MAGIC: Final = 0x4D4F4F4E
_VERSION: Final = 1
_FIXED: Final = struct.Struct("<IHHii8xQQ")
_SHAPE: Final = struct.Struct(f"<{DIMENSIONS_MAX}q")
HEADER_BYTES: Final = 304
_FILL: Final = -1
"""Of dimensions that a tensor does not have."""


class TensorHeader(msgspec.Struct, frozen=True):
    """What must be known of the bytes behind a header."""

    dtype: str
    shape: tuple[int, ...]
    data_bytes: int

    def pack(self) -> bytes:
        """The header; its shape stands twice, as that of the whole tensor and of this part."""
        dimensions = len(self.shape)
        fixed = _FIXED.pack(
            _MAGIC, _VERSION, HEADER_BYTES, DTYPES.index(self.dtype), dimensions,
            HEADER_BYTES, self.data_bytes,
        )  # fmt: skip
        shape = _SHAPE.pack(*self.shape, *[_FILL] * (DIMENSIONS_MAX - dimensions))
        return (fixed + shape + shape).ljust(HEADER_BYTES, b"\0")


def storable(tensor: object) -> Tensor | None:
    """A tensor that can be stored; None for anything else."""
    from torch import Tensor, strided

    if not isinstance(tensor, Tensor) or tensor.dim() > DIMENSIONS_MAX:
        return None
    if tensor.layout != strided or tensor.is_meta:
        return None
    return tensor if _name_of(tensor) in DTYPES else None


def header_of(tensor: Tensor) -> TensorHeader:
    """Of one that can be stored."""
    data_bytes = tensor.numel() * tensor.element_size()
    return TensorHeader(_name_of(tensor), tuple(tensor.shape), data_bytes)


def _name_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def unpack(value: bytes | bytearray | memoryview, size: int) -> TensorHeader | None:
    """The header of an object of that size, if it has one and is as long as that says."""
    if size < HEADER_BYTES:
        return None
    magic, version, offset, number, dimensions, data_at, data_bytes = _FIXED.unpack_from(value)
    if (magic, version, offset, data_at) != (_MAGIC, _VERSION, HEADER_BYTES, HEADER_BYTES):
        return None
    if not 0 <= number < len(DTYPES) or not 0 <= dimensions <= DIMENSIONS_MAX:
        return None
    shape = _SHAPE.unpack_from(value, _FIXED.size)[:dimensions]
    if any(length < 0 for length in shape) or size < HEADER_BYTES + data_bytes:
        return None
    return TensorHeader(DTYPES[number], shape, data_bytes)


def tensor_of(value: bytearray | memoryview) -> Tensor | None:
    """The tensor in an object's memory, which it shares; None where that holds none."""
    import torch

    header = unpack(value, len(value))
    if header is None:
        return None
    kind: dtype = getattr(torch, header.dtype)
    if not header.data_bytes:  # of a shape that wants some, there would be whatever lies there
        return torch.empty(header.shape, dtype=kind) if 0 in header.shape else None
    flat = torch.frombuffer(value, dtype=torch.uint8, count=header.data_bytes, offset=HEADER_BYTES)
    try:
        return flat.view(kind).reshape(header.shape)
    except RuntimeError:  # as many bytes as the shape does not have
        return None


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor's data in one stretch of host memory; itself where it lies so already.

    A view may say that its numbers count as their negatives: that is no more said of the bytes.
    """
    return tensor.detach().resolve_neg().cpu().contiguous()


def serialize_tensor(tensor: object) -> tuple[bytes, int, int, Tensor]:
    """Header, address and length of the data, and what keeps it there. ValueError for no tensor."""
    found = storable(tensor)
    if found is None:
        raise ValueError(f"{type(tensor).__name__}: no tensor that can be stored")
    data = contiguous(found)
    header = header_of(data)
    return header.pack(), data.data_ptr(), header.data_bytes, data


def deserialize_tensor(value: bytes) -> Tensor:
    """The tensor of header and data, in memory of its own. ValueError where there is none."""
    tensor = tensor_of(bytearray(value))
    if tensor is None:
        raise ValueError(f"{len(value)} bytes that hold no tensor")
    return tensor


def tensor_header_bytes() -> int:
    """Bytes before the data."""
    return HEADER_BYTES
