"""Where will a conversation be resumed? Boundaries of a rendered prompt, found through any chat
template by what it makes of messages.

A model whose state cannot be rewound resumes only where a state was kept. `plan` names the
positions of a prompt worth a state, best first; `live_length` says how much of an answered prompt
a later prompt can share at all. Both know messages, text and token offsets, and nothing of any
model: what a tag looks like, and what a template does with history, is found out by rendering.
"""

from warmkv.kvstore.planning.live import live_length
from warmkv.kvstore.planning.plan import Plan, Planned, plan
from warmkv.kvstore.planning.positions import STEP
from warmkv.kvstore.planning.ranks import Rank
from warmkv.kvstore.planning.renderer import Encoded, Message, Messages, Offsets, Renderer, Tools, encode

__all__ = [
    "STEP",
    "Encoded",
    "Message",
    "Messages",
    "Offsets",
    "Plan",
    "Planned",
    "Rank",
    "Renderer",
    "Tools",
    "encode",
    "live_length",
    "plan",
]
