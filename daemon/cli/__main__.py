"""``python -m warmkv.daemon.cli``."""

import sys

from warmkv.daemon.cli import main

sys.exit(main())
