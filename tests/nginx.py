"""A real nginx as a proxy in front of a test's server."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.port import reserve_port

_CONFIGURATION = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr warn;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {site}
    server {{ listen 127.0.0.1:{port}; {locations} }}
}}
"""


def find_nginx() -> str:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise FileNotFoundError("no nginx: install the system's package nginx-light (.ci/run does)")
    return program


@contextlib.contextmanager
def running_nginx(folder: Path, locations: str, site: str = "") -> Iterator[str]:
    """Runs nginx with these ``location`` blocks, and the servers of ``site``, and yields the URL of the former."""
    program = find_nginx()
    port = reserve_port()
    configuration = folder / "nginx.conf"
    configuration.write_text(_CONFIGURATION.format(folder=folder, port=port, locations=locations, site=site))
    with (folder / "nginx.log").open("wb") as log:
        process = subprocess.Popen([program, "-c", configuration, "-p", folder], stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "nginx.log").read_text()
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait()
