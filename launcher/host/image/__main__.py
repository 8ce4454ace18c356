"""python3 -m launcher.host.image: see `cache`."""

import sys

from launcher.host.image.cache import main

if __name__ == "__main__":
    sys.exit(main())
