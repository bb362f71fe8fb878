"""In which formats a model's layers are kept, decided class by class.

Models that mix windows and full context have two kinds of rows: few layers see everything and take most of
the memory, many see a window and are read the most. So a policy may choose per class of layer. For each
class the first of these counts: what was chosen explicitly, what is known of the model, what serving is best
off with, and what all layers are written as, the base. What comes of it are `compression.Compression`s and a
plan: the identity of a cache follows from that plan, layer by layer, and from nothing else.

**Source:** the format doors of the memra engine and their defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.live.compression import Compression
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind

#: What keys and values of the base are named; others are given as formats.
KEY_FORMATS: Mapping[str, RowFormat] = {"q8_0": RowFormat.Q8_0, "fp8": RowFormat.FP8}
VALUE_FORMATS: Mapping[str, RowFormat] = {"q5_1": RowFormat.Q5_1, "q4_0": RowFormat.Q4_0, "fp8": RowFormat.FP8}
#: Name of the choice to write a class of layers as the base.
AS_BASE = "base"
_BASE = Compression(RowFormat.Q8_0, RowFormat.Q5_1)
_FP8 = Compression(RowFormat.FP8, RowFormat.FP8)


class LayerClass(Enum):
    """ORDINARY layers are those of models of one kind of rows; models of both have GLOBAL and WINDOWED ones."""

    ORDINARY = "ordinary"
    GLOBAL = "global"
    WINDOWED = "windowed"


class Serving(Enum):
    """PLAIN decodes token by token; SPECULATIVE verifies drafts, whose acceptance windowed rows in fp8 lower."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a class of layers is written as; None leaves it to whoever is asked next."""

    ordinary: Compression | None = None
    global_: Compression | None = None
    windowed: Compression | None = None

    def of(self, layer_class: LayerClass) -> Compression | None:
        if layer_class is LayerClass.ORDINARY:
            return self.ordinary
        return self.global_ if layer_class is LayerClass.GLOBAL else self.windowed


#: What serving is best off with: global rows in fp8, and windowed ones where nothing is drafted.
SERVED = {
    Serving.PLAIN: Choice(global_=_FP8, windowed=_FP8),
    Serving.SPECULATIVE: Choice(global_=_FP8),
}


@dataclass(frozen=True, slots=True)
class FormatPolicy:
    """``base`` is what all layers are written as where nothing else is chosen, ``explicit`` what somebody asked
    for, ``model`` what is known of the model at hand."""

    base: Compression = _BASE
    explicit: Choice = Choice()
    model: Choice = Choice()
    serving: Serving = Serving.PLAIN

    @classmethod
    def named(
        cls, *, keys: str = "", values: str = "", ordinary: str = "", global_: str = "", windowed: str = "",
        model: Choice = Choice(), serving: Serving = Serving.PLAIN,
    ) -> FormatPolicy:  # fmt: skip
        """By names, as an environment has them; an empty one chooses nothing. ``keys`` and ``values`` make the
        base; a class is named `AS_BASE` or by a mode of `plan.modes`. Raises RecordError for other names,
        with those it knows."""
        base = Compression(_known("keys", keys, KEY_FORMATS, _BASE.keys), _known("values", values, VALUE_FORMATS, _BASE.values))
        chosen = (
            _choice(name, text, base) for name, text in (("ordinary", ordinary), ("global", global_), ("windowed", windowed))
        )
        return cls(base, Choice(*chosen), model, serving)

    def compression(self, layer_class: LayerClass) -> Compression:
        """What layers of that class are written as."""
        for choice in (self.explicit, self.model, SERVED[self.serving]):
            found = choice.of(layer_class)
            if found is not None:
                return found
        return self.base

    def applied(self, plan: ModelPlan, classes: Sequence[LayerClass] | None = None) -> ModelPlan:
        """``plan`` with its FULL and SLIDING layers written as their classes are: `classes_of` them, or
        ``classes``, one a layer. Unlike `Compression.applied` this never falls back: RecordError names the
        layer whose heads a format cannot store."""
        found = classes_of(plan) if classes is None else tuple(classes)
        if len(found) != len(plan.layers):
            raise RecordError(f"classes of {len(found)} layers, the plan has {len(plan.layers)}")
        pairs = zip(plan.layers, found, strict=True)
        return replace(plan, layers=tuple(self.compression(layer_class).written(layer) for layer, layer_class in pairs))


def classes_of(plan: ModelPlan) -> tuple[LayerClass, ...]:
    """The class of every layer: GLOBAL and WINDOWED where the plan has both FULL and SLIDING layers, else
    ORDINARY. Layers that have no rows of their own are ORDINARY, which says nothing of them."""
    mixed = {LayerKind.FULL, LayerKind.SLIDING} <= {layer.kind for layer in plan.layers}
    return tuple(_class_of(layer) if mixed else LayerClass.ORDINARY for layer in plan.layers)


def _class_of(layer: LayerPlan) -> LayerClass:
    if layer.kind is LayerKind.FULL:
        return LayerClass.GLOBAL
    return LayerClass.WINDOWED if layer.kind is LayerKind.SLIDING else LayerClass.ORDINARY


def _known(what: str, name: str, formats: Mapping[str, RowFormat], default: RowFormat) -> RowFormat:
    if not name:
        return default
    if name not in formats:
        raise _unknown(what, name, formats)
    return formats[name]


def _choice(what: str, name: str, base: Compression) -> Compression | None:
    if not name:
        return None
    if name == AS_BASE:
        return base
    try:
        return Compression.named(name)
    except RecordError as exc:
        raise RecordError(f"{what} layers: {exc}, or {AS_BASE}") from exc


def _unknown(what: str, name: str, known: Iterable[str]) -> RecordError:
    return RecordError(f"{what} as {name!r}, expected one of {', '.join(known)}")
