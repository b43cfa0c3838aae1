"""Composes verl's configuration: the user's keys over our defaults over verl's own ``ppo_trainer``."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from agentlightning.errors import ConfigError, suggest
from agentlightning_algorithms.verl.default import Setting, check_reserved, check_values, default_settings, flatten
from agentlightning_algorithms.verl.environment import check_release, choose_platform


def compose_config(config: Mapping[str, Any]) -> DictConfig:
    """Composes verl's whole configuration.

    Args:
        config: nested, or with dotted keys, or both. A key that begins with ``+`` is not checked, for keys that verl
            reads but does not declare. ``model_engine`` selects the files of another engine, such as ``megatron``.

    Raises:
        ConfigError: verl has no such key, or its configuration refuses a value.
    """
    check_release()
    settings = list(flatten(config, ()))
    engine = [s for s in settings if s.key == ("model_engine",)]
    settings = [s for s in settings if s.key != ("model_engine",)]
    device = next((s.value for s in settings if s.key == ("trainer", "device")), "cuda")
    choose_platform(device)
    own = _compose_own(*(f"model_engine={setting.value}" for setting in engine))
    for setting in settings:
        _check_key(own, setting)
    composed = copy.deepcopy(own)
    for key, value in default_settings(settings):
        _write(composed, key, value)
    for setting in settings:
        _write(composed, setting.key, setting.value)
    _pass_bypass_correction(composed)
    check_values(functools.partial(OmegaConf.select, composed))
    return composed


def dump_config(composed: DictConfig) -> str:
    """The composed configuration as YAML, with interpolations resolved."""
    return str(OmegaConf.to_yaml(composed, resolve=True))


@functools.cache
def _compose_own(*overrides: str) -> DictConfig:
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "trainer" / "config"
    backup = get_gh_backup()  # a user's script may use Hydra itself
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return compose("ppo_trainer", overrides=list(overrides))
    except HydraException as error:
        raise ConfigError(f"verl's configuration cannot be composed with {', '.join(overrides)}: {error}") from error
    finally:
        restore_gh_from_backup(backup)


def _check_key(own: DictConfig, setting: Setting) -> None:
    """Checks that verl has a key: in its YAML, in the dataclass of a node, or in a mapping that verl leaves empty."""
    name = ".".join(setting.key)
    check_reserved(name)
    node: Any = own
    for depth, part in enumerate(setting.key):
        where = ".".join(setting.key[:depth])
        if not isinstance(node, DictConfig):
            raise ConfigError(f"verl's {where} is one value, not a mapping")
        if not node:
            return
        if part not in node:
            known = sorted({*map(str, node.keys()), *_declared(node)} - {"_target_"})
            if setting.is_unchecked or part in known:
                return
            raise ConfigError(
                f"verl's configuration has no key {'.'.join(setting.key[: depth + 1])!r}.{suggest(part, known)} "
                f"Keys of {where or 'the top level'}: {', '.join(known)}. "
                f"Write a key that verl reads but does not declare as '+{name}'."
            )
        node = node.get(part)
        if node is None:
            return


def _write(composed: DictConfig, key: tuple[str, ...], value: Any) -> None:
    node: Any = composed
    for part in key[:-1]:
        if node.get(part) is None:
            with open_dict(node):
                node[part] = {}
        node = node[part]
    with open_dict(node):
        try:
            node[key[-1]] = value
        except OmegaConfBaseException as error:
            raise ConfigError(f"verl's {'.'.join(key)} = {value!r}: {error}") from error


def _declared(node: DictConfig) -> set[str]:
    """Fields of the dataclass that a node becomes; verl's YAML files omit some of them."""
    target = node.get("_target_", None)
    if not isinstance(target, str):
        return set()
    module, _, name = target.rpartition(".")
    cls = getattr(importlib.import_module(module), name, None)
    return {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


def _pass_bypass_correction(composed: DictConfig) -> None:
    """Passes the correction on to the loss, because verl's V1 trainer does not and so ignores rejections.

    https://github.com/volcengine/verl/blob/v0.9.1/verl/trainer/ppo/rollout_corr_helper.py (``apply_bypass_mode``)
    """
    if composed.algorithm.rollout_correction.bypass_mode:
        loss = composed.actor_rollout_ref.actor.policy_loss
        with open_dict(loss):
            loss.loss_mode = "bypass_mode"
            loss.rollout_correction = composed.algorithm.rollout_correction
