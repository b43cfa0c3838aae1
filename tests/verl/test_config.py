"""Configurations of verl as users write them."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

import agentlightning as agl
from agentlightning_algorithms.shared.trained_model import TrainingRecord
from agentlightning_algorithms.verl import config, environment
from agentlightning_algorithms.verl.config import (
    CPU_DEFAULTS,
    DEFAULTS,
    REFUSED,
    Setting,
    _check_key,
    _compose_own,
    compose_config,
    dump_config,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl's imports, in whichever test they come first
REPO = Path(__file__).resolve().parents[2]


def test_our_defaults_override_defaults_of_verl_and_keys_of_the_user_override_both() -> None:
    composed = compose_config({"data": {"train_batch_size": 64}, "algorithm.gamma": 0.9})
    assert composed.data.train_batch_size == 64
    assert composed.algorithm.gamma == 0.9
    assert composed.algorithm.adv_estimator == "grpo"  # ours; verl's is gae
    assert composed.algorithm.lam == 1.0  # verl's


def test_the_defaults_have_the_documented_values() -> None:
    composed = compose_config({})
    actor, model = composed.actor_rollout_ref.actor, composed.actor_rollout_ref.model
    assert composed.algorithm.adv_estimator == "grpo"
    assert composed.algorithm.use_kl_in_reward is False
    assert (composed.data.train_batch_size, composed.data.max_prompt_length) == (32, 4096)
    assert composed.data.max_response_length == 2048
    assert (actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu) == (32, 4)
    assert (actor.optim.lr, actor.use_kl_loss, actor.entropy_coeff) == (1e-6, False, 0)
    assert model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert model.use_remove_padding is model.enable_gradient_checkpointing is True


def test_verl_has_the_key_of_each_of_our_defaults() -> None:
    for key, value in {**DEFAULTS, **CPU_DEFAULTS}.items():
        _check_key(_compose_own(), Setting(key, value, False))


READERS = """
    trainer/ppo/v1/*.py trainer/ppo/utils.py trainer/ppo/checkpoint_callback.py checkpoint_engine/*.py utils/config.py
    utils/tracking.py workers/engine_workers.py workers/rollout/*.py workers/rollout/vllm_rollout/*.py
""".split()
"""Files of verl that read the sections of the trainer; the workers of verl take the other sections whole."""
SECTIONS = "algorithm data trainer actor_rollout_ref.rollout".split()
TAKEN_WHOLE = """
    algorithm.kl_ctrl algorithm.rollout_correction actor_rollout_ref.actor actor_rollout_ref.model actor_rollout_ref.ref
    actor_rollout_ref.nccl_timeout actor_rollout_ref.rollout.profiler actor_rollout_ref.rollout.disaggregation critic
    distillation global_profiler model_engine ray_kwargs.ray_init transfer_queue
""".split()


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(node, dict) and node:
        for name, child in node.items():
            yield from leaves(child, (*path, str(name)))
    elif path[-1] != "_target_":
        yield path


def is_below(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def test_each_key_of_verl_is_read_by_verls_v1_trainer_or_refused_by_name() -> None:
    origin = importlib.util.find_spec("verl")
    assert origin is not None
    assert origin.origin is not None
    root, own = Path(origin.origin).parent, Path(config.__file__).parent
    files = [*own.glob("*.py"), *(file for pattern in READERS for file in root.glob(pattern))]
    sources = "".join(file.read_text() for file in files if file.name != "config.py" or file.parent != own)
    read = set(re.findall(r"""[.\["'](\w+)""", sources))
    composed = OmegaConf.to_container(_compose_own())
    keys = {".".join(path): path for path in leaves(composed)}
    unknown = [
        key
        for key, path in keys.items()
        if not is_below(key, REFUSED) and not is_below(key, TAKEN_WHOLE)
        if not (is_below(key, SECTIONS) and path[-1] in read)
    ]
    assert unknown == []
    assert [key for key in REFUSED if not any(is_below(name, [key]) for name in keys)] == [], "verl has no such key"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"algorithm": {"adv_estimater": "grpo"}}, "'algorithm.adv_estimater'. Did you mean 'adv_estimator'?"),
        ({"algoritm": {"gamma": 1}}, "'algoritm'. Did you mean 'algorithm'?"),
        ({"actor_rollout_ref.actor.optim.learning": 1}, "'actor_rollout_ref.actor.optim.learning'"),
        ({"trainer": {"device": {"name": "cpu"}}}, "trainer.device is one value, not a mapping"),
        ({"data.train_files": "x.parquet"}, "data.train_files cannot be set: the tasks are the trainer's"),
        ({"trainer.v1.trainer_mode": "separate_async"}, "supported: sync, colocate_async"),
        ({"data": {"truncation": "left"}}, "data.truncation cannot be set: a prompt of more than data.max_prompt"),
        ({"actor_rollout_ref.rollout.multi_turn.enable": True}, "multi_turn.enable cannot be set: the agents are"),
        ({"custom_reward_function.path": "x.py"}, "custom_reward_function.path cannot be set: agents emit their"),
        (
            {"trainer.device": "cpu", "actor_rollout_ref.rollout.engine_kwargs.vllm.a": 1},
            "engine_kwargs.vllm.a cannot be set: the rollout backend transformers does not read it",
        ),
        (
            {"actor_rollout_ref.actor": {"use_dynamic_bsz": True, "ppo_micro_batch_size_per_gpu": 2}},
            "ppo_micro_batch_size_per_gpu cannot be set: actor_rollout_ref.actor.use_dynamic_bsz = True, so that",
        ),
        (
            {"actor_rollout_ref.actor": {"ppo_max_token_len_per_gpu": 99, "ppo_micro_batch_size_per_gpu": 2}},
            "ppo_max_token_len_per_gpu cannot be set: actor_rollout_ref.actor.use_dynamic_bsz = False, so that",
        ),
        ({"data.train_batch_size": 33}, "train_batch_size = 33 is not a multiple"),
        (
            {"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": 24},
            "train_batch_size = 32 is not a multiple of critic.ppo_mini_batch_size = 24",
        ),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "low_var_kl"},
            "algorithm.kl_penalty = 'low_var_kl': in the reward the expected gradient of this estimator does not hold",
        ),
        (
            {"actor_rollout_ref.actor": {"use_kl_loss": True, "kl_loss_type": "k1"}},
            "actor.kl_loss_type = 'k1': in the loss the expected gradient of this estimator does not hold the policy",
        ),
        ({"actor_rollout_ref.rollout.n": 0}, "rollout.n = 0: a task needs at least one rollout"),
        ({"actor_rollout_ref.rollout.temperature": 0.0}, "temperature must be above 0"),
        (
            {"actor_rollout_ref": {"rollout.name": "transformers", "model.custom_chat_template": "{{ x }}"}},
            "custom_chat_template = '{{ x }}': the rollout backend transformers loads the model as it was saved",
        ),
    ],
)
def test_the_error_about_a_key_or_value_suggests_a_valid_one(config: dict[str, Any], message: str) -> None:
    with pytest.raises(agl.ConfigError, match=re.escape(message)):
        compose_config(config)


def test_mappings_that_are_open_in_verl_accept_any_key() -> None:
    key = "actor_rollout_ref.model.override_config"
    composed = compose_config({key: {"rope": {"factor": 2}}, "actor_rollout_ref.rollout.engine_kwargs.vllm": {"a": 1}})
    assert composed.actor_rollout_ref.model.override_config.rope.factor == 2
    assert composed.actor_rollout_ref.rollout.engine_kwargs.vllm.a == 1


def test_a_key_that_only_a_dataclass_of_verl_has_is_accepted() -> None:
    key = "actor_rollout_ref.actor.fsdp_config.mixed_precision"
    composed = compose_config({key: {"param_dtype": "bf16"}})
    assert composed.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype == "bf16"


def test_a_key_with_a_plus_is_added_without_a_check() -> None:
    assert compose_config({"+trainer.mine": 1}).trainer.mine == 1


def test_a_size_of_micro_batches_turns_off_those_sized_by_tokens() -> None:
    actor = "actor_rollout_ref.actor"
    assert compose_config({}).critic.use_dynamic_bsz is True
    composed = compose_config({f"{actor}.ppo_micro_batch_size_per_gpu": 2})
    assert composed.actor_rollout_ref.actor.use_dynamic_bsz is False
    assert composed.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz is composed.critic.use_dynamic_bsz is False
    assert compose_config({f"{actor}.ppo_max_token_len_per_gpu": 99}).actor_rollout_ref.actor.use_dynamic_bsz is True


@pytest.mark.parametrize(
    ("config", "merges"),
    [
        ({}, True),
        ({"actor_rollout_ref.rollout.name": "transformers"}, False),
        ({"trainer.device": "cpu"}, False),
        ({"trainer.device": "cpu", "actor_rollout_ref.rollout.name": "vllm"}, True),
    ],
    ids=["default", "transformers", "cpu", "vllm on a cpu"],
)
def test_an_engine_whose_endpoint_does_not_offer_the_adapter_gets_merged_weights(
    config: dict[str, Any], merges: bool
) -> None:
    config |= {"actor_rollout_ref.model.lora_rank": 4}
    assert compose_config(config).actor_rollout_ref.model.lora.merge is merges
    if merges:
        with pytest.raises(agl.ConfigError, match=r"lora\.merge = False: agents would sample from the model without"):
            compose_config({**config, "actor_rollout_ref.model.lora.merge": False})


def test_vllm_on_a_cpu_gets_its_keys_and_keeps_those_of_the_user() -> None:
    vllm = {"enable_auto_tool_choice": True, "kv_cache_memory_bytes": 1}
    rollout = {"name": "vllm", "engine_kwargs": {"vllm": vllm}}
    composed = compose_config({"trainer.device": "cpu", "actor_rollout_ref": {"rollout": rollout}}).actor_rollout_ref
    assert composed.rollout.engine_kwargs.vllm.worker_extension_cls.endswith(".vllm_extension.ReloadingExtension")
    assert (composed.rollout.enforce_eager, composed.rollout.enable_sleep_mode) == (True, False)
    assert composed.rollout.engine_kwargs.vllm.kv_cache_memory_bytes == 1
    assert composed.rollout.engine_kwargs.vllm.enable_auto_tool_choice is True


def test_validation_without_tasks_is_refused(tmp_path: Path) -> None:
    batch = {"data.train_batch_size": 1, "actor_rollout_ref.actor.ppo_mini_batch_size": 1}
    algorithm = agl.VERL({**batch, "trainer.test_freq": 5})
    algorithm.context = agl.RunContext()
    with pytest.raises(agl.ConfigError, match="trainer.test_freq = 5 needs a val_dataset"):
        algorithm._complete(["a"], None, tmp_path)


def test_the_composed_configuration_can_be_printed() -> None:
    printed = yaml.safe_load(agl.VERL({"data.max_response_length": 99}).print_config())
    assert printed["actor_rollout_ref"]["rollout"]["response_length"] == 99  # a reference, filled in
    assert dump_config(compose_config({})) == dump_config(compose_config({}))


def test_agl_train_prints_the_configuration_without_importing_verl_ray_or_torch(tmp_path: Path) -> None:
    algorithm = {"name": "verl", "config": {"trainer.device": "cpu", "data.train_batch_size": 64}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({"agent": "mine:agent", "algorithm": algorithm}))
    program = (
        "import sys; from agentlightning.cli import main\n"
        "try: main()\n"
        "finally: print({'ray', 'tensordict', 'torch', 'transformers', 'verl'} & set(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, "train", "train.yaml", "--print-config"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    said, composed = yaml.safe_load_all(ended.stdout)
    assert said["algorithm"] == algorithm
    assert composed["data"]["train_batch_size"] == 64
    assert composed["actor_rollout_ref"]["rollout"]["name"] == "transformers"
    assert ended.stderr == "set()\n"


def test_the_hydra_configuration_of_the_users_script_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: 1")
    _compose_own.cache_clear()
    with initialize_config_dir(str(tmp_path), version_base=None):
        compose_config({})
        assert compose("mine").a == 1


def test_bypass_mode_is_set_in_the_loss_configuration() -> None:
    composed = compose_config({"algorithm.rollout_correction": {"bypass_mode": True, "rollout_rs": "token_k1"}})
    loss = composed.actor_rollout_ref.actor.policy_loss
    assert (loss.loss_mode, loss.rollout_correction.rollout_rs) == ("bypass_mode", "token_k1")


def test_the_error_about_an_unsupported_verl_names_the_supported_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.8.2")
    with pytest.raises(
        agl.ConfigError, match=re.escape(f"verl 0.8.2 is installed; supported is verl{environment.SUPPORTED}")
    ):
        compose_config({})


@pytest.mark.parametrize("settings", [{"rows": "rollout"}, {"rollout_timeout_s": 0}, {"drain_timeout_s": -1}])
def test_invalid_settings_of_our_algorithm_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(agl.ConfigError, match=next(iter(settings))):
        agl.VERL({}, **settings)


def test_the_seed_of_the_run_replaces_only_seeds_that_are_not_given(tmp_path: Path) -> None:
    batch = {"data.train_batch_size": 2, "actor_rollout_ref.actor.ppo_mini_batch_size": 2}
    algorithm = agl.VERL({**batch, "actor_rollout_ref.rollout.seed": 5})
    algorithm.context = agl.RunContext(seed=7)
    config = algorithm._complete(["a", "b"], None, tmp_path)
    assert (config.data.seed, config.actor_rollout_ref.actor.data_loader_seed, config.critic.data_loader_seed) == (
        7,
        7,
        7,
    )
    assert config.actor_rollout_ref.rollout.seed == 5


def test_verl_can_load_the_dataset_class_of_the_tasks(tmp_path: Path) -> None:
    batch = {"data.train_batch_size": 2, "actor_rollout_ref.actor.ppo_mini_batch_size": 2}
    algorithm = agl.VERL(batch)
    algorithm.context = agl.RunContext()
    data = algorithm._complete(["a", "b"], None, tmp_path).data
    importlib.import_module("agentlightning_algorithms.verl.registration")  # verl's plugins fail to load under pytest
    module = importlib.import_module(data.custom_cls.path.removeprefix("pkg://"))
    assert len(getattr(module, data.custom_cls.name)(data.train_files)) == 2


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"algorithm.adv_estimator": "gae"}, "adv_estimator = 'gae' does not compare single calls"),
        ({"algorithm.use_kl_in_reward": True}, "use_kl_in_reward changes the rewards of whole rollouts"),
    ],
)
async def test_a_credit_rule_is_refused_with_settings_for_whole_rollouts(
    config: dict[str, Any], complaint: str
) -> None:
    algorithm = agl.VERL({**CPU_DEFAULTS, **config})
    algorithm.context = agl.RunContext(adapter=agl.TraceToTriplet(credit="nearest"), seed=7)
    with pytest.raises(agl.ConfigError, match=re.escape(complaint)):
        await algorithm.run(["task"])


@pytest.mark.parametrize("config", [{}, {"actor_rollout_ref": {"model": {"path": "other"}}}])
def test_a_training_from_a_run_directory_begins_with_the_best_model(config: dict[str, Any], tmp_path: Path) -> None:
    TrainingRecord(algorithm="sft", base="Qwen/Qwen2.5-0.5B-Instruct").write(tmp_path)
    (tmp_path / "best").mkdir()
    algorithm = agl.VERL(config, model=str(tmp_path))
    assert algorithm.composed is not None
    assert algorithm.composed.actor_rollout_ref.model.path == str(tmp_path / "best")
    assert yaml.safe_load(algorithm.print_config())["actor_rollout_ref"]["model"]["path"] == str(tmp_path / "best")
    with pytest.raises(agl.ConfigError, match="there is no such directory"):
        agl.VERL(config, model=str(tmp_path / "missing"))


def agl_says(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "agentlightning", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_a_new_agent_for_verl_passes_the_dry_run(tmp_path: Path) -> None:
    agl_says(tmp_path, "new", "agent", "word-adder", "--verl")
    assert "ok    algorithm    VERL" in agl_says(tmp_path / "word-adder", "train", "config.yaml", "--dry-run")


@pytest.mark.parametrize(
    "file", sorted((REPO / "examples").glob("*/train_verl.yaml")), ids=lambda file: file.parent.name
)
def test_verl_accepts_the_settings_of_an_example(file: Path) -> None:
    algorithm = yaml.safe_load(file.read_text())["algorithm"]
    assert algorithm.pop("name") == "verl"
    composed = compose_config(algorithm["config"])
    assert composed.actor_rollout_ref.rollout.n > 1
    assert composed.trainer.total_training_steps > 0


def test_an_example_for_verl_passes_the_dry_run() -> None:
    assert "ok    algorithm    VERL" in agl_says(REPO, "train", "examples/game/train_verl.yaml", "--dry-run")


def test_the_configuration_of_the_algorithm_is_verls_as_omegaconf_and_it_has_the_client() -> None:
    algorithm = agl.VERL({"trainer.total_training_steps": 3, "actor_rollout_ref": {"model": {"path": "any"}}})
    assert isinstance(algorithm.config, DictConfig)
    assert algorithm.config.trainer.total_training_steps == 3
    assert algorithm.config.data.train_batch_size == 32
    store = agl.InMemoryLightningStore()
    algorithm.set_store(store)
    assert algorithm.get_client() is store
