"""Which file system a store would lie on, and whether LMDB can be trusted to it.

LMDB needs a local file system: mappings and writes of one file must show each other, and locks must
hold. Network file systems and folders shared with a virtual machine's host promise neither.
"""

from __future__ import annotations

import re
from pathlib import Path

_NETWORK = "a network file system: LMDB needs a local one"
_SHARED = "a folder shared with another machine: LMDB needs a local file system"
#: Where no store is opened unless that is permitted.
_REFUSED = {
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "afs", "glusterfs", "lustre", "gfs2", "ocfs2"), _NETWORK),
    **dict.fromkeys(("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.rclone", "fuse.s3fs", "fuse.juicefs"), _NETWORK),
    **dict.fromkeys(("9p", "virtiofs", "vboxsf", "prl_fs", "vmhgfs", "fuse.vmhgfs-fuse"), _SHARED),
}
#: Where a store works, but is not what one might take it for.
_DOUBTFUL = {
    **dict.fromkeys(("overlay", "aufs"), "an overlay: what is written goes away with the container"),
    **dict.fromkeys(("tmpfs", "ramfs"), "memory: the cold tier does not survive a reboot there"),
}
_OCTAL = re.compile(r"\\([0-7]{3})")


def kind(path: Path) -> str:
    """Type of the file system on which ``path``, or the nearest folder above it that exists, lies, as
    the kernel names it; "unknown" where it does not tell."""
    real, best, found = existing(path).resolve(), -1, "unknown"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                left, _, right = line.partition(" - ")
                point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), left.split()[4])
                if real.is_relative_to(point) and len(point) >= best:  # of two mounts on one point the later one shows
                    best, found = len(point), right.split()[0]
    except OSError:
        return "unknown"
    return found


def refusal(kind_: str) -> str:
    """Why no store is opened on a file system of this kind; empty where one is."""
    return _REFUSED.get(kind_, "")


def doubt(kind_: str) -> str:
    """What there is to say about a store on a file system of this kind; empty where nothing."""
    return refusal(kind_) or _DOUBTFUL.get(kind_) or ("a user-space file system" if kind_.startswith("fuse") else "")


def existing(path: Path) -> Path:
    """``path`` or the nearest folder above it that exists."""
    path = path.absolute()
    return next(item for item in (path, *path.parents) if item.exists())
