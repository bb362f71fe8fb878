"""From which version of transformers a model family continues a stored state with several tokens.

Model files of older versions, and some of today's, start convolution or recurrence from nothing
as soon as more than one token is fed, or choose other keys by their index, without an error. One
token at a time is right everywhere; a family that is not listed is fed so.
"""

from __future__ import annotations

import re

import transformers

#: Model type to the first version at which 7 tokens on a stored state gave the logits of one full
#: forward pass (float32, within 1e-5; with the state zeroed they differ by 1e-4 or more). Families
#: that no older version was measured with are listed with the one that was. Measured to be wrong in
#: 5.24: mamba (by 6e-3), falcon_mamba (4e-1), jamba (2e-5), which leave the recurrent state out; in
#: 5.15: deepseek_v32 (2e-1).
CONTINUES: dict[str, tuple[int, int]] = {
    "lfm2": (5, 15),
    "qwen3_next": (5, 8),
    "deepseek_v32": (5, 20),
    "bailing_hybrid": (5, 24),
    "bamba": (5, 24),
    "falcon_h1": (5, 24),
    "glm_moe_dsa": (5, 24),
    "granitemoehybrid": (5, 24),
    "inkling_text": (5, 24),
    "kimi_linear": (5, 24),
    "lfm2_moe": (5, 24),
    "lfm3": (5, 24),
    "mamba2": (5, 24),
    "nemotron_h": (5, 24),
    "olmo_hybrid": (5, 24),
    "qwen3_5_text": (5, 24),
    "zamba2": (5, 24),
}


def continues_at_once(model_type: str) -> bool:
    """Whether a family with state, or with an index over its keys, may be fed several tokens on top
    of what it has."""
    floor = CONTINUES.get(model_type)
    return floor is not None and _version(transformers.__version__) >= floor


def _version(text: str) -> tuple[int, int]:
    """Major and minor number; (0, 0) for what is no version."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)
