"""Serves a model behind an OpenAI-compatible endpoint.

    python -m agentlightning_algorithms.shared.policy.server --model DIR

    POST /v1/chat/completions, /v1/completions    GET /v1/models, /health, /statistics
    POST /weights {"path": DIR, "version": 7, "digest": "4f5a..."}     answers when the weights are in use
    POST /weights {..., "model": "writer"}     adds the LoRA adapter in DIR as the model ``writer``, or replaces it

When it is ready, it prints one line of JSON, such as ``{"host": "127.0.0.1", "port": 41234, "key": "..."}``; everything
else goes to stderr. ``/weights`` and ``/statistics`` require the key (``Authorization: Bearer``), which is new for each
process. The environment variable AGL_POLICY_API_KEY, if set, is the key of all other paths except ``/health``; with
``file:PATH``, each line of the file is a key, and the file is read again when it changes.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until the model is loaded: importing torch takes a fifth less time

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from agentlightning.errors import ConfigError
from agentlightning_algorithms.shared.policy.model import Policy, load_policy
from agentlightning_algorithms.shared.policy.sampler import Sampler
from agentlightning_algorithms.shared.policy.server.app import PolicyApp
from agentlightning_algorithms.shared.policy.server.tool_format import FORMATS
from agentlightning_algorithms.shared.policy_backend import API_KEY_VARIABLE
from agentlightning_plugins.shared.garbage_collection import relax_collector
from agentlightning_plugins.shared.log_setup import setup_server_log
from agentlightning_plugins.shared.web.request import is_loopback
from agentlightning_plugins.shared.web.server import WebServer, raise_file_limit, stop_on_signals

logger = logging.getLogger("agentlightning")


def main() -> int:
    """Runs the server until SIGTERM, SIGINT or, with ``--exit-with-parent``, the end of standard input."""
    options = make_parser().parse_args()
    # Standard output is for the ready line only; output of libraries goes to the log.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setup_server_log("INFO", options.log_format)
    if options.threads:
        torch.set_num_threads(options.threads)
    key = secrets.token_urlsafe(32)
    try:
        with contextlib.closing(open_app(options, key, os.environ.pop(API_KEY_VARIABLE, None))) as app:
            relax_collector()
            gc.enable()
            raise_file_limit()
            asyncio.run(_serve_until_stopped(app, key, options, output))
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    return 0


def open_app(options: argparse.Namespace, key: str, api_key: str | None) -> PolicyApp:
    """Loads the model; raises a ConfigError if it cannot be loaded."""
    policy = load_policy(options.model, dtype=options.dtype, device=options.device)
    return PolicyApp(
        policy,
        partial(_make_sampler, options),
        model_name=options.model_name,
        max_length=options.max_length,
        key=key,
        api_key=api_key,
        is_local=is_loopback(options.host),
        tool_format=options.tool_format,
        keep_thinking=options.keep_thinking,
        adapters=options.adapters,
    )


def _make_sampler(options: argparse.Namespace, policy: Policy) -> Sampler:
    return Sampler(
        policy,
        max_batch_size=options.max_batch_size,
        prefix_cache_bytes=options.prefix_cache_mb * 2**20,
        kv_cache_bytes=options.kv_cache_mb * 2**20,
        seed=options.seed,
        weight_version=options.weight_version,
        swap_in_flight=options.swap_in_flight,
    )


async def _serve_until_stopped(app: PolicyApp, key: str, options: argparse.Namespace, output: TextIO) -> None:
    stop = stop_on_signals()
    if options.exit_with_parent:  # standard input is a pipe, whose other end closes even if the parent is killed
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    await serve(app, key, options, output, stop)


async def serve(app: PolicyApp, key: str, options: argparse.Namespace, output: TextIO, stop: asyncio.Event) -> None:
    """Serves the application until ``stop`` is set; writes the ready line to ``output``."""
    server = app.server = WebServer(app.build(), finish_s=1.0)
    try:
        port = await server.start(options.host, options.port)
        output.write(json.dumps({"host": options.host, "port": port, "key": key}) + "\n")
        output.flush()
        await stop.wait()
    finally:
        await server.stop()


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m agentlightning_algorithms.shared.policy.server", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--model", required=True, help="directory written by save_pretrained, or a hub name")
    add("--model-name", default="policy", help="name of the model in requests (default: policy)")
    add("--adapters", type=Path, help="folder whose LoRA adapters are models of the names of their folders")
    add("--host", default="127.0.0.1", help="address to bind")
    add("--port", type=int, default=0, help="0: any free port")
    add("--dtype", default="float32", help="float32, bfloat16 or float16")
    add("--device", default="cpu", help="such as cpu or cuda:0")
    add("--max-batch-size", type=int, default=64, help="responses sampled together")
    add("--max-length", type=int, help="maximum tokens of a prompt and its response together; default: the model's")
    add("--tool-format", default="auto", choices=["auto", "none", *FORMATS], help="auto: as the chat template writes")
    add("--keep-thinking", action="store_true", help="prompts keep thoughts of earlier turns, if the template can")
    add("--prefix-cache-mb", type=int, default=512, help="memory for the prefix cache; 0: no cache")
    add("--kv-cache-mb", type=int, default=4096, help="memory for keys and values of running responses; others wait")
    add("--threads", type=int, help="torch threads; 1 is fastest for tiny models")
    add("--seed", type=int, help="seed of requests without their own seed")
    add("--weight-version", type=int, default=0, help="version of the initial weights")
    add("--swap-in-flight", action="store_true", help="new weights do not wait for running answers, which mix versions")
    add("--log-format", default=os.environ.get("AGL_LOG_FORMAT", "text"), choices=["text", "json"])
    add("--exit-with-parent", action="store_true", help="stop when standard input is closed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
