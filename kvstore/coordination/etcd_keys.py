"""The keys of one cluster in etcd, and the requests of a transaction about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aetcd import rpc

if TYPE_CHECKING:
    from kvstore.coordination.etcd_calls import KeyValue, TransactionAnswer

ROOT: Final = "/kvharbor/"


class EtcdKeys:
    """Makes requests; asks nothing itself."""

    def __init__(self, cluster: str) -> None:
        """Everything lies under the cluster's name."""
        self.root = f"{ROOT}{cluster}/".encode()

    def name(self, key: str) -> bytes:
        """What a key is called in etcd."""
        return self.root + key.encode()

    def prefix(self, prefix: str) -> tuple[bytes, bytes]:
        """The first name that begins like this, and the first after all those."""
        start = self.name(prefix)
        return start, start[:-1] + bytes([start[-1] + 1])  # UTF-8 has no byte 255

    def get(self, key: str) -> object:
        """Read it."""
        return rpc.RequestOp(request_range=rpc.RangeRequest(key=self.name(key)))

    def get_all(self, *keys: str) -> object:
        """Read each, all of one moment: a transaction."""
        return rpc.TxnRequest(success=[self.get(key) for key in keys])

    def put(self, key: str, value: bytes, lease: int = 0) -> object:
        """Write it; with a lease, until that ends."""
        request = rpc.PutRequest(key=self.name(key), value=value, lease=lease)
        return rpc.RequestOp(request_put=request)

    def touch(self, key: str) -> object:
        """Write it as it is: it gets another revision."""
        request = rpc.PutRequest(key=self.name(key), ignore_value=True, ignore_lease=True)
        return rpc.RequestOp(request_put=request)

    def delete(self, key: str) -> object:
        """Delete it, if it is there."""
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self.name(key)))

    def is_absent(self, key: str) -> object:
        """On condition that it is not there."""
        target = rpc.Compare.CREATE
        return rpc.Compare(key=self.name(key), target=target, create_revision=0)

    def is_written_at(self, key: str, revision: int) -> object:
        """On condition that it was written at this revision, and not again."""
        target = rpc.Compare.MOD
        return rpc.Compare(key=self.name(key), target=target, mod_revision=revision)


def found_by(answer: TransactionAnswer) -> list[KeyValue | None]:
    """What each read of a transaction found."""
    return [next(iter(each.response_range.kvs), None) for each in answer.responses]
