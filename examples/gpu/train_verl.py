"""Trains the tool-use task of measure.py with verl, sampled by the rollout backend ``transformers`` or by vLLM.

    python examples/gpu/train_verl.py --out runs/verl                            # one GPU, of the shape of Qwen3-0.6B
    python examples/gpu/train_verl.py --out runs/vllm --engine vllm --gpus 8     # a replica on each of eight
    python examples/gpu/train_verl.py --out runs/tiny --tiny                     # a few minutes on a CPU, the same code

With ``transformers`` it needs neither vLLM nor flash attention, and downloads nothing. ``OUT/report.json`` and
``OUT/report.md`` contain the reward curve, tokens per second of sampling and training, GPU utilization, and the
difference between the probabilities of sampler and trainer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from warm_start import SIZES, describe, warm_start

import agentlightning as agl
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems

REPORTED = {
    "reward": "reward",
    "val_reward": "val_reward",
    "gap_of_probabilities": "training/rollout_probs_diff_max",
    "importance_weight": "rollout_corr/rollout_is_mean",
    "sampled_tokens_per_s": "sample_tokens_per_s",
    "trained_tokens_per_s": "train_tokens_per_s",
    "sampling_s": "timing_s/gen",
    "update_s": "timing_s/update_actor",
    "weights_s": "timing_s/update_weights",
    "step_s": "timing_s/step",
    "gpu_utilization": "gpu_utilization",
    "gpu_memory_gb": "gpu_memory_gb_max",
    "grad_norm": "actor/grad_norm",
    "optimizer_steps": "optimizer_steps",
}
"""Names in the report, and the run's metrics."""


def train(directory: Path, model: Path, size: dict[str, Any], device: str, engine: str, gpus: int) -> dict[str, Any]:
    """Trains from ``model``; returns the status and the curve, step by step."""
    settings = size["training"]
    config: dict[str, Any] = {
        "trainer.device": device,
        "trainer.n_gpus_per_node": gpus,
        "trainer.total_training_steps": settings["steps"],
        "trainer.test_freq": settings["eval_every"] or -1,
        "data": {"max_prompt_length": 192, "max_response_length": 64},
        "data.train_batch_size": settings["tasks_per_step"],
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.rollout.name": engine,
        "actor_rollout_ref.rollout.n": settings["rollouts_per_task"],
        "actor_rollout_ref.actor.ppo_mini_batch_size": max(1, settings["tasks_per_step"] // 4),
        "actor_rollout_ref.actor.optim.lr": settings["lr"],
    }
    if engine == "vllm":
        tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
        config |= {"actor_rollout_ref.rollout.engine_kwargs.vllm": tools}
    if device == "cuda":  # flash attention would have to be built
        config |= {
            "actor_rollout_ref.model.use_remove_padding": False,
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 65536,
        }
    trainer = agl.Trainer(
        algorithm=agl.VERL(config, rollout_timeout_s=120.0),
        run_dir=directory / "run",
        trackers=["jsonl"],
        n_runners=size["runners"],
        max_concurrency=64,
    )
    started = time.monotonic()
    validation = make_problems("val", size["validation"]) if settings["eval_every"] else None
    status = trainer.fit(calculator_agent, make_problems("train", 4096), validation).status
    seconds = time.monotonic() - started
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    steps: dict[int, dict[str, float]] = {}
    for entry in map(json.loads, lines):
        if "step" in entry:
            steps.setdefault(entry["step"], {}).update(
                {name: entry[metric] for name, metric in REPORTED.items() if metric in entry}
            )
    return {"status": status, "seconds": seconds, "curve": [{"step": step, **steps[step]} for step in sorted(steps)]}


def to_markdown(report: dict[str, Any]) -> str:
    """Formats the report: medians over the steps, then the reward of each step."""
    machine, curve = report["machine"], report["run"]["curve"]
    lines = [
        f"# verl, {report['warm_start']['parameters'] / 1e6:.0f}M parameters, {report['engine']}, "
        f"{report['gpus']} x {machine['gpu']}",
        "",
        ", ".join(f"{key} {value}" for key, value in machine.items()),
        "",
        "| | median of the steps | largest |",
        "|---|---|---|",
    ]
    for name in REPORTED:
        values = [entry[name] for entry in curve if name in entry]
        if values:
            lines.append(f"| {name} | {statistics.median(values):.4g} | {max(values):.4g} |")
    lines += ["", f"{report['run']['seconds']:.0f} s in all.", "", "| step | reward | val_reward |", "|---|---|---|"]
    for entry in curve:
        said = [f"{entry[name]:.3f}" if name in entry else "" for name in ("reward", "val_reward")]
        lines.append(f"| {entry['step']} | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Makes the model, trains it, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the run and the report; must not exist")
    parser.add_argument("--tiny", action="store_true", help="a model of thousands of weights, for a CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers", help="inference engine")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, help="optimizer updates")
    options = parser.parse_args()
    size = SIZES["tiny" if options.tiny else "full"]
    if options.steps:
        size = {**size, "training": {**size["training"], "steps": options.steps}}
    options.out.mkdir(parents=True)
    torch_device, dtype = ("cuda:0", torch.bfloat16) if options.device == "cuda" else ("cpu", torch.float32)
    report: dict[str, Any] = {"machine": describe(torch_device), "engine": options.engine, "gpus": options.gpus}
    report["warm_start"] = warm_start(options.out / "start", size, torch_device, dtype)
    torch.cuda.empty_cache()  # frees the GPU for verl
    out = options.out.absolute()
    report["run"] = train(out, out / "start", size, options.device, options.engine, options.gpus)
    (options.out / "report.json").write_text(json.dumps(report, indent=2))
    (options.out / "report.md").write_text(to_markdown(report))
    print(to_markdown(report))


if __name__ == "__main__":
    main()
