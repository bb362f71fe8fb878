"""A live cache, through the embedded cache and a `.kvcache` file, into another process's live cache: it goes on
as if nothing had happened."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.bridge import records_of, restore_into
from warmkv.kvstore.kvcache import transfer
from warmkv.kvstore.kvcache.about import About
from warmkv.kvstore.kvcache.snapshots import PackedPrompts
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan, TurboQuantPlan
from warmkv.kvstore.store import PrefixCache
from warmkv.kvstore.testing.live import contents, feed, fill, identity_of, prompt
from warmkv.schema import kvcache_file
from warmkv.schema import messages as m
from warmkv.schema.identity import LayerKind
from warmkv.schema.kvcache_file import Tag
from warmkv.schema.records import Anchor, AnchorKind

LENGTH = 21
CONV = LayerPlan(LayerKind.CONV, conv=ConvPlan(channels=5, taps=2))
FORMATS = {
    "f32": (RowFormat.F32, RowFormat.F32, None, Tag.ATTENTION),
    "f16": (RowFormat.F16, RowFormat.F16, None, Tag.ATTENTION_F16),
    "turboquant": (RowFormat.TQ_KEY, RowFormat.TQ_VALUE, TurboQuantPlan(seed=9), Tag.TURBOQUANT),
}


def plan_of(mode: str, *, conv: bool) -> ModelPlan:
    keys, values, turned, _ = FORMATS[mode]
    rows = LayerPlan(
        LayerKind.FULL,
        heads=4,
        kv_heads=2,
        key_size=16,
        value_size=16,
        key_format=keys,
        value_format=values,
        turboquant=turned,
        importance=False,
    )
    return ModelPlan((rows, CONV, rows) if conv else (rows, rows))


def nothing(done: int, total: int) -> None:
    """Nobody watches."""


@pytest.fixture
def exported(tmp_path: Path) -> Callable[[PrefixCache, About], Path]:
    """Everything a cache holds as files in a folder."""

    def write(cache: PrefixCache, about: About) -> Path:
        folder = tmp_path / "files"
        folder.mkdir()
        session = cache.store.engine.session(os.getuid())
        key = session.open(cache.identity.canonical(), "")
        with open(tmp_path / "pack", "w+b") as pack:
            session.report(m.Report("export", json.dumps({"namespace": key.hex()}).encode()), pack.fileno())
            done = transfer.write_out(PackedPrompts(pack.fileno()), about, folder, nothing, replace=False)
        assert (done.files, done.refused) == (2, [])
        return folder

    return write


@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("conv", [True, False], ids=["convolutions", "rows alone"])
def test_another_process_goes_on_where_a_file_ends(
    tmp_path: Path, exported: Callable[[PrefixCache, About], Path], mode: str, conv: bool
) -> None:
    plan = plan_of(mode, conv=conv)
    identity, ids, about = identity_of(plan), prompt(LENGTH + 1), About("", "cpu:m", "lfm2", 64, 4)
    live = ModelCache(plan, backend="reference")
    with PrefixCache(identity, tmp_path / "one", cold_bytes=64 << 20) as cache:
        fill(live, 8)
        assert cache.insert_anchor(ids[:8], records_of(live, 8), 1, AnchorKind.SYSTEM_PROMPT, 5).durable
        fill(live, LENGTH - 8)
        assert cache.insert(ids[:LENGTH], records_of(live, LENGTH)).stored
        folder = exported(cache, about)
    files = [kvcache_file.decode(path.read_bytes()) for path in folder.iterdir()]
    assert {layer.tag for file in files for layer in file.layers} == {FORMATS[mode][3], *([Tag.CONV] if conv else [])}
    with PrefixCache(identity, tmp_path / "two", cold_bytes=64 << 20) as cache:
        done = transfer.take_in(cache.store, identity, about, list(folder.iterdir()), nothing, durable=True)
        assert (done.files, done.duplicates, done.refused) == (2, 0, [])
        other = ModelCache(plan, backend="reference")
        with cache.find_longest_prefix(ids) as found:
            assert restore_into(other, found) == LENGTH
        assert contents(other) == contents(live) and feed(other, 3) == feed(live, 3)
        with cache.find_deepest_anchor(ids) as found:
            assert found.anchor == Anchor(8, AnchorKind.SYSTEM_PROMPT, 1, 5) and restore_into(other, found) == 8
