"""Converts charts to PNG."""

from __future__ import annotations

import re
from typing import Final

from agentlightning.errors import ConfigError

_VARIABLE: Final = re.compile(r"var\(--[\w-]+, ([^)]+)\)")
_FONTS: Final = "Arial, Helvetica, DejaVu Sans, Liberation Sans, Noto Sans, sans-serif"
"""Names of fonts, because resvg maps the generic families to fonts that Linux does not have."""
_WHITE: Final = "#ffffff"


def to_png(chart: str, *, width: int = 1080) -> bytes:
    """Renders a chart on white, with the colours of a page without a style sheet.

    Args:
        chart: SVG as drawn by the other modules.
        width: width of the picture, in pixels.

    Raises:
        ConfigError: resvg-py is not installed, or the machine has none of the fonts.
    """
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise ConfigError("writing PNG needs resvg-py. Install with: pip install 'lightning[png]'") from error
    plain = _VARIABLE.sub(r"\1", chart).replace("system-ui, sans-serif", _FONTS)
    picture = svg_to_bytes(svg_string=plain, width=width, background=_WHITE)
    without_text = re.sub(r"<text\b.*?</text>", "", plain, flags=re.DOTALL)
    if plain != without_text and picture == svg_to_bytes(svg_string=without_text, width=width, background=_WHITE):
        raise ConfigError(
            f"writing PNG needs one of the fonts {_FONTS}; install one, such as Debian's fonts-dejavu-core"
        )
    return bytes(picture)
