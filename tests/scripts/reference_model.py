#!/usr/bin/env python3
"""An independent float reference for the families of models that Tidemill computes.

Reads a Hugging Face directory (config.json and safetensors, in one file or in shards) and prints, as JSON, the logits of
every position of one sequence. Plain numpy, one position after another where that is simplest; written from the papers and
the definitions of the transformers library, and from nothing in this repository. Slow and meant to be read.

usage: reference_model.py DIRECTORY '[1, 2, 3]'
"""

import json
import math
import pathlib
import sys

import numpy as np

FLOATS = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


def read_safetensors(path):
    """All tensors of one file, as float32."""
    raw = path.read_bytes()
    n_header = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n_header])
    data = raw[8 + n_header :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] == "BF16":
            upper = np.frombuffer(data[begin:end], dtype=np.uint16).astype(np.uint32)
            values = (upper << 16).view(np.float32)
        else:
            values = np.frombuffer(data[begin:end], dtype=FLOATS[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"]).astype(np.float32)
    return tensors


def read_weights(directory):
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return read_safetensors(directory / "model.safetensors")
    tensors = {}
    for shard in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        tensors.update(read_safetensors(directory / shard))
    return tensors


def rms_norm(x, weight, epsilon):
    """Zhang and Sennrich 2019, over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def silu(x):
    return x / (1.0 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def yarn(inverse, theta, n, scaling, context):
    """Peng et al. 2023, section 3.4; returns frequencies and the factor on cosine and sine."""
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or context

    def m(scale):
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            attention = m(scaling["mscale"]) / m(scaling["mscale_all_dim"])
        else:
            attention = m(1.0)

    def dimension_of(rotations):
        return n * math.log(original / (rotations * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low = dimension_of(scaling.get("beta_fast") or 32.0)
    high = dimension_of(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(n // 2) - low) / (high - low), 0.0, 1.0)
    return inverse / factor * ramp + inverse * (1.0 - ramp), attention


def rope_tables(n_positions, n, theta, scaling, context):
    """Cosines and sines, [positions, n / 2]."""
    inverse = theta ** (-np.arange(0, n, 2, dtype=np.float64) / n)
    attention = 1.0
    kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
    if kind == "linear":
        inverse = inverse / scaling["factor"]
    elif kind == "llama3":
        wavelength = 2.0 * math.pi / inverse
        original = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = (original / wavelength - low) / (high - low)
        between = (1.0 - smooth) * inverse / scaling["factor"] + smooth * inverse
        scaled = np.where(wavelength > original / low, inverse / scaling["factor"], inverse)
        is_between = (wavelength >= original / high) & (wavelength <= original / low)
        inverse = np.where(is_between, between, scaled)
    elif kind == "yarn":
        inverse, attention = yarn(inverse, theta, n, scaling, context)
    elif kind != "default":
        raise SystemExit(f"rope type {kind}")
    angles = np.arange(n_positions)[:, None] * inverse[None, :]
    return np.cos(angles) * attention, np.sin(angles) * attention


def rotate(x, tables):
    """x: [positions, heads, n]; the second half of a head turns against the first."""
    cosine, sine = (table[:, None, :] for table in tables)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


class Model:
    def __init__(self, directory):
        directory = pathlib.Path(directory)
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = {name: value.astype(np.float64) for name, value in read_weights(directory).items()}
        self.kind = self.config["model_type"]
        self.is_gemma = self.kind == "gemma3_text"
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config.get("num_key_value_heads") or self.heads
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads

    def norm(self, name, x):
        weight = self.weights[name + ".weight"]
        return rms_norm(x, 1.0 + weight if self.is_gemma else weight, self.config["rms_norm_eps"])

    def linear(self, name, x):
        y = x @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return y if bias is None else y + bias

    def window(self, layer):
        """How many positions a row of a layer sees; None for all."""
        if self.kind in ("mistral", "mixtral"):
            return self.config["sliding_window"]
        if self.is_gemma:
            pattern = self.config.get("sliding_window_pattern", 6)
            return self.config["sliding_window"] if (layer + 1) % pattern else None
        return None

    def tables(self, layer, n_positions):
        config = self.config
        theta, scaling = config["rope_theta"], config.get("rope_scaling")
        if self.is_gemma and self.window(layer) is not None:
            theta, scaling = config["rope_local_base_freq"], None
        return rope_tables(n_positions, self.head_dim, theta, scaling, config["max_position_embeddings"])

    def attention(self, layer, x):
        prefix = f"model.layers.{layer}.self_attn."
        n = len(x)
        q = self.linear(prefix + "q_proj", x).reshape(n, self.heads, self.head_dim)
        k = self.linear(prefix + "k_proj", x).reshape(n, self.kv_heads, self.head_dim)
        v = self.linear(prefix + "v_proj", x).reshape(n, self.kv_heads, self.head_dim)
        if self.kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            q, k = self.norm(prefix + "q_norm", q), self.norm(prefix + "k_norm", k)
        tables = self.tables(layer, n)
        q, k = rotate(q, tables), rotate(k, tables)
        group = self.heads // self.kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        divisor = self.config["query_pre_attn_scalar"] if self.is_gemma else self.head_dim
        scores = np.einsum("qhd,khd->hqk", q, k) * divisor**-0.5
        query, key = np.arange(n)[:, None], np.arange(n)[None, :]
        seen = key <= query
        if self.window(layer) is not None:
            seen &= key > query - self.window(layer)
        scores = np.where(seen, scores, -np.inf)
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), v)
        return self.linear(prefix + "o_proj", mixed.reshape(n, -1))

    def gated(self, prefix, x, names=("gate_proj", "up_proj", "down_proj")):
        gate, up, down = (prefix + name for name in names)
        activation = gelu_tanh if self.is_gemma else silu
        return self.linear(down, activation(self.linear(gate, x)) * self.linear(up, x))

    def feed_forward(self, layer, x):
        if self.kind == "mixtral":
            return self.experts(f"model.layers.{layer}.block_sparse_moe.", x, ("w1", "w3", "w2"), True)
        prefix = f"model.layers.{layer}.mlp."
        if self.kind == "qwen3_moe":
            normalise = self.config.get("norm_topk_prob", False)
            return self.experts(prefix, x, ("gate_proj", "up_proj", "down_proj"), normalise)
        return self.gated(prefix, x)

    def experts(self, prefix, x, names, normalise):
        chances = softmax(self.linear(prefix + "gate", x))
        result = np.zeros_like(x)
        for row, chance in enumerate(chances):
            best = np.argsort(-chance, kind="stable")[: self.config["num_experts_per_tok"]]
            weights = chance[best]
            if normalise:
                weights = weights / weights.sum()
            for expert, weight in zip(best, weights):
                result[row] += weight * self.gated(f"{prefix}experts.{expert}.", x[row : row + 1], names)[0]
        return result

    def logits(self, tokens):
        x = self.weights["model.embed_tokens.weight"][np.array(tokens)]
        if self.is_gemma:
            x = x * math.sqrt(self.config["hidden_size"])
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            branch = self.attention(layer, self.norm(prefix + "input_layernorm", x))
            if self.is_gemma:
                x = x + self.norm(prefix + "post_attention_layernorm", branch)
                branch = self.feed_forward(layer, self.norm(prefix + "pre_feedforward_layernorm", x))
                x = x + self.norm(prefix + "post_feedforward_layernorm", branch)
            else:
                x = x + branch
                x = x + self.feed_forward(layer, self.norm(prefix + "post_attention_layernorm", x))
        x = self.norm("model.norm", x)
        tied = self.config.get("tie_word_embeddings", self.is_gemma)
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return x @ self.weights[head].T


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    logits = Model(sys.argv[1]).logits(json.loads(sys.argv[2]))
    json.dump([[round(float(value), 6) for value in row] for row in logits], sys.stdout)


if __name__ == "__main__":
    main()
