"""Folders of `.kvcache` files in and out through the command line: every byte, every reason, every status."""

from __future__ import annotations

import json
import os
import random
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "kvstore" / "kvcache"))
from kvcache_samples import MODES, file_of, identity_of, planes_of, table  # noqa: E402

from warmkv.kvstore.store import Store, open_store  # noqa: E402
from warmkv.kvstore.testing import save  # noqa: E402
from warmkv.kvstore.testing.samples import IMAGE, records_at  # noqa: E402
from warmkv.schema import ids, kvcache_file  # noqa: E402
from warmkv.schema import messages as m  # noqa: E402
from warmkv.schema.errors import RecordError, UnknownNamespace  # noqa: E402
from warmkv.schema.kvcache_file import KvFile  # noqa: E402
from warmkv.schema.records import CLEAN, Attachment  # noqa: E402

Warmkv = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def put(folder: Path, *files: KvFile) -> Path:
    folder.mkdir(exist_ok=True)
    for file in files:
        (folder / kvcache_file.file_name(file.fingerprint, file.tokens)).write_bytes(kvcache_file.encode(file))
    return folder


def described(path: Path, mode: str, *, conv: bool = True, **more: object) -> Path:
    """A table beside the identity it names."""
    path.with_suffix(".identity").write_bytes(identity_of(mode, conv=conv).canonical())
    return table(path, mode, identity=path.with_suffix(".identity").name, **more)


def namespace_of(mode: str, *, conv: bool = True) -> str:
    return ids.namespace_key(os.getuid(), "", ids.fingerprint(identity_of(mode, conv=conv))).hex()


def prompts(count: int) -> list[list[int]]:
    """Conversations that branch and grow; every one is another."""
    rng, made = random.Random(5), [[7]]
    while len(made) < count:
        base = rng.choice(made)
        found = [*base[: rng.randint(0, len(base))], *(rng.randint(1, 50000) for _ in range(rng.randint(1, 6)))]
        if found not in made:
            made.append(found)
    return made


@pytest.mark.parametrize("mode", MODES)
def test_two_hundred_files_go_in_are_listed_and_come_out_with_every_byte(warmkv: Warmkv, tmp_path: Path, mode: str) -> None:
    count = 200 if mode == "turboquant" else 15
    files = [file_of(ids_, mode, depth=at % 3, kind=at % 7, hash_=at) for at, ids_ in enumerate(prompts(count))]
    source, target, where = put(tmp_path / "source", *files), tmp_path / "target", tmp_path / "store"
    target.mkdir()
    with open_store(where, cold_bytes=64 << 20):
        pass
    model = described(tmp_path / "model.toml", mode)
    took = warmkv("import", "--json", "--store", where, "--identity", model, source)
    assert (took.status, took.value["files"], took.value["refused"]) == (0, count, 0), took
    listed = warmkv("ls", "--json", "--store", where)
    assert [row["namespace"] for row in listed.value["rows"]] == [namespace_of(mode)]
    kvcache = ("--format", "kvcache", "--identity", model)
    wrote = warmkv("export", "--json", "--store", where, *kvcache, "--namespace", namespace_of(mode), target)
    assert (wrote.status, wrote.value["files"], wrote.value["refused"]) == (0, count, 0), wrote
    assert sorted(os.listdir(target)) == sorted(os.listdir(source))
    for name in os.listdir(source):
        before, after = (kvcache_file.decode((folder / name).read_bytes()) for folder in (source, target))
        assert planes_of(before) == planes_of(after) and np.array_equal(before.tokens, after.tokens)
        if before.anchor is not None:
            assert (source / name).read_bytes() == (target / name).read_bytes()
        assert stat.S_IMODE((target / name).stat().st_mode) == 0o600
    again = warmkv("import", "--json", "--store", where, "--identity", model, source)
    assert (again.status, again.value["files"], again.value["duplicates"]) == (0, 0, count)


