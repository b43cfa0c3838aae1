"""CPU time of loading 60 plugins of third parties, beside pluggy alone and beside the built-in plugins."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PLUGIN = """
from agentlightning.plugin import Component, hookimpl

@hookimpl
def components():
    return [Component("tracker", "t{n}", f"{{__name__}}:T"), Component("algorithm", "a{n}", f"{{__name__}}:T")]

@hookimpl
def instrument(tracer_provider):
    return None

class T: ...
"""
PLUGGY = """
import importlib.metadata, time
import pluggy
from agentlightning.plugin import Component, hookspecs
points = [each for each in importlib.metadata.entry_points(group="agentlightning") if each.name.startswith("third_")]
began = time.process_time()
manager = pluggy.PluginManager("agentlightning")
manager.add_hookspecs(hookspecs)
for point in points:
    point.dist.metadata["Name"]
    manager.register(point.load(), point.name)
list(manager.hook.components())
print(time.process_time() - began, len(points))
"""
OURS = """
import importlib.metadata, time
from agentlightning.plugin.registry import PluginManager
PluginManager([])
points = [each for each in importlib.metadata.entry_points(group="agentlightning") if each.name.startswith({prefix!r})]
began = time.process_time()
PluginManager(points)
print(time.process_time() - began, len(points))
"""


def seconds(code: str, folder: Path, count: int) -> float:
    """Returns the median CPU seconds that a program prints, in 7 new processes."""
    measured = []
    for _ in range(7):
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        assert int(done[1]) >= count
        measured.append(float(done[0]))
    return statistics.median(measured)


def main() -> None:

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for n in range(60):
            (folder / f"third_{n}.py").write_text(PLUGIN.format(n=n))
            info = folder / f"third_{n}-1.0.dist-info"
            info.mkdir()
            metadata = f"Metadata-Version: 2.1\nName: third-{n}\nVersion: 1.0\nRequires-Dist: lightning>=0.1\n"
            (info / "METADATA").write_text(metadata)
            (info / "entry_points.txt").write_text(f"[agentlightning]\nthird_{n} = third_{n}\n")
        alone = seconds(PLUGGY, folder, 60)
        third = seconds(OURS.format(prefix="third_"), folder, 60)
        built_in = seconds(OURS.format(prefix=""), folder, 100)
    print(f"60 plugins: {third * 1000:.0f} ms; pluggy alone {alone * 1000:.0f} ms, ratio {third / alone:.1f}")
    print(f"built-in plugins and these: {built_in * 1000:.0f} ms; share of the 60: {third / built_in:.2f}")


if __name__ == "__main__":
    main()
