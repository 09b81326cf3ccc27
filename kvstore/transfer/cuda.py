"""CUDA devices: torch allocates, the driver copies by address and shares between processes.

The driver's C interface, because it takes plain addresses, wraps nothing around somebody's tensor,
and checks what a handle really covers; its names and types have not changed for many versions. That
nobody writes into a block it opened is a convention here: CUDA shares no memory read-only.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Final

from kvstore.errors import BadValue, ConfigError, Unavailable
from kvstore.transfer.device import (
    Block,
    Handle,
    Move,
    out_of_space,
    require_device,
    require_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

IPC_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is."""
_PORTABLE: Final = 1
"""CU_MEMHOSTREGISTER_PORTABLE: pinned for every context."""

_ADDRESS: Final = ctypes.c_uint64
_POINTER: Final = ctypes.c_void_p


class _Ipc(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_BYTES),)


class _Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


_SIGNATURES: Final = {
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_POINTER),),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetUuid_v2": (ctypes.POINTER(_Uuid), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_POINTER), ctypes.c_int),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Ipc), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_ADDRESS), _Ipc, ctypes.c_uint),
    "cuMemGetAddressRange_v2": (
        ctypes.POINTER(_ADDRESS), ctypes.POINTER(ctypes.c_size_t), _ADDRESS,
    ),
    "cuMemHostRegister_v2": (_POINTER, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (_POINTER,),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, ctypes.c_size_t, _POINTER),
    "cuStreamSynchronize": (_POINTER,),
}  # fmt: skip


@cache
def _driver() -> ctypes.CDLL:
    """The driver's library, every call of which releases the interpreter lock."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
    return library


def _call(name: str, *arguments: object) -> None:
    """Call the driver; Unavailable, with its own word for what is wrong."""
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        raise Unavailable(
            f"CUDA: {name} failed with {(text.value or b'an unknown error').decode()}"
        )


@contextmanager
def _torch_errors() -> Iterator[None]:
    """What torch says of a device that fails, as the driver's errors are said."""
    try:
        yield
    except RuntimeError as error:
        raise Unavailable(f"CUDA: {error}") from error


def cuda_devices() -> list[str]:
    """The names of the CUDA devices that this process may use; none where torch has no CUDA."""
    try:
        import torch
    except ImportError:
        return []
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


