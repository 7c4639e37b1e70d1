"""A real vLLM engine in a process of its own, and a trainer engine's client of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 600.0  # half a minute on two idle cores
CALL_S = 120.0


class Engine:
    """`start` it, wait until it is `ready`, then call it."""

    def __init__(self, model: Path, workers: int = 1) -> None:
        self._command = [sys.executable, "-m", "tests.support.vllm_process", str(model), str(workers)]
        cores = sorted(os.sched_getaffinity(0))
        # A single worker needs no processes of its own, each of which imports vLLM for 10 s and more.
        own = (
            {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(workers))}
            if workers > 1
            else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        )
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        self._environment = os.environ | quiet | {"VLLM_CPU_KVCACHE_SPACE": "1"} | own

    def start(self) -> Engine:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*self._command, str(theirs.fileno())], cwd=ROOT, env=self._environment, pass_fds=[theirs.fileno()],
                start_new_session=True,
            )  # fmt: skip
        self._answers = ours.makefile("r")
        self._calls = ours
        return self

    def ready(self) -> Engine:
        self._calls.settimeout(START_S)
        assert self._answer() == "ready"
        self._calls.settimeout(CALL_S)
        return self

    def kill(self) -> None:
        """Kill all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._answers.close()
        self._calls.close()

    def _answer(self) -> Any:
        if not (line := self._answers.readline()):
            raise ConnectionError("the engine's process has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._calls.sendall((json.dumps([method, *arguments]) + "\n").encode())
        return self._answer()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._ask("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._ask("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask("finish_weight_update", weight_version)
        self._ask("reset_prefix_cache")

    def version(self) -> str:
        return str(self._ask("get_weight_version"))

    def tokens(self, prompt: list[int]) -> list[int]:
        """The eight tokens that it generates."""
        return list(self._ask("tokens", prompt))


class Server:
    """vLLM's HTTP server of a model of `words` words, in a process of its own."""

    def __init__(self, model: Path, words: int) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(words)}, unk_token="0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--host=127.0.0.1",
             f"--port={port}", "--max-model-len=512", "--dtype=float32", "--enforce-eager",
             "--served-model-name=policy", "--weight-transfer-config", '{"backend": "smb"}'],
            cwd=ROOT, env=os.environ | settings | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip

    def stop(self) -> None:
        """Kill all its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def tokens(self, prompt: list[int], count: int = 8) -> list[int]:
        """The tokens that it generates."""
        asked = {"model": "policy", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            return [int(word) for word in json.load(answer)["choices"][0]["text"].split()]


def serve(model: str, workers: int, descriptor: int) -> None:
    """An engine's process: one JSON line for each call, one for each answer."""
    import vllm
    from vllm.config import WeightTransferConfig

    llm = vllm.LLM(
        model, skip_tokenizer_init=True, dtype="float32", max_model_len=128, enforce_eager=True, seed=0,
        tensor_parallel_size=workers, distributed_executor_backend="mp" if workers > 1 else "uni",
        weight_transfer_config=WeightTransferConfig(backend="smb"),
    )  # fmt: skip

    def tokens(prompt: list[int]) -> list[int]:
        asked = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        return list(llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)[0].outputs[0].token_ids)

    with socket.socket(fileno=descriptor) as calls, calls.makefile("r") as lines:
        calls.sendall(b'{"value": "ready"}\n')
        for line in lines:
            method, *arguments = json.loads(line)
            try:
                value = tokens(*arguments) if method == "tokens" else getattr(llm, method)(*arguments)
                answer = {"value": value if isinstance(value, (str, list)) else None}
            except Exception as error:  # noqa: BLE001 - the caller gets it
                answer = {"error": f"{type(error).__name__}: {error}"}
            calls.sendall((json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
