"""Tiny random checkpoints in other projects' formats: their parts, and those of a plain forward pass of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A config with other fields: `part__x` is the field x inside of `part`, and None takes a field out."""
    for name, value in changes.items():
        part, _, field = name.rpartition("__")
        fields = config[part] if part else config
        fields[field] = value
        if value is None:
            del fields[field]
    return config


def speculators_fields(target: Any, kind: str, tokens: int) -> dict[str, Any]:
    """What a config.json of speculators says of its kind and target."""
    proposal = {"accept_tolerance": 0.0, "proposal_type": "greedy", "verifier_accept_k": 1}
    return {
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "speculative_tokens": tokens}],
            "verifier": {"architectures": [type(target).__name__], "name_or_path": "someone/target"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
    }


def layer_shapes(config: dict[str, Any], name: str, read: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a decoder layer whose queries, keys and values read `read` numbers."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    width, kv_width = (config[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    norms = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if config["model_type"] not in ("llama", "qwen2"):
        norms |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    shapes = {
        **norms,
        "self_attn.q_proj.weight": (width, read),
        "self_attn.k_proj.weight": (kv_width, read),
        "self_attn.v_proj.weight": (kv_width, read),
        "self_attn.o_proj.weight": (hidden, width),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    biased = [f"self_attn.{x}_proj" for x in "qkvo"] * bool(config.get("attention_bias"))
    biased += [f"mlp.{x}_proj" for x in ("gate", "up", "down")] * bool(config.get("mlp_bias"))
    shapes |= {f"{part}.bias": shapes[f"{part}.weight"][:1] for part in biased}
    return {f"{name}.{part}": shape for part, shape in shapes.items()}


def random_weights(shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> dict[str, Tensor]:
    """Weights in float64; those of norms are about 1."""

    def random(shape: tuple[int, ...], norm: bool) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return 1 + 0.3 * values if norm else 0.3 * values

    return {name: random(shape, "norm" in name) for name, shape in shapes.items()}


def draft_vocabulary(size: int, scored: int, generator: torch.Generator) -> dict[str, Tensor]:
    """`d2t` and `t2d` of random tokens."""
    chosen = torch.randperm(size, generator=generator)[:scored].sort().values
    marked = torch.zeros(size, dtype=torch.bool).index_fill(0, chosen, True)
    return {"d2t": chosen - torch.arange(scored), "t2d": marked}


def reordered(tensors: dict[str, Tensor], *per_token: str) -> dict[str, Tensor]:
    """The same checkpoint with its draft tokens, and the rows of the tensors `per_token`, in another order."""
    order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(1))
    tokens = (torch.arange(len(order)) + tensors["d2t"])[order]
    return {**tensors, **{name: tensors[name][order] for name in per_token}, "d2t": tokens - torch.arange(len(order))}


def save(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, pickled: bool = False,
    dtype: torch.dtype | None = None,
) -> str:  # fmt: skip
    """Write config.json and weights, as safetensors or as `pytorch_model.bin`."""
    tensors = {name: x.to(dtype) if dtype and x.is_floating_point() else x for name, x in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf8")
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


class Plain:
    """The parts of a plain forward pass, of weights by their names and the fields of a decoder layer.

    `normed_as` is the dtype of what norms divide, which is float32 in Qwen3's code.
    """

    def __init__(
        self, weights: dict[str, Tensor], layer: dict[str, Any], size: int, normed_as: torch.dtype = torch.float64
    ) -> None:
        self.weights, self.eps, self.size, self.normed_as = weights, layer["rms_norm_eps"], size, normed_as
        rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
        theta = rope.get("rope_theta") or layer.get("rope_theta") or 10000.0
        self.frequencies, self.scale = 1.0 / (theta ** (torch.arange(0, size, 2).float() / size)), 1.0
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            parameters = {**rope, "rope_type": kind, "rope_theta": theta}
            longest = layer["max_position_embeddings"]
            full = Qwen3Config(head_dim=size, max_position_embeddings=longest, rope_parameters=parameters)
            self.frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](full, torch.device("cpu"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        given = x.to(self.normed_as)
        given = given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weights[f"{name}.weight"] * given.to(x.dtype)

    def project(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.weights[f"{name}.weight"].T
        return out + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else out

    def heads(self, x: Tensor, name: str) -> Tensor:
        """[..., H] to [..., n, head_dim], normed where there is a norm."""
        out = self.project(x, f"{name}_proj").unflatten(-1, (-1, self.size))
        return self.norm(out, f"{name}_norm") if f"{name}_norm.weight" in self.weights else out

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:  # [T, n, head_dim]
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat([angles, angles], -1)[:, None]
        half = torch.cat([-x[..., self.size // 2 :], x[..., : self.size // 2]], -1)
        return x * (angles.cos() * self.scale).double() + half * (angles.sin() * self.scale).double()

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One query [n, head_dim] to keys and values [T, m, head_dim] that it attends to: [n * head_dim]."""
        shared = torch.arange(len(query)) // (len(query) // keys.shape[1])
        scores = torch.einsum("hd,thd->ht", query, keys[:, shared]) / self.size**0.5
        return torch.einsum("ht,thd->hd", scores.softmax(-1), values[:, shared]).flatten()

    def mlp(self, x: Tensor, name: str, act: Any = torch.nn.functional.silu) -> Tensor:
        gated = act(self.project(x, f"{name}.gate_proj")) * self.project(x, f"{name}.up_proj")
        return self.project(gated, f"{name}.down_proj")
