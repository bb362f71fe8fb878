"""The first benchmark: a 4,000-token state (184 MB, f32) saved, handed over, used.

Every figure stands beside baselines of the same run: memcpy, pwrite, a raw file through mmap,
torch.save/load, safetensors (every byte touched), a plain LMDB-to-memfd copy. The limit is
memory bandwidth: handing over moves no bytes, using them moves them once.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

import lmdb
import numpy as np
import numpy.typing as npt
from harness import arrays, cut, daemon, median_s, print_table, rows_for, smollm_like, write_json

import warmkv
from warmkv.daemon.testing import DaemonProcess
from warmkv.kvstore import memfd
from warmkv.kvstore import rows as source
from warmkv.schema.records import CLEAN, ROOT, NamespaceKey, as_tokens

TOKENS = 4000
CHUNK = 4 << 20
Flat = npt.NDArray[np.uint8]


def seconds(value: float) -> str:
    return f"{value * 1e3:.2f}" if value >= 1e-3 else f"{value * 1e3:.3f}"


class Baselines:
    """The same bytes, moved by plain means."""

    def __init__(self, planes: list[npt.NDArray[np.generic]], root: Path) -> None:
        self.planes = planes
        self.total = sum(plane.nbytes for plane in planes)
        self.root = root
        self.raw = root / "raw.bin"
        self.target = np.empty(self.total, np.uint8)
        self.target[:] = 0

    def memcpy(self) -> None:
        at = 0
        for plane in self.planes:
            self.target[at : at + plane.nbytes] = plane.reshape(-1).view(np.uint8)
            at += plane.nbytes

    def pwrite_memfd(self) -> None:
        fd = memfd.create("baseline", self.total)
        at = 0
        for plane in self.planes:
            memfd.write(fd, plane.reshape(-1).view(np.uint8).data, at)
            at += plane.nbytes
        os.close(fd)

    def write_raw(self) -> None:
        with open(self.raw, "wb", buffering=0) as file:
            for plane in self.planes:
                file.write(plane.reshape(-1).view(np.uint8).data)
            os.fsync(file.fileno())

    def drop_raw(self) -> None:
        drop(self.raw)

    def raw_copy(self) -> None:
        mapped = np.memmap(self.raw, np.uint8, "r")
        np.copyto(self.target, mapped)

    def raw_view(self) -> object:
        return np.memmap(self.raw, np.uint8, "r")

    def fill_lmdb(self) -> lmdb.Environment:
        env = lmdb.open(str(self.root / "plain.lmdb"), map_size=self.total * 2)
        data = np.concatenate([plane.reshape(-1).view(np.uint8) for plane in self.planes])
        for index in range(0, self.total, CHUNK):
            with env.begin(write=True) as txn:
                txn.put((index // CHUNK).to_bytes(4, "big"), data[index : index + CHUNK].data)
        return env

    def lmdb_to_memfd(self, env: lmdb.Environment) -> None:
        fd = memfd.create("baseline", self.total)
        with env.begin(buffers=True) as txn:
            for index in range(0, self.total, CHUNK):
                memfd.write(fd, txn.get((index // CHUNK).to_bytes(4, "big")), index)
        memfd.seal(fd)
        os.close(fd)


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def serialisers(base: Baselines) -> list[list[str]]:
    """torch and safetensors, where they are installed."""
    try:
        import torch
        from safetensors.torch import load_file, save_file
    except ImportError:
        return []
    tensors = {str(index): torch.from_numpy(plane) for index, plane in enumerate(base.planes)}
    pickled, safe = base.root / "state.pt", base.root / "state.safetensors"
    save_torch = median_s(lambda: torch.save(tensors, pickled), 3)
    save_safe = median_s(lambda: save_file(tensors, safe), 3)

    def touch(loaded: dict[str, torch.Tensor]) -> None:
        for tensor in loaded.values():
            tensor.clone()

    load_torch = median_s(lambda: touch(torch.load(pickled)), 3)
    load_safe = median_s(lambda: touch(load_file(safe)), 3)
    cold_torch = median_s(lambda: touch(torch.load(pickled)), 3, before=lambda: drop(pickled))
    cold_safe = median_s(lambda: touch(load_file(safe)), 3, before=lambda: drop(safe))
    return [
        ["torch.save (no fsync) / load + touch", seconds(save_torch), seconds(load_torch), seconds(cold_torch)],
        ["safetensors save (no fsync) / load + touch", seconds(save_safe), seconds(load_safe), seconds(cold_safe)],
    ]


def save_segments(
    client: warmkv.Client, identity: warmkv.Identity, ids: Flat, records: list[source.LayerRows], pieces: int
) -> None:
    step = -(-TOKENS // pieces)
    for end in range(step, TOKENS + step, step):
        end = min(end, TOKENS)
        saved = client.save(identity, ids[:end], cut(records, end), ack="disk")
        assert saved.stored and saved.durable, saved


def use(client: warmkv.Client, identity: warmkv.Identity, ids: Flat, target: Flat) -> None:
    """Restore and copy every byte out once."""
    with client.restore(identity, ids) as restored:
        assert restored.usable == TOKENS, restored.match
        at = 0
        for layer in restored.layers:
            for plane in layer.planes.values():
                for block in plane.blocks:
                    target[at : at + block.nbytes] = block.reshape(-1).view(np.uint8)
                    at += block.nbytes


def views(client: warmkv.Client, identity: warmkv.Identity, ids: Flat) -> object:
    restored = client.restore(identity, ids)
    assert restored.usable == TOKENS, restored.match
    restored.close()
    return restored


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, default=Path(".demo/model"), help="for time to first logits; skipped if absent")
    given = parser.parse_args()
    identity = smollm_like()
    records = rows_for(identity, TOKENS)
    ids = np.arange(1, TOKENS + 2, dtype=np.uint32)  # one more than is stored: all of it is usable
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as scratch:
        base = Baselines(arrays(records), Path(scratch))
        base.write_raw()
        env = base.fill_lmdb()
        figures["memcpy"] = median_s(base.memcpy, given.rounds)
        figures["pwrite"] = median_s(base.pwrite_memfd, given.rounds)
        figures["raw write+fsync"] = median_s(base.write_raw, 3)
        figures["raw mmap+copy"] = median_s(base.raw_copy, given.rounds)
        figures["raw mmap+copy cold"] = median_s(base.raw_copy, 3, before=base.drop_raw)
        figures["lmdb to memfd"] = median_s(lambda: base.lmdb_to_memfd(env), given.rounds)
        figures["write container"] = median_s(lambda: write_container(identity, ids[:-1], records), given.rounds)
        table = serialisers(base)
        for pieces in (1, 10):
            with daemon(root=Path(scratch)) as served:
                measure(served, identity, ids, records, pieces, given.rounds, figures, env, base)
        env.close()
    report(figures, table, base.total)
    if given.model.exists():
        logits(given.model, given.rounds)
    write_json(given.json, figures)
    return 0


def write_container(identity: warmkv.Identity, ids: Flat, records: list[source.LayerRows]) -> None:
    tokens = as_tokens(ids)
    by_layer = source.check_rows(identity, records, len(tokens))
    source.write_segment(identity, NamespaceKey(bytes(16)), CLEAN, ROOT, 0, tokens, (), by_layer).close()


def measure(
    served: DaemonProcess, identity: warmkv.Identity, ids: npt.NDArray[np.uint32], records: list[source.LayerRows], pieces: int,
    rounds: int, figures: dict[str, float], env: lmdb.Environment, base: Baselines,
) -> None:  # fmt: skip
    name = f"{pieces} segment" + "s" * (pieces > 1)
    with warmkv.connect(str(served.socket), timeout_s=60, strict=True) as client:
        figures[f"save {name}, ack=disk"] = median_s(lambda: save_segments(client, identity, ids, records, pieces), 1)
        if pieces == 1:
            memory = []
            for round_ in range(rounds):
                other = ids[:-1].copy()
                other[0] = 10_000_000 + round_
                memory.append(median_s(lambda other=other: client.save(identity, other, records), 1))
                memory_pwrite = median_s(base.pwrite_memfd, 1)
                figures.setdefault("pwrite beside", memory_pwrite)
                client.forget(identity, other)
            figures["save, ack=memory"] = sorted(memory)[len(memory) // 2]
        figures[f"warm views, {name}"] = median_s(lambda: views(client, identity, ids), 30 * rounds)
        figures[f"warm use, {name}"] = median_s(lambda: use(client, identity, ids, base.target), rounds)
    cached, cold, plain = [], [], []
    for _ in range(3):
        served.stop()
        served.start()
        with warmkv.connect(str(served.socket), timeout_s=60, strict=True) as client:
            cached.append(median_s(lambda client=client: views(client, identity, ids), 1))
        plain.append(median_s(lambda: base.lmdb_to_memfd(env), 1))
    for _ in range(3):
        served.kill()
        drop(served.store / "data.mdb")
        served.start()
        with warmkv.connect(str(served.socket), timeout_s=60, strict=True) as client:
            cold.append(median_s(lambda client=client: views(client, identity, ids), 1))
    figures[f"cold views (file cached), {name}"] = sorted(cached)[1]
    figures[f"lmdb to memfd beside, {name}"] = sorted(plain)[1]
    figures[f"cold views (file dropped), {name}"] = sorted(cold)[1]


def report(figures: dict[str, float], table: list[list[str]], total: int) -> None:
    ms = {name: seconds(value) for name, value in figures.items()}
    rows = [
        ["memcpy of the rows (limit)", "", ms["memcpy"], ""],
        ["pwrite into a fresh memfd", ms["pwrite"], "", ""],
        ["raw file: write + fsync / mmap + copy", ms["raw write+fsync"], ms["raw mmap+copy"], ms["raw mmap+copy cold"]],
        *table,
        ["LMDB chunks to memfd, no digests (file cached)", "", "", ms["lmdb to memfd"]],
        ["warmkv: container written by the client", ms["write container"], "", ""],
        ["warmkv: save, memory", ms["save, ack=memory"], "", ""],
    ]
    for name in ("1 segment", "10 segments"):
        rows += [
            [f"warmkv: save, disk, {name}", ms[f"save {name}, ack=disk"], "", ""],
            [f"warmkv: to mapped views, {name}", "", ms[f"warm views, {name}"], ms[f"cold views (file dropped), {name}"]],
            [f"warmkv: to mapped views, file cached, {name}", "", "", ms[f"cold views (file cached), {name}"]],
            [f"warmkv: every byte copied out, {name}", "", ms[f"warm use, {name}"], ""],
        ]
    print_table(f"State of {TOKENS} tokens, {total / 1e6:.1f} MB f32; milliseconds", ["", "save", "warm", "cold"], rows)
    cold = figures["lmdb to memfd beside, 1 segment"] / figures["cold views (file cached), 1 segment"]
    print_table(
        "Aims",
        ["", "measured", "aim"],
        [
            ["warm views, 1 segment", f"{figures['warm views, 1 segment'] * 1e3:.3f} ms", "<= 1 ms"],
            ["warm views, 10 segments", f"{figures['warm views, 10 segments'] * 1e3:.3f} ms", "reported"],
            ["cold speed / plain LMDB-to-memfd", f"{cold:.2f}", ">= 0.8"],
            ["container written / plain pwrite", f"{figures['write container'] / figures['pwrite']:.2f}", "<= 1.3"],
            [
                "every byte copied out / raw mmap + copy",
                f"{figures['warm use, 1 segment'] / figures['raw mmap+copy']:.2f}",
                "reported",
            ],
        ],
    )


def logits(model_dir: Path, rounds: int) -> None:
    """Time from nothing in this process to the logits of a 20-token suffix."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
    from transformers.utils import logging

    from warmkv.kvstore.integrations import hf_cache
    from warmkv.kvstore.integrations.transformers import PromptCache

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prefix = [int(i) for i in np.random.default_rng(1).integers(100, 40000, TOKENS)]
    suffix = prefix[:20]
    everything = np.array(prefix + suffix, np.uint32)
    feed = torch.tensor([suffix])

    def forward(cache: DynamicCache) -> None:
        with torch.inference_mode():
            model(input_ids=feed, cache=cache, logits_to_keep=1)

    with torch.inference_mode():
        whole = DynamicCache(config=model.config)
        prefill_s = median_s(lambda: model(input_ids=torch.tensor([prefix]), cache=whole, logits_to_keep=1), 1)
    rows = [["prefill of the 4,000 tokens", "", f"{prefill_s * 1e3:.0f}", "", ""]]
    with tempfile.TemporaryDirectory(prefix="bench-", dir=Path.cwd()) as scratch:
        raw = Path(scratch) / "raw.bin"
        with open(raw, "wb") as file:
            for layer in whole.layers:
                file.write(layer.keys.numpy().tobytes() + layer.values.numpy().tobytes())

        def from_raw() -> DynamicCache:
            mapped = np.memmap(raw, np.float32, "r")
            cache, at = DynamicCache(config=model.config), 0
            for index, layer in enumerate(whole.layers):
                shape, size = tuple(layer.keys.shape), layer.keys.numel()
                keys = torch.from_numpy(np.array(mapped[at : at + size]).reshape(shape))
                values = torch.from_numpy(np.array(mapped[at + size : at + 2 * size]).reshape(shape))
                cache.update(keys, values, index)
                at += 2 * size
            return cache

        rows.append(["raw file, mmap + copy", seconds(median_s(from_raw, rounds)), "see beside", "", ""])
        for pieces in (1, 10):
            with daemon(root=Path(scratch)) as served, warmkv.connect(str(served.socket), timeout_s=60, strict=True) as client:
                agent = PromptCache(model, tokenizer, client)
                step = TOKENS // pieces
                for end in range(step, TOKENS + 1, step):
                    client.save(agent.identity(), everything[:end], cut(hf_cache.to_rows(whole), end), ack="disk")
                load_s = median_s(lambda agent=agent: agent.load(everything), rounds)
                agent.load(everything)
                turns = [
                    (median_s(lambda: forward(from_raw()), 1), median_s(lambda agent=agent: forward(agent.load(everything)), 1))
                    for _ in range(rounds)
                ]
                raw_s, warm_s = (median(times) for times in zip(*turns, strict=True))
                served.kill()
                drop(served.store / "data.mdb")
                served.start()
                cold_s = median_s(lambda agent=agent: forward(agent.load(everything)), 1)
                name = f"warmkv, {pieces} segment" + "s" * (pieces > 1)
                beside = f"{warm_s / raw_s:.2f} of {seconds(raw_s)}"
                rows.append([name, seconds(load_s), seconds(warm_s), beside, seconds(cold_s)])
    columns = ["", "to a torch cache", "to first logits", "of raw mmap + copy, beside", "cold (file dropped)"]
    print_table("Suffix of 20 tokens after 4,000, SmolLM2-135M f32; milliseconds", columns, rows)


if __name__ == "__main__":
    raise SystemExit(main())