class CudaDevice:
    """One CUDA device (see `device.Device`)."""

    is_read_only_enforced = False

    def __init__(self, index: int) -> None:
        """Use the device that torch numbers `index`, in the context that torch uses too."""
        import torch

        self._torch = torch
        self._index = index
        self.name = f"cuda:{index}"
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch annotates it not
        except RuntimeError as error:  # no driver that fits, or a fork of a process that uses it
            raise ConfigError(f"device {self.name}: {error}") from error
        number, uuid, context = ctypes.c_int(), _Uuid(), _POINTER()
        _call("cuDeviceGet", ctypes.byref(number), index)
        _call("cuDeviceGetUuid_v2", ctypes.byref(uuid), number)
        # Never released: torch keeps it for the life of the process as well.
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self.identity = f"cuda-{bytes(uuid.bytes).hex()}"
        self._context = context

    @property
    def free_bytes(self) -> int:
        """What neither this process nor another one has taken."""
        with _torch_errors():
            return self._torch.cuda.mem_get_info(self._index)[0]

    def allocate(self, size_bytes: int) -> Block:
        """See Device.allocate."""
        require_size(size_bytes)
        torch = self._torch
        with _torch_errors():
            try:
                tensor = torch.empty(size_bytes, dtype=torch.uint8, device=self.name)
            except torch.OutOfMemoryError as error:
                raise out_of_space(self, size_bytes) from error
        return self.wrap(tensor.data_ptr(), size_bytes, tensor)

    def wrap(self, address: int, size_bytes: int, owner: object) -> Block:
        """See Device.wrap."""
        return Block(self, address, size_bytes, _Tensor(self, owner), is_writable=True)

    def open(self, handle: Handle, descriptors: Sequence[int]) -> Block:
        """See Device.open."""
        for descriptor in descriptors:
            os.close(descriptor)
        require_device(self, handle)
        if len(handle.ipc) != IPC_BYTES:
            raise BadValue("handle.ipc", len(handle.ipc), f"{IPC_BYTES} bytes")
        base = _ADDRESS()
        with self.current():
            name = _Ipc.from_buffer_copy(handle.ipc)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), name, _LAZY_PEER_ACCESS)
        held = _OpenedMemory(self, base.value)
        try:
            # A device that is told to read outside of its memory fails for the whole process.
            room = self.allocation_of(base.value)[1]
            size = handle.size_bytes
            if not (size > 0 and 0 <= handle.offset <= room - size):
                raise BadValue("handle", handle, f"a range of an allocation of {room} bytes")
        except BaseException:
            held.close()
            raise
        return Block(self, base.value + handle.offset, size, held, is_writable=False)

    def copy(self, moves: Sequence[Move]) -> None:
        """See Device.copy. On a stream of torch's pool: a model's own are not waited for."""
        with _torch_errors():
            streams = self._torch.cuda.Stream
            stream = streams(self._index).cuda_stream  # type: ignore[no-untyped-call]  # nor this
        with self.current():
            try:
                for to, source, size_bytes in moves:
                    _call("cuMemcpyAsync", to, source, size_bytes, stream)
            finally:
                _call("cuStreamSynchronize", stream)

    def asked(self) -> Callable[[], object]:
        """See Device.asked. The current stream is a thread's own, an event is anybody's."""
        with _torch_errors():
            events = self._torch.cuda.Event
            event = events(blocking=True)  # type: ignore[no-untyped-call]  # as above
            event.record(self._torch.cuda.current_stream(self._index))

        def wait() -> None:
            with _torch_errors():
                event.synchronize()

        return wait

    def pin(self, address: int, size_bytes: int) -> Callable[[], object]:
        """See Device.pin. Whole pages of memory."""
        with self.current():
            _call("cuMemHostRegister_v2", address, size_bytes, _PORTABLE)

        def unpin() -> None:
            with suppress(Unavailable), self.current():  # a device that failed pins nothing
                _call("cuMemHostUnregister", address)

        return unpin

    def trim(self) -> None:
        """Have torch give back what it keeps for reuse."""
        with suppress(RuntimeError):  # a device that failed has nothing to give
            self._torch.cuda.empty_cache()

    def allocation_of(self, address: int) -> tuple[int, int]:
        """(address, bytes) of the driver's allocation that an address lies in."""
        base, room = _ADDRESS(), ctypes.c_size_t()
        with self.current():
            _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(room), address)
        return base.value, room.value

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current to this thread, as the driver's calls need it.

        Pushed and popped: the thread may be an engine's, which has chosen its own.
        """
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(_POINTER()))


class _Tensor:
    """A tensor's memory."""

    descriptors = ()

    def __init__(self, device: CudaDevice, owner: object) -> None:
        self._device = device
        self._owner: object = owner

    def export(self, address: int, size_bytes: int) -> Handle:
        name = _Ipc()
        try:
            base, _ = self._device.allocation_of(address)
            with self._device.current():
                _call("cuIpcGetMemHandle", ctypes.byref(name), base)
        except Unavailable as error:
            want = f"memory of cudaMalloc, not of expandable segments ({error})"
            raise BadValue("block", address, want) from error
        return Handle(self._device.identity, size_bytes, bytes(name.reserved), address - base)

    def close(self) -> None:
        self._owner = None


class _OpenedMemory:
    """Memory of another process. The driver counts how often this process has opened it."""

    descriptors = ()

    def __init__(self, device: CudaDevice, base: int) -> None:
        self._device = device
        self._base = base

    def export(self, address: int, size_bytes: int) -> Handle:
        raise BadValue("block", (address, size_bytes), "a block of this process")

    def close(self) -> None:
        with suppress(Unavailable), self._device.current():  # its owner may have ended
            _call("cuIpcCloseMemHandle", self._base)
