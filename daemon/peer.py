"""Who is at the other end, as the kernel says, and who of them may come in."""

from __future__ import annotations

import array
import socket
from dataclasses import dataclass

from warmkv.kvstore.channel import peer_credentials
from warmkv.kvstore.store.cgroup import same_memory_cgroup
from warmkv.schema.errors import Busy, PeerRefused

SO_PEERGROUPS = 59
#: What Python's getsockopt can take in: 256 groups. Of a peer with more the main group counts.
_GROUP_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Peer:
    """``gids`` are all groups of the process when it connected, the main one among them. ``foreign``:
    memory it allocates is charged to another control group than ours."""

    pid: int
    uid: int
    gids: frozenset[int] = frozenset()
    foreign: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} of uid {self.uid}"


@dataclass(frozen=True, slots=True)
class Admission:
    """Who may connect, by user or by group, how many at once, and which part of that one user may
    have. With ``copy_foreign``, peers are told apart by whose memory they use."""

    uids: frozenset[int]
    max_connections: int
    gids: frozenset[int] = frozenset()
    uid_share: float = 1.0
    copy_foreign: bool = False

    def identify(self, sock: socket.socket) -> Peer:
        """The peer of a connected socket. Raises OSError."""
        pid, uid, gid = peer_credentials(sock)
        foreign = self.copy_foreign and not same_memory_cgroup(pid)
        return Peer(pid, uid, supplementary_groups(sock) | {gid}, foreign)

    def require(self, peer: Peer, serving: int, serving_its_uid: int) -> None:
        """Raises PeerRefused for who may not connect, Busy for one connection too many: of all
        that are being served, or of those of its user."""
        if not self.permits(peer):
            raise PeerRefused(f"uid {peer.uid} may not use this daemon")
        if serving >= self.max_connections:
            raise Busy(f"the daemon serves its {self.max_connections} connections already")
        if serving_its_uid >= self.max_connections_per_uid:
            raise Busy(f"the daemon serves {self.max_connections_per_uid} connections of uid {peer.uid} already")

    def permits(self, peer: Peer) -> bool:
        """Whether a peer may connect at all."""
        return peer.uid in self.uids or not peer.gids.isdisjoint(self.gids)

    @property
    def max_connections_per_uid(self) -> int:
        return max(1, int(self.max_connections * self.uid_share))


def supplementary_groups(sock: socket.socket) -> frozenset[int]:
    """Groups the peer was in when it connected, beside its main one."""
    try:
        groups = array.array("I", sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _GROUP_BYTES))
    except OSError:  # more than fit, or a kernel before 4.13
        return frozenset()
    return frozenset(groups)
