"""A process that opens another one's block: `python -m tests.contract.device_opener ...`.

Arguments: the device's name; identity, bytes, name (hex) and offset of the handle; descriptors.
For each line on its input it prints what the block holds, as hex digits. Not a test.
"""

from __future__ import annotations

import sys

from kvstore.errors import BadValue
from kvstore.transfer.device import Handle, Move, open_device
from kvstore.transfer.memory import Memory


def main() -> None:
    """Open, try to write, then show the block's bytes as often as asked."""
    name, identity, size, ipc, offset, *descriptors = sys.argv[1:]
    handle = Handle(identity, int(size), bytes.fromhex(ipc), int(offset))
    try:
        block = open_device(name).open(handle, [int(each) for each in descriptors])
    except BadValue as error:
        print(f"refused {error.field}", flush=True)
        return
    memory = Memory.of("into", bytearray(block.size_bytes), writable=True)
    try:
        block.copy_from(memory, [Move(0, 0, block.size_bytes)])
    except BadValue as error:
        print(f"read-only {error.field}", flush=True)
    for _ in sys.stdin:
        block.copy_to(memory, [Move(0, 0, block.size_bytes)])
        print(bytes(memory.view).hex(), flush=True)
    block.close()


if __name__ == "__main__":
    main()
