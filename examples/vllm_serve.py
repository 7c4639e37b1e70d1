"""A trainer updates a real vLLM server by one call. Needs vLLM, on a GPU or a CPU (docs/stacks.md).

It makes a Llama of 0.6 M random weights, whose words are numbers: nothing is downloaded, and what it says has no sense.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time

import requests
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

import smb
import smb.torch.vllm

smb.torch.vllm.register()
from smb.torch.vllm.trainer import SmbTrainerInitInfo  # noqa: E402 - needs vLLM

WORDS = 512


def small_model(directory: str) -> LlamaForCausalLM:
    """Save a model and its tokenizer in a directory, as vLLM reads them."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    return model


def main() -> None:
    """Start a cluster and a server, update its weights three times, and print what it says each time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with tempfile.TemporaryDirectory() as directory, smb.LocalCluster() as cluster:
        model = small_model(directory)
        server = subprocess.Popen(  # noqa: S603
            # As `vllm serve`, which the CPU build does not have.
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={directory}", "--host=127.0.0.1",
             f"--port={port}", "--max-model-len=128", "--dtype=float32", "--enforce-eager",
             "--served-model-name=policy", "--weight-transfer-config", '{"backend": "smb"}'],
            env=os.environ | settings,
        )  # fmt: skip
        try:
            while not serves(url):
                if server.poll() is not None:
                    raise SystemExit("the server has ended; what it said stands above")
                time.sleep(0.5)
            trainer = WeightTransferTrainerFactory.trainer_init(
                init_info=SmbTrainerInitInfo(name="policy", coordinator=cluster.address, rank=0),
                client=HTTPVLLMWeightSyncClient(url),
                source=ModuleSource(model),
            )
            print("before:", says(url))
            for _ in range(3):
                with torch.no_grad():  # instead of a step of training
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter) * 0.05)
                trainer.send_weights()
                version = requests.get(f"{url}/weight_info", timeout=60).json()["weight_version"]
                print(f"generation {version}: {says(url)}")
            trainer.shutdown()
        finally:
            server.terminate()
            server.wait()


def serves(url: str) -> bool:
    """Return True once the server answers."""
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.ConnectionError:
        return False


def says(url: str) -> str:
    """Return the six words that follow a prompt."""
    asked = {"model": "policy", "prompt": "5 17 99", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = requests.post(f"{url}/v1/completions", json=asked, timeout=60)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"]).strip()


if __name__ == "__main__":
    main()
