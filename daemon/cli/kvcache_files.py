"""What `import` and `export` do about `.kvcache` files: the files are read and written here, by whoever asks,
and the daemon sees rows and packs only."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click

from warmkv.daemon.cli import command, exits, output
from warmkv.kvstore.kvcache import about as descriptions
from warmkv.kvstore.kvcache import folder, transfer
from warmkv.kvstore.kvcache.about import About
from warmkv.kvstore.kvcache.snapshots import PackedPrompts
from warmkv.kvstore.kvcache.transfer import Outcome
from warmkv.kvstore.session import Session
from warmkv.kvstore.verbs import Verbs
from warmkv.schema import kvcache_file
from warmkv.schema import messages as m
from warmkv.schema.errors import StoreError, WarmKVError
from warmkv.schema.identity import Identity

#: Reasons that are told one by one.
MAX_REASONS = 20


class Agent(Verbs):
    """The verbs over a session of the command line: what fails raises."""

    def _failed(self, exc: WarmKVError) -> NoReturn:
        raise exc


class Progress:
    """How far a transfer is, for `waiting`."""

    def __init__(self) -> None:
        self.done = self.total = 0

    def tell(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def words(self) -> str:
        return f"{self.done} of {self.total} files"


def files_of(path: Path) -> list[Path]:
    """``path``, or the files in it; what writers that ended left there is swept. Raises StoreError where
    there is none."""
    if not os.path.isdir(path):
        return [path]
    folder.sweep(path)
    files = folder.files_in(path)
    if not files:
        raise StoreError(f"{path} holds no {kvcache_file.SUFFIX} files")
    return files


def model(session: Session, described: About, where: Path) -> tuple[Identity, str]:
    """The identity that is named, and the share of its namespace. Raises RecordError, FormatError,
    UnknownNamespace."""
    if described.identity:
        return descriptions.identity_in(where.parent / described.identity), ""
    found = command.ask(session, "identity", namespace=described.namespace)
    return Identity.from_canonical(bytes.fromhex(found["identity"])), str(found["share"])


def take_in(session: Session, where: Path, paths: list[Path], share: str, progress: Progress) -> Outcome:
    """Files ``paths`` of the model that the table in ``where`` describes."""
    described = descriptions.read(where)
    identity, own = model(session, described, where)
    durable = bool(command.ask(session, "status")["cold_budget_bytes"])
    agent = Agent(session, share=share or own)  # the session is closed by whoever opened it
    return transfer.take_in(agent, identity, described, paths, progress.tell, durable=durable)


def write_out(
    session: Session, where: Path, chosen: dict[str, str], target: Path, progress: Progress, *, force: bool
) -> Outcome:  # fmt: skip
    """The prompts of a namespace, or the one of a record, into the folder or file ``target``."""
    described = descriptions.read(where)
    longest = "id" in chosen
    place = target if os.path.isdir(target) else target.parent
    if not longest and not os.path.isdir(target):
        raise StoreError(f"{target} is no folder; the prompts of a namespace take a file each")
    if os.path.isdir(target):
        folder.sweep(target)
    try:
        with tempfile.TemporaryFile(dir=place) as pack:
            session.report(m.Report("export", json.dumps(chosen).encode()), pack.fileno())
            prompts = PackedPrompts(pack.fileno())
            return transfer.write_out(prompts, described, target, progress.tell, replace=force, longest=longest)
    except OSError as exc:
        raise StoreError(f"{place} cannot be written: {exc.strerror}") from exc


def write_identity(session: Session, namespace: str, fd: int) -> dict[str, Any]:
    """The canonical bytes of a namespace's identity into the file ``fd``."""
    data = bytes.fromhex(command.ask(session, "identity", namespace=namespace)["identity"])
    with open(fd, "wb", closefd=False) as out:
        out.write(data)
    return {"namespace": namespace, "total_bytes": len(data)}


def said(outcome: Outcome, path: Path, verb: str, *, as_json: bool) -> int:
    """Tell what came of a transfer; its exit status."""
    if as_json:
        reasons = [{"file": name, "reason": reason} for name, reason in outcome.refused]
        output.emit_json({"path": str(path), **asdict(outcome), "refused": len(reasons), "reasons": reasons})
    else:
        size = output.size(outcome.total_bytes)
        output.emit_text(
            f"{verb} {outcome.files} files, {size}; {outcome.duplicates} were there, {len(outcome.refused)} left out"
        )
        for name, reason in outcome.refused[:MAX_REASONS]:
            output.emit_text(f"left out: {output.clean(name)}: {output.clean(reason)}")
        if len(outcome.refused) > MAX_REASONS:
            output.emit_text(f"left out: {len(outcome.refused) - MAX_REASONS} more")
    if not (outcome.files or outcome.duplicates or outcome.refused):
        return exits.MISS
    return exits.OK if outcome.written and not outcome.refused else exits.FAILURE


def require_table(identity: Path | None) -> Path:
    if identity is None:
        raise click.UsageError("`.kvcache` files name no weights: --identity FILE must describe the model (docs/formats.md)")
    return identity


def descriptor(path: Path, *, follow: bool = True) -> int:
    """The file ``path``, open for reading. One that is no plain file is refused by whoever reads it: opening a
    pipe waits for nobody."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except OSError as exc:
        raise StoreError(f"{path} cannot be read: {exc.strerror}") from exc
