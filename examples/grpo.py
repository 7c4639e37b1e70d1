"""GRPO by TRL's AsyncGRPOTrainer on a CPU, with engines that follow the policy, come and go. Needs the extra `trl`.

A Llama of 10 000 random weights learns to say the word "7". Two engines generate, each in a process of its own, and
follow the published policy. One is killed in the middle, and another one joins. The trainer notices neither.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import statistics
import tempfile
import threading
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import smb
import smb.torch

WORDS, WANTED, PROMPT, COMPLETION, GROUP = 16, 7, 3, 4, 8
STEPS = int(os.environ.get("GRPO_STEPS", "40"))
PROCESSES = multiprocessing.get_context("spawn")


def save_model(directory: str) -> None:
    """Save a small model and its tokenizer, whose words are numbers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="0").save_pretrained(directory)  # noqa: S106


def engine(number: int, address: str, directory: str, samples: Any) -> None:
    """Follow the policy and generate groups of completions with it, until killed."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    torch.set_num_threads(1)
    torch.manual_seed(number)
    draw = random.Random(number)  # noqa: S311 - prompts
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    client = smb.connect(address)
    follower = smb.torch.follow(client, "policy", timeout=300)
    follower.wait(timeout=300)
    for group in range(1_000_000):
        if follower.latest > follower.generation:
            follower.load(model)
        tokens = torch.tensor([[draw.randrange(2, WORDS) for _ in range(PROMPT)]] * GROUP)
        logprobs = torch.zeros(GROUP, PROMPT)
        with torch.no_grad():
            for _ in range(COMPLETION):
                scores = model(tokens).logits[:, -1].log_softmax(-1)
                chosen = torch.multinomial(scores.exp(), 1)
                tokens = torch.cat([tokens, chosen], 1)
                logprobs = torch.cat([logprobs, scores.gather(1, chosen)], 1)
        rewards = (tokens[:, PROMPT:] == WANTED).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        mask = [0] * PROMPT + [1] * COMPLETION
        for ids, old, advantage, reward in zip(tokens, logprobs, advantages, rewards, strict=True):
            samples.send(
                RolloutSample(
                    prompt=[], completion=[], input_ids=ids.numpy(), completion_mask=torch.tensor(mask).numpy(),
                    old_log_probs=old.numpy(), advantage=advantage.item(), model_version=follower.generation,
                    group_id=number * 1_000_000 + group, metrics={"reward": reward.item()},
                )
            )  # fmt: skip


class Engines:
    """TRL's RolloutWorkerProtocol: starts engines, and at a third and two thirds of the run kills one and adds one."""

    def __init__(self, address: str, directory: str) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=32)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._arguments = (address, directory)
        self._processes: list[Any] = []

    def start(self) -> None:
        """Start two engines."""
        for _ in range(2):
            self._add()

    def _add(self) -> None:
        ours, theirs = PROCESSES.Pipe(duplex=False)  # of its own: a process that is killed would keep a queue's lock
        number = len(self._processes)
        self._processes.append(PROCESSES.Process(target=engine, args=(number, *self._arguments, theirs), daemon=True))
        self._processes[-1].start()
        theirs.close()
        threading.Thread(target=self._take, args=(ours,), daemon=True).start()

    def _take(self, samples: Any) -> None:
        with suppress(EOFError, OSError):  # the engine was killed
            while True:
                self.rollout_buffer.put(samples.recv())

    def stop(self) -> None:
        """Kill the engines."""
        for process in self._processes:
            process.kill()
            process.join()

    def update_model_version(self, model_version: int) -> None:
        """Engines follow by themselves."""
        if model_version == STEPS // 3:
            print(f"generation {model_version}: engine 0 is killed", flush=True)
            self._processes[0].kill()
        if model_version == STEPS // 2:
            print(f"generation {model_version}: engine {len(self._processes)} joins", flush=True)
            self._add()

    def check_health(self, stale_after_s: float) -> None:  # noqa: ARG002
        """Raise if no engine lives."""
        if not any(process.is_alive() for process in self._processes):
            raise RuntimeError("all engines are dead")


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, q_ends: torch.Tensor, k_ends: torch.Tensor,
    *_: Any, softmax_scale: float, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """Compute what TRL has a GPU's FlashAttention-3 compute: each segment of queries sees the end of its own keys."""
    parts = []
    for (q0, q1), (k0, k1) in zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True):
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        one = (each.transpose(0, 1) for each in (query[q0:q1], key[k0:k1], value[k0:k1]))
        parts.append(torch.nn.functional.scaled_dot_product_attention(*one, attn_mask=mask, scale=softmax_scale))
    return torch.cat([part.transpose(0, 1) for part in parts])


def without_a_gpu() -> None:
    """Have TRL's trainer run on a CPU: it takes FlashAttention-3 from the Hub, and asks a GPU for its peak speed."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


def main() -> None:
    """Train, and print the mean reward of each fifth of the run."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from smb.torch.trl import WeightTransfer

    without_a_gpu()
    with tempfile.TemporaryDirectory() as directory, smb.LocalCluster() as cluster:
        save_model(directory)
        settings = AsyncGRPOConfig(
            output_dir=f"{directory}/run", max_steps=STEPS, learning_rate=1e-2, per_device_train_batch_size=32,
            gradient_accumulation_steps=1, num_generations=GROUP, max_completion_length=COMPLETION, token_budget=0,
            use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        transfer = WeightTransfer("policy", coordinator=cluster.address)
        trainer = AsyncGRPOTrainer(
            model=directory,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["2 3 4"]}),
            rollout_worker=Engines(cluster.address, directory),
            weight_transfer=transfer,
        )
        trainer.train()
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        fifth = len(rewards) // 5
        means = [statistics.mean(rewards[start : start + fifth]) for start in range(0, 5 * fifth, fifth)]
        print(f"{transfer.generation} generations; mean rewards: {', '.join(f'{each:.2f}' for each in means)}")


if __name__ == "__main__":
    main()
