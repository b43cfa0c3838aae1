"""``python -m agentlightning`` is ``agl``."""

import os
import sys

if __name__ == "__main__":
    if sys.path[0] == os.getcwd():  # noqa: PTH109 # importing pathlib here could import a file of this folder
        sys.path.append(sys.path.pop(0))  # as with ``agl``: a file there does not shadow an installed package
    from agentlightning.cli import main

    main()
