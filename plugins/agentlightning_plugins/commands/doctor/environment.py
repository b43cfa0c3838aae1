"""The check ``environment``: installed versions, plugins, and conflicting distributions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agentlightning import __version__
from agentlightning.plugin.registry import GROUP, get_manager
from agentlightning_plugins.commands.doctor.check import Check, broken, ok, one_line

_OURS = "lightning"
_OWN_PLACE = "the two cannot share an environment: create a new one, and install this Lightning there from its checkout"
_CLASHES = (
    # Older instrumentation imports a module that opentelemetry-api 1.44 removed. Neither package declares this
    # conflict, and our requirements cannot express it.
    (Requirement("opentelemetry-instrumentation-openai<0.48.2"), Requirement("opentelemetry-api>=1.44")),
)


def check_environment() -> Check:
    """Looks for conflicting distributions, unsupported versions and broken plugins."""
    foreign = _find_foreign()
    if foreign is not None:
        return broken("environment", foreign, _OWN_PLACE)
    wrong = [*_find_wrong_versions(), *_find_clashes()]
    if wrong:
        return broken("environment", "; ".join(sorted(set(wrong))), "install the required versions")
    plugins = get_manager().plugins.values()
    faulty = [f"{plugin.name} of {plugin.origin}: {plugin.error}" for plugin in plugins if plugin.state == "broken"]
    if faulty:
        return broken(
            "environment", one_line("plugins cannot be loaded: " + "; ".join(faulty)), "repair or uninstall them"
        )
    python = ".".join(map(str, sys.version_info[:3]))
    return ok("environment", f"Python {python}, Lightning {__version__}, {len(plugins)} plugins")


def _find_foreign() -> str | None:
    """Finds PyTorch Lightning, which has the same distribution name."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and canonicalize_name(name) == _OURS and not any(p.group == GROUP for p in distribution.entry_points):
            return f"PyTorch Lightning (distribution lightning {distribution.version}) is installed here"
    if importlib.util.find_spec(_OURS) is not None:
        return "a module named lightning can be imported; it belongs to PyTorch Lightning, not to this package"
    return None


def _find_wrong_versions() -> Iterator[str]:
    """Yields each installed distribution whose version this package, or an extra of it, does not support."""
    distributions = (plugin.distribution for plugin in get_manager().plugins.values())
    ours = next((d for d in distributions if d is not None and canonicalize_name(d.name) == _OURS), None)
    extras = ("", *(ours.metadata.get_all("Provides-Extra") or ())) if ours is not None else ("",)
    for line in (ours.requires if ours is not None else None) or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": e}) for e in extras):
            continue
        is_base = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if is_base:
                yield f"{requirement.name} is missing"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} is installed, but {requirement.specifier} is required"


def _find_clashes() -> Iterator[str]:
    """Yields each pair of installed versions that do not work together."""
    for pair in _CLASHES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions = [importlib.metadata.version(requirement.name) for requirement in pair]
            if all(r.specifier.contains(version, prereleases=True) for r, version in zip(pair, versions, strict=True)):
                one, other = (f"{r.name} {version}" for r, version in zip(pair, versions, strict=True))
                yield f"{one} does not work with {other}; upgrade both"
