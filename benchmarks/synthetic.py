"""What dedup stores: conversations, real where a tokenizer is at hand, and a model's made-up state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from harness import smollm_like

from warmkv import Identity, LayerKind, LayerRows, LayerSpec, LayerState, PlaneFormat, PlaneRole, PlaneRows, PlaneSpec, Restored
from warmkv.kvstore.rows import stored_shape
from warmkv.schema.records import row_bytes

Ids = npt.NDArray[np.uint32]
Array = npt.NDArray[np.generic]
Records = list[LayerRows | LayerState]
ROOT = Path(__file__).resolve().parents[1]
#: Characters of a question and of its answer.
ASKED, ANSWERED = 300, 1200


def models() -> dict[str, Identity]:
    """Geometries of small models with fewer layers, by name."""
    window = LayerSpec(LayerKind.SLIDING, _kv(1, 256), window=512)
    conv = PlaneSpec(PlaneRole.CONV, PlaneFormat.BF16, (1024, 3))
    linear = LayerSpec(LayerKind.RECURRENT, (conv, PlaneSpec(PlaneRole.RECURRENT, PlaneFormat.F32, (8, 64, 64))))
    full = smollm_like(layers=4)
    return {
        "full attention": full,
        "5 of 6 layers windows of 512": replace(full, layers=(window,) * 5 + (LayerSpec(LayerKind.FULL, _kv(1, 256)),)),
        "3 of 4 layers recurrent": replace(full, layers=(linear,) * 3 + (LayerSpec(LayerKind.FULL, _kv(2, 128)),)),
    }


def _kv(heads: int, size: int) -> tuple[PlaneSpec, ...]:
    return tuple(PlaneSpec(role, PlaneFormat.BF16, (heads, size)) for role in (PlaneRole.KEY, PlaneRole.VALUE))


@dataclass(frozen=True)
class Conversation:
    """Ids after each turn, each going on where the one before it ends, and where they come from."""

    turns: tuple[Ids, ...]
    source: str


def conversation(turns: int, model: Path) -> Conversation:
    """A conversation about this repository, spelled by the tokenizer and the chat template in
    ``model``; without one, ids at random."""
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (ImportError, OSError, ValueError):
        rng = np.random.default_rng(0)
        ids = rng.integers(0, 50_000, turns * 400, dtype=np.uint32)
        return Conversation(tuple(ids[:end] for end in range(400, len(ids) + 1, 400)), "random ids")
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "kvstore").rglob("*.py"))]
    text = "".join(path.read_text() for path in files)
    messages, made = [{"role": "system", "content": text[:ANSWERED]}], []
    for at in range(ANSWERED, ANSWERED + turns * (ASKED + ANSWERED), ASKED + ANSWERED):
        messages.append({"role": "user", "content": text[at : at + ASKED]})
        messages.append({"role": "assistant", "content": text[at + ASKED : at + ASKED + ANSWERED]})
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        made.append(np.array(tokenizer(rendered, add_special_tokens=False)["input_ids"], np.uint32))
    return Conversation(tuple(made), f"ids of the tokenizer in {model}")


class Runtime:
    """A model that has read ``length`` tokens: its rows lie there, its states are made when asked
    for. Everything is random bits that depend on ``seed`` and place alone."""

    def __init__(self, identity: Identity, length: int, seed: int = 0) -> None:
        self.identity = identity
        self.length = length
        self._seed = seed
        self._rows = {
            (index, spec.role): self._bits(spec, length, index, 0)
            for index, layer in enumerate(identity.layers)
            for spec in layer.row_planes
        }

    def records(self, position: int) -> Records:
        """What it has after so many tokens: of windows the last rows, of states the present one."""
        made: Records = []
        for index, layer in enumerate(self.identity.layers):
            if layer.row_planes:
                first = self._first(layer, position)
                rows = [(spec, self._rows[index, spec.role][first:position]) for spec in layer.row_planes]
                made.append(LayerRows(index, tuple(PlaneRows(spec.role, spec.format, array) for spec, array in rows), first))
            if layer.state_planes:
                made.append(LayerState(index, position, tuple(self._state(index, spec, position) for spec in layer.state_planes)))
        return made

    def record_bytes(self, position: int) -> tuple[int, int]:
        """Bytes of all that: of rows, and of states."""
        sizes = [0, 0]
        for record in self.records(position):
            sizes[isinstance(record, LayerState)] += sum(plane.rows.nbytes for plane in record.planes)
        return sizes[0], sizes[1]

    def check(self, restored: Restored) -> None:
        """AssertionError unless it is, bit for bit, what this model had there."""
        position = restored.usable
        assert [layer.layer for layer in restored.layers] == list(range(len(self.identity.layers)))
        for layer, got in zip(self.identity.layers, restored.layers, strict=True):
            for spec in layer.row_planes:
                plane, at = got.planes[spec.role], self._first(layer, position)
                for start, block in zip(plane.starts, plane.blocks, strict=True):
                    assert start == at and _same(block, self._rows[got.layer, spec.role][at : at + len(block)]), (got.layer, at)
                    at += len(block)
                assert at == position, (got.layer, at, position)
            for spec in layer.state_planes:
                assert _same(got.states[spec.role].array(), self._state(got.layer, spec, position).rows), (got.layer, spec.role)

    @staticmethod
    def _first(layer: LayerSpec, position: int) -> int:
        return max(0, position - (layer.window - 1)) if layer.window else 0

    def _state(self, index: int, spec: PlaneSpec, position: int) -> PlaneRows:
        return PlaneRows(spec.role, spec.format, self._bits(spec, 1, index, position))

    def _bits(self, spec: PlaneSpec, rows: int, index: int, position: int) -> Array:
        rng = np.random.default_rng([self._seed, index, int(spec.role), position])
        dtype, shape = stored_shape(spec)
        data = rng.bytes(rows * row_bytes(spec.format, spec.row_shape, spec.role))
        return np.frombuffer(data, dtype).reshape(rows, *shape)


class Agent(Runtime):
    """A model whose rows begin as those of ``shared`` and then are its own."""

    def __init__(self, shared: Runtime, length: int, seed: int) -> None:
        super().__init__(shared.identity, length, seed)
        self._shared = shared
        self._rows = {place: np.concatenate([shared._rows[place], rows[shared.length :]]) for place, rows in self._rows.items()}

    def _state(self, index: int, spec: PlaneSpec, position: int) -> PlaneRows:
        return (
            self._shared._state(index, spec, position)
            if position <= self._shared.length
            else super()._state(index, spec, position)
        )


def _same(ours: Array, theirs: Array) -> bool:
    return ours.dtype == theirs.dtype and np.array_equal(_octets(ours), _octets(theirs))


def _octets(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
