"""What the daemon keeps an eye on while it runs: its configuration, weight files, a spool, memory."""

from warmkv.daemon.watching.service import Watching
from warmkv.daemon.watching.settings import ReloadResult

__all__ = ["ReloadResult", "Watching"]
