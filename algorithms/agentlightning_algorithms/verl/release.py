"""Which releases of verl this code was written against."""

from __future__ import annotations

from importlib import metadata
from typing import Final

from packaging.specifiers import SpecifierSet

from agentlightning.errors import ConfigError

SUPPORTED: Final = ">=0.9.1,<0.10"
"""The V1 trainer, whose seams are used here, changes between minor releases."""


def check_release() -> str:
    """The installed version of verl.

    Raises:
        ConfigError: verl is not installed, or in a version that this code does not know.
    """
    try:
        installed = metadata.version("verl")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"verl is not installed; the algorithm verl needs verl{SUPPORTED} in an environment of its own: "
            "pip install 'lightning[verl]' from a checkout, as in pip install '.[verl]'"
        ) from None
    if not SpecifierSet(SUPPORTED).contains(installed, prereleases=True):
        raise ConfigError(f"verl {installed} is installed; supported is verl{SUPPORTED}")
    return installed
