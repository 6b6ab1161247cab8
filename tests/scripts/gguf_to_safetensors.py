#!/usr/bin/env python3
"""Derives an f32 Hugging Face directory from a llama GGUF file: the same numbers in the other container.

usage: gguf_to_safetensors.py MODEL.gguf DIRECTORY

The tests hold our reading of the one against our reading of the other, so this script shares no code with the house
and reads the formats anew: GGUF as https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes it, and
safetensors as https://github.com/huggingface/safetensors does. Needs numpy. The directory appears whole or not at all.
"""

import json
import mmap
import os
import shutil
import struct
import sys

import numpy as np

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

# ggml type: (elements of a block, bytes of a block)
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 30: (1, 2)}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class Reader:
    """The header of a GGUF file: `values` by key, `tensors` as (name, dims fastest first, type, start)."""

    def __init__(self, data):
        self.data, self.at = data, 0
        if self.take(4) != b"GGUF":
            sys.exit("not a GGUF file")
        version, n_tensors, n_keys = self.number("I"), self.number("Q"), self.number("Q")
        if version not in (2, 3):
            sys.exit(f"GGUF version {version} is not supported")
        self.values = {}
        for _ in range(n_keys):
            key = self.string()
            self.values[key] = self.value(self.number("I"))
        described = []
        for _ in range(n_tensors):
            name = self.string()
            dims = [self.number("Q") for _ in range(self.number("I"))]
            described.append((name, dims, self.number("I"), self.number("Q")))
        alignment = self.values.get("general.alignment", 32)
        start = -(-self.at // alignment) * alignment
        self.tensors = [(name, dims, kind, start + offset) for name, dims, kind, offset in described]

    def take(self, n):
        self.at += n
        if self.at > len(self.data):
            sys.exit("the file is truncated")
        return self.data[self.at - n : self.at]

    def number(self, code):
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self):
        return self.take(self.number("Q")).decode()

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element = self.number("I")
            return [self.value(element) for _ in range(self.number("Q"))]
        return self.number(SCALARS[kind])


def halves(blocks, at):
    """The f16 at byte `at` of each block, as a column of f32."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def levels(blocks, at, fifth_bits_at=None):
    """32 unsigned levels of each block: low nibbles of 16 bytes, then high ones, then the fifth bits on top."""
    packed = blocks[:, at : at + 16]
    out = np.concatenate([packed & 15, packed >> 4], axis=1)
    if fifth_bits_at is not None:
        bits = np.unpackbits(blocks[:, fifth_bits_at : fifth_bits_at + 4], axis=1, bitorder="little")
        out = out | bits << 4
    return out.astype(np.float32)


def dequantise(data, kind, start, shape):
    """The tensor as f32, row-major."""
    if kind not in BLOCKS:
        sys.exit(f"tensor type {kind} is not supported")
    n_elements, n_bytes = BLOCKS[kind]
    n_blocks = int(np.prod(shape)) // n_elements
    raw = np.frombuffer(data, dtype=np.uint8, count=n_blocks * n_bytes, offset=start)
    if kind == 0:
        return raw.view("<f4").reshape(shape)
    if kind == 1:
        return raw.view("<f2").astype(np.float32).reshape(shape)
    if kind == 30:
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    blocks = raw.reshape(n_blocks, n_bytes)
    scale = halves(blocks, 0)
    if kind == 8:
        out = blocks[:, 2:].view(np.int8).astype(np.float32) * scale
    elif kind == 2:
        out = (levels(blocks, 2) - 8) * scale
    elif kind == 3:
        out = levels(blocks, 4) * scale + halves(blocks, 2)
    elif kind == 6:
        out = (levels(blocks, 6, 2) - 16) * scale
    else:
        out = levels(blocks, 8, 4) * scale + halves(blocks, 2)
    return out.astype(np.float32, copy=False).reshape(shape)


def unpermuted(matrix, n_heads):
    """Rows of q or k from GGUF's order (pairs side by side) to Hugging Face's (two halves of each head)."""
    rows, cols = matrix.shape
    return matrix.reshape(n_heads, rows // n_heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def hf_name(name):
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    sys.exit(f"{name}: a tensor that a llama model does not have")


def write_weights(reader, path):
    """Tensors one after the other, each at a multiple of 4 bytes because all are f32."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, dims, _, _ in reader.tensors:
        n_bytes = 4 * int(np.prod(dims))
        header[hf_name(name)] = {"dtype": "F32", "shape": dims[::-1], "data_offsets": [offset, offset + n_bytes]}
        offset += n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    heads = {"attn_q": reader.values["llama.attention.head_count"]}
    heads["attn_k"] = reader.values.get("llama.attention.head_count_kv", heads["attn_q"])
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, dims, kind, start in reader.tensors:
            tensor = dequantise(reader.data, kind, start, dims[::-1])
            part = name.split(".")[2] if name.startswith("blk.") else ""
            if part in heads:
                tensor = unpermuted(tensor, heads[part])
            out.write(np.ascontiguousarray(tensor, dtype="<f4").tobytes())


def config(values, names):
    n_heads = values["llama.attention.head_count"]
    hidden = values["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
        "head_dim": values.get("llama.attention.key_length", hidden // n_heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": values["llama.feed_forward_length"],
        "max_position_embeddings": values["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": n_heads,
        "num_hidden_layers": values["llama.block_count"],
        "num_key_value_heads": values.get("llama.attention.head_count_kv", n_heads),
        "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
        # The file's f32, printed so that reading it back gives the same f32.
        "rms_norm_eps": float(str(np.float32(values["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": float(values.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in names,
        "torch_dtype": "float32",
        "vocab_size": values.get("llama.vocab_size", len(values["tokenizer.ggml.tokens"])),
    }


def tokenizer(values):
    """`tokenizer.json` of a byte-level BPE vocabulary of the SmolLM kind."""
    model, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        sys.exit(f"tokenizer {model!r} with pre-tokenizer {pre!r} is not supported")
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    control = 3
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": idx,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for idx, token in enumerate(tokens)
            if kinds[idx] == control
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: idx for idx, token in enumerate(tokens)},
            "merges": values["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(values):
    tokens = values["tokenizer.ggml.tokens"]

    def special(key):
        idx = values.get(f"tokenizer.ggml.{key}_token_id")
        return None if idx is None else tokens[idx]

    return {
        "add_bos_token": values.get("tokenizer.ggml.add_bos_token", False),
        "add_prefix_space": False,
        "bos_token": special("bos"),
        "chat_template": values.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": special("eos"),
        "pad_token": special("padding"),
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": special("unknown"),
    }


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as out:
        json.dump(value, out, ensure_ascii=False, indent=2)
        out.write("\n")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = sys.argv[1], sys.argv[2].rstrip("/")
    unfinished = f"{target}.{os.getpid()}.part"
    os.makedirs(unfinished)
    try:
        with open(source, "rb") as file:
            reader = Reader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        values = reader.values
        if values.get("general.architecture") != "llama":
            sys.exit(f"architecture {values.get('general.architecture')!r} is not supported")
        write_weights(reader, f"{unfinished}/model.safetensors")
        write_json(f"{unfinished}/config.json", config(values, {tensor[0] for tensor in reader.tensors}))
        write_json(f"{unfinished}/tokenizer.json", tokenizer(values))
        write_json(f"{unfinished}/tokenizer_config.json", tokenizer_config(values))
        ids = {
            "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
        }
        write_json(f"{unfinished}/generation_config.json", ids)
        if os.path.isdir(target):
            shutil.rmtree(target)
        os.rename(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


if __name__ == "__main__":
    main()
