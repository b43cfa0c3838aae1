"""``python -m agentlightning`` is ``agl``."""

from agentlightning.cli import main

if __name__ == "__main__":
    main()
