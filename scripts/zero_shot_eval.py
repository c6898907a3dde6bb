"""Zero-shot evaluation of a run folder: a thin door to `clipscale eval zeroshot`, same arguments and --help."""

from __future__ import annotations

import sys

from clipscale.cli import main

if __name__ == "__main__":
    sys.argv = ["clipscale", "eval", "zeroshot", *sys.argv[1:]]
    sys.exit(main())
