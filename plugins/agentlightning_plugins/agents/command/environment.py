"""Environment variables of a command: its model, its attempt, its resources, and a few inherited ones."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.resources import LLM, PromptTemplate, Resource, scope_to_attempt
from agentlightning.run.attempt_token import expiry
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Rollout

INHERITED: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "NODE_PATH", "LD_LIBRARY_PATH"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)
"""Variables that a command always inherits, because programs need them to run. None of them could hold a key."""

_NO_KEY: Final = "none"
"""Key for endpoints without one: clients require a key, and would otherwise look for the user's."""
_MAX_VARIABLE_BYTES: Final = 100_000
"""Linux does not start a program with a variable above 128 KiB."""


def build_environment(
    resources: Mapping[str, Resource],
    rollout: Rollout,
    folder: Path,
    *,
    inherit: Sequence[str] = (),
    llm: str | None = None,
    store: LightningStore | None = None,
) -> dict[str, str]:
    """Builds the environment of one attempt's command, and writes its resources to a file in ``folder``.

    ``inherit`` contains names or patterns (``AWS_*``) of variables, ``llm`` names the resource to use as the model if
    there are several models, and ``store`` receives the command's spans.

    Raises:
        ConfigError: the model is ambiguous, or two prompts would have the same variable.
    """
    scoped = scope_to_attempt(resources, rollout)
    path = folder / "resources.json"
    path.write_text(json.dumps({name: value.model_dump(mode="json") for name, value in scoped.items()}))
    patterns = (*INHERITED, *inherit)
    return {
        **{k: v for k, v in os.environ.items() if any(fnmatchcase(k, pattern) for pattern in patterns)},
        **_describe_model(_choose_model(scoped, llm)),
        **_describe_prompts(scoped),
        **_describe_attempt(rollout, store),
        "AGL_RESOURCES_FILE": str(path),
        "AGL_REWARD_FILE": str(folder / "reward"),
    }


def _choose_model(resources: Mapping[str, Resource], wanted: str | None) -> LLM | None:
    models = {name: value for name, value in resources.items() if isinstance(value, LLM)}
    if wanted is not None and wanted not in models:
        raise ConfigError(f"llm = {wanted!r}: no such model; models among the resources: {', '.join(models) or 'none'}")
    if wanted is None and len(models) > 1 and "llm" not in models:
        raise ConfigError(f"{len(models)} models match: {', '.join(models)}. Name one: CommandAgent(llm=...)")
    return models[wanted or ("llm" if "llm" in models else next(iter(models)))] if models else None


def _describe_model(llm: LLM | None) -> dict[str, str]:
    if llm is None:
        return {}
    endpoint, key = llm.endpoint.rstrip("/"), llm.api_key or _NO_KEY
    attempt = endpoint.removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": endpoint,
        "OPENAI_API_BASE": endpoint,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": llm.model,
        "ANTHROPIC_BASE_URL": attempt,  # its clients add /v1/messages
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": llm.model,
        "GOOGLE_GEMINI_BASE_URL": attempt,  # its clients add /v1beta/models
        "GEMINI_API_KEY": key,
        "GEMINI_MODEL": llm.model,
        "AGL_MODEL": llm.model,
        "AGL_OPENAI_BASE_URL": endpoint,  # the names of Agent Lightning 1.0
        "AGL_KEY": key,
        "AGL_MODEL_NAME": llm.model,
        **({"AGL_EVENT_URL": f"{attempt}/events"} if "/attempt/" in attempt else {}),
        "AGL_SAMPLING_PARAMETERS": json.dumps(llm.sampling_parameters),
    }


def _describe_prompts(resources: Mapping[str, Resource]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for name, value in resources.items():
        if not isinstance(value, PromptTemplate):
            continue
        variable = "AGL_PROMPT_" + re.sub(r"[^A-Z0-9]", "_", name.upper())
        if variable in variables:
            raise ConfigError(f"the prompt {name!r} and another would both be {variable}; rename one of them")
        text = value.template
        if value.engine == "f-string":
            with contextlib.suppress(ConfigError):  # it has placeholders
                text = value.format()
        if len(text.encode()) <= _MAX_VARIABLE_BYTES:
            variables[variable] = text
    return variables


def _describe_attempt(rollout: Rollout, store: LightningStore | None) -> dict[str, str]:
    variables = {"AGL_ROLLOUT_ID": rollout.rollout_id, "AGL_ROLLOUT_MODE": rollout.mode or ""}
    if not isinstance(rollout, AttemptedRollout):
        return variables
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    variables |= {
        "AGL_ATTEMPT_ID": attempt_id,
        # The store uses these to assign the spans of any OpenTelemetry SDK to the attempt.
        "OTEL_RESOURCE_ATTRIBUTES": f"{semconv.ROLLOUT_ID}={rollout_id},{semconv.ATTEMPT_ID}={attempt_id}",
    }
    if store is not None and store.otlp_traces_endpoint() is not None:  # other processes can reach it
        variables |= _describe_store(store, rollout)
    return variables


def _describe_store(store: LightningStore, rollout: AttemptedRollout) -> dict[str, str]:
    from agentlightning.store import LightningStoreClient

    if not isinstance(store, LightningStoreClient):
        return {}
    lifetime_s = expiry(0.0, rollout.config.timeout_seconds)
    token = store.attempt_token(rollout.rollout_id, rollout.attempt.attempt_id, lifetime_s=lifetime_s)
    variables = {
        "AGL_STORE_URL": store.url,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": store.otlp_traces_endpoint(),
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    }
    if token is not None:
        variables["AGL_TOKEN"] = token
        variables["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] = f"authorization=Bearer%20{token}"
    return variables