def test_rows_alone_come_out_where_each_prompt_ended(ask: Warmkv, tmp_path: Path) -> None:
    files = [file_of(PROMPT[:length], "f32", conv=False) for length in (2, 5, 8)]
    source, model = put(tmp_path / "source", *files), described(tmp_path / "model.toml", "f32", conv=False)
    ran = ask("import --json --identity", model, source)
    assert (ran.status, ran.value["files"], ran.value["written"]) == (0, 3, True), ran
    (tmp_path / "out").mkdir()
    key = namespace_of("f32", conv=False)
    out = ask("export --json --format kvcache --identity", model, "--namespace", key, tmp_path / "out")
    assert out.status == 0 and sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(source))
    for name in os.listdir(source):
        assert (source / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_one_prompt_goes_to_one_file(ask: Warmkv, store: Store, tmp_path: Path) -> None:
    identity = identity_of("f32")
    save(store, identity, PROMPT[:4])
    saved = save(store, identity, PROMPT)
    assert saved.id is not None
    model = table(tmp_path / "m.toml", "f32", namespace=namespace_of("f32")[:6])
    arguments = ("export --json --format kvcache --identity", model, "--id", saved.id.hex()[:12], tmp_path / "x.kvcache")
    assert ask(*arguments).value["files"] == 1
    file = kvcache_file.decode((tmp_path / "x.kvcache").read_bytes())
    assert file.tokens.tolist() == PROMPT
    found = {record.layer: record for record in records_at(identity, PROMPT)}
    for index, layer in enumerate(file.layers):
        assert layer.keys.tobytes() == found[index].planes[0].rows.tobytes()
        assert layer.values.tobytes() == (found[index].planes[1].rows.tobytes() if index != 1 else b"")
    assert ask(*arguments).status == 1
    assert ask(*arguments[:1], *arguments[1:], "--force").status == 0
    store.clear(identity)
    assert ask("import --json --identity", described(tmp_path / "n.toml", "f32"), tmp_path / "x.kvcache").value["files"] == 1
    assert store.match(identity, [*PROMPT, 1]).usable == len(PROMPT)


def test_files_that_cannot_be_taken_are_left_out_with_reasons(ask: Warmkv, store: Store, tmp_path: Path) -> None:
    good, other = file_of(PROMPT, "f32"), file_of(PROMPT, "turboquant")
    source = put(tmp_path / "source", good, other)
    (source / "cut.kvcache").write_bytes(kvcache_file.encode(good)[:200])
    (source / "folder.kvcache").mkdir()
    (source / "notes.txt").write_text("no cache")
    ran = ask("import --json --identity", described(tmp_path / "m.toml", "f32"), source)
    assert (ran.status, ran.value["files"], ran.value["refused"]) == (1, 1, 3), ran
    reasons = {row["file"]: row["reason"] for row in ran.value["reasons"]}
    assert set(reasons) == {"cut.kvcache", "folder.kvcache", kvcache_file.file_name(other.fingerprint, other.tokens)}
    reason = reasons[kvcache_file.file_name(other.fingerprint, other.tokens)]
    assert "layer 0 is TURBOQUANT in the file, F32 and F32 in the model" in reason
    assert store.match(identity_of("f32"), [*PROMPT, 1]).usable == len(PROMPT)
    text = ask("import --identity", tmp_path / "m.toml", source)
    assert "took in 0 files" in text.out and "1 were there, 3 left out" in text.out and "left out: cut.kvcache: " in text.out


def test_rows_rotated_by_another_seed_are_refused(ask: Warmkv, tmp_path: Path) -> None:
    source = put(tmp_path / "source", file_of(PROMPT, "turboquant"))
    (tmp_path / "m.identity").write_bytes(identity_of("turboquant", seed=43).canonical())
    ran = ask("import --json --identity", table(tmp_path / "m.toml", "turboquant", identity="m.identity"), source)
    assert ran.status == 1 and "of model" in ran.value["reasons"][0]["reason"]
    named = table(tmp_path / "n.toml", "turboquant", identity="m.identity", model_id="cpu:tq3kv-s42:lfm")
    ran = ask("import --json --identity", named, source)
    assert "'tq3kv-s42:'; identity and layers say 'tq3kv-s43:'" in ran.value["reasons"][0]["reason"]


def test_a_folder_with_descriptions_beside_its_files(ask: Warmkv, store: Store, tmp_path: Path) -> None:
    save(store, identity_of("f32"), [1, 2])
    source = put(tmp_path / "source", file_of(PROMPT, "f32"), file_of(PROMPT[:3], "f32"))
    name = kvcache_file.file_name(file_of(PROMPT, "f32").fingerprint, np.array(PROMPT, "<u4"))
    table(source / f"{name}.toml", "f32", namespace=namespace_of("f32"))
    ran = ask("import --json", source)
    assert (ran.status, ran.value["files"], ran.value["refused"]) == (1, 1, 1)
    assert "names no weights" in ran.value["reasons"][0]["reason"]


def test_descriptions_that_are_none_leave_the_other_files_alone(ask: Warmkv, store: Store, tmp_path: Path) -> None:
    save(store, identity_of("f32"), [1, 2])
    source = put(tmp_path / "source", file_of(PROMPT, "f32"))
    (good,) = source.iterdir()
    table(source / f"{good.name}.toml", "f32", namespace=namespace_of("f32"))
    for name in ("folder", "pipe", "large", "octets", "linked"):
        (source / f"{name}.kvcache").write_bytes(good.read_bytes())
    (source / "folder.kvcache.toml").mkdir()
    os.mkfifo(source / "pipe.kvcache.toml")
    (source / "large.kvcache.toml").write_text("#" * (1 << 17))
    (source / "octets.kvcache.toml").write_bytes(b"\xff\xfe")
    table(source / "linked.kvcache.toml", "f32", namespace=namespace_of("f32"))
    (source / "linked.kvcache").unlink()
    (source / "linked.kvcache").symlink_to(good)
    ran = ask("import --json", source)
    assert (ran.status, ran.value["files"], ran.value["refused"]) == (1, 1, 5), ran
    reasons = {row["file"].partition(".")[0]: row["reason"] for row in ran.value["reasons"]}
    expected = {
        "folder": "expected a plain file", "pipe": "expected a plain file", "large": "more than 65536 bytes",
        "octets": "not UTF-8", "linked": "cannot be read",
    }  # fmt: skip
    assert set(reasons) == set(expected) and all(words in reasons[name] for name, words in expected.items()), reasons


@pytest.mark.parametrize("where", ["the file", "its description", "the table", "the identity", "a pack"])
def test_a_pipe_keeps_nobody_waiting(ask: Warmkv, tmp_path: Path, where: str) -> None:
    source = put(tmp_path / "source", file_of(PROMPT, "f32"))
    (file,) = source.iterdir()
    model, beside = described(tmp_path / "m.toml", "f32"), table(source / f"{file.name}.toml", "f32", namespace="abcdabcd")
    paths = {"the file": file, "its description": beside, "the table": model, "the identity": tmp_path / "m.identity"}
    pipe = paths.get(where, tmp_path / "x.warmkv")
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    of_model = ("--identity", model) if where in ("the table", "the identity") else ()
    ran = ask("import --json", *of_model, pipe if where == "a pack" else file)
    assert ran.status == 1 and "error" in ran.value, ran


def test_prompts_a_file_cannot_tell_are_left_out(ask: Warmkv, store: Store, tmp_path: Path) -> None:
    identity, image, lineage = identity_of("f32"), [Attachment(1, 2, IMAGE)], ids.lineage_after(CLEAN, "shifted", 1)
    save(store, identity, PROMPT)
    store.save(identity, [9, 1, 1, 2], records_at(identity, [9, 1, 1, 2], image), attachments=image)
    store.save(identity, [8, 8, 8], records_at(identity, [8, 8, 8], lineage=lineage), lineage=lineage)
    (tmp_path / "out").mkdir()
    model = table(tmp_path / "m.toml", "f32", namespace=namespace_of("f32"))
    ran = ask("export --json --format kvcache --identity", model, "--namespace", namespace_of("f32"), tmp_path / "out")
    assert (ran.status, ran.value["files"], ran.value["refused"]) == (1, 1, 2), ran
    assert {row["file"] for row in ran.value["reasons"]} == {"prompt of 3 tokens", "prompt of 4 tokens"}


def test_the_identity_of_a_namespace_goes_to_a_file(ask: Warmkv, store: Store, tmp_path: Path) -> None:
    save(store, identity_of("f16"), PROMPT)
    ran = ask("export --json --format identity --namespace", namespace_of("f16")[:8], tmp_path / "m.identity")
    assert ran.status == 0 and (tmp_path / "m.identity").read_bytes() == identity_of("f16").canonical()
    assert ask("export --json --format identity --namespace abcdabcd", tmp_path / "n").status == 4


def test_the_identity_of_somebody_elses_namespace_is_not_told(store: Store) -> None:
    save(store, identity_of("f32"), PROMPT)
    session = store.engine.session(os.getuid() + 1)
    for wanted in (namespace_of("f32"), "abcdabcd"):
        with pytest.raises(UnknownNamespace):
            session.report(m.Report("identity", json.dumps({"namespace": wanted}).encode()))
    for wanted in ("", "abc", None):
        with pytest.raises(RecordError):
            session.report(m.Report("identity", json.dumps({"namespace": wanted}).encode()))


def test_another_user_brings_in_and_takes_out_files_of_its_own(ask_as_another: Warmkv, store: Store) -> None:
    """The daemon never opens them."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        os.chmod(place, 0o777)
        source, model = (
            put(Path(place) / "source", file_of(PROMPT, "turboquant")),
            described(Path(place) / "m.toml", "turboquant"),
        )
        (Path(place) / "out").mkdir()
        os.chmod(Path(place) / "out", 0o777)
        took = ask_as_another("import --json --identity", model, source)
        assert (took.status, took.value["files"]) == (0, 1), took
        assert store.match(identity_of("turboquant"), [*PROMPT, 1]).usable == 0
        (row,) = ask_as_another("ls --json").value["rows"]
        out = ask_as_another(
            "export --json --format kvcache --identity", model, "--namespace", row["namespace"], Path(place) / "out"
        )
        assert (out.status, out.value["files"]) == (0, 1), out
        (name,) = os.listdir(source)
        assert (Path(place) / "out" / name).read_bytes() == (source / name).read_bytes()


def test_a_pack_says_which_model_it_is_of(ask: Warmkv, store: Store, tmp_path: Path) -> None:
    save(store, identity_of("f32"), PROMPT)
    assert ask("export --json --namespace", namespace_of("f32"), tmp_path / "m.warmkv").status == 0
    store.clear(identity_of("f32"))
    model = table(tmp_path / "m.toml", "f32", identity="m.warmkv")
    assert ask("import --json --identity", model, put(tmp_path / "s", file_of(PROMPT, "f32"))).status == 0
    assert store.match(identity_of("f32"), [*PROMPT, 1]).usable == len(PROMPT)


def test_what_is_there_with_the_same_bytes_is_no_failure(ask: Warmkv, tmp_path: Path) -> None:
    file = file_of(PROMPT, "f32")
    source, model = put(tmp_path / "source", file), described(tmp_path / "m.toml", "f32")
    assert ask("import --json --identity", model, source).status == 0
    arguments = ("export --json --format kvcache --identity", model, "--namespace", namespace_of("f32"), source)
    assert ask(*arguments).value["duplicates"] == 1
    (place,) = source.iterdir()
    place.write_bytes(b"damaged" * 10)
    assert ask(*arguments).value["refused"] == 1
    assert ask(*arguments, "--force").value["files"] == 1 and place.read_bytes() == kvcache_file.encode(file)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("import", "--identity", "missing.toml", "f"), 1), (("import", "--identity", "m.toml", "empty"), 1),
        (("import", "--identity", "m.toml", "x.warmkv"), 2), (("import", "--identity", "bad.toml", "f"), 1),
        (("import", "--identity", "none.toml", "f"), 1), (("import", "--identity", "m.toml", "nowhere"), 2),
        (("import", "--share", "no", "f"), 2), (("import", "--share", "no", "x.kvcache"), 2),
        (("import", "--identity", "m.toml", "--share", "no", "f"), 1),
        (("export", "--format", "kvcache", "--namespace", "abcdabcd", "empty"), 2),
        (("export", "--format", "kvcache", "--identity", "m.toml", "--namespace", "abcdabcd", "empty"), 4),
        (("export", "--format", "kvcache", "--identity", "m.toml", "--namespace", "abcdabcd", "nowhere"), 1),
        (("export", "--format", "pack", "--identity", "m.toml", "--namespace", "abcdabcd", "y"), 2),
        (("export", "--format", "identity", "--id", "abcdabcd", "y"), 2),
        (("export", "--format", "x", "--id", "abcdabcd", "y"), 2),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_with_its_status(
    ask: Warmkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], status: int
) -> None:
    put(tmp_path / "f", file_of(PROMPT, "f32"))
    (tmp_path / "empty").mkdir()
    described(tmp_path / "m.toml", "f32")
    table(tmp_path / "none.toml", "f32", identity="nowhere.identity")
    (tmp_path / "bad.toml").write_text("model_id = 3\n")
    monkeypatch.chdir(tmp_path)
    ran = ask(arguments[0], "--json", *arguments[1:])
    assert (ran.status, "error" in ran.value) == (status, True), ran
    assert json.dumps(ran.value) and not os.listdir(tmp_path / "empty")
