"""The forward of a gated delta rule over a whole token tree in one call, in place of one call per level.

The module's own forward runs once, over all nodes as a batch of single tokens, so that its projections, gates and norms
are its own code. Where it hands a state to a function, the state is an object of this file, which takes the call over:

- A convolution is the module's own function again: each node is given the window that its path left, gathered from
  what this call puts in.
- The delta rule [1, 2] of node i, with state S of the text before, decay exp(g), rate beta and correction u,

      S_i = exp(g_i) S_parent + k_i u_i,    u_i = beta_i (v_i - k_i exp(g_i) S_parent),    o_i = q_i S_i,

  is unrolled along paths. With D_ij = exp(sum of g after j up to i) where j is i or an ancestor of it, else 0, and
  D_i that from the text on,

      (1 + beta_i [k_i k_j D_ij], j above i) u = beta_i (v_i - k_i D_i S),    o_i = q_i D_i S + sum_j q_i k_j D_ij u_j:

  one triangular solve, since parents come before their children. It runs in float32 (or wider, if the inputs are), as
  the models' own, also under autocast. Decays of heads (Qwen3-Next, OLMo Hybrid) and of channels (Kimi Linear) are
  both taken.

[1] Yang, Wang, Zhang, Shen, Kim: Parallelizing Linear Transformers with the Delta Rule over Sequence Length (2024).
[2] Yang, Kautz, Hatamizadeh: Gated Delta Networks (2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hf_dart.cache.states import StatefulCache, States, StateSlot
from hf_dart.models.tree_forward import Mixer, by_levels
from hf_dart.trees.paths import TreePaths


class _NodeState:
    """One state of all nodes, in place of a tensor, while a module's forward runs over them as single tokens."""

    def __init__(self, text: Tensor, paths: TreePaths) -> None:
        self._text, self._paths = text, paths

    def copy_(self, _: Any) -> None:
        """What the forward takes for the next state is not kept: states are made of accepted nodes alone."""

    def step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Takes over the call of a function that was given this state."""
        raise NotImplementedError

    def after(self, nodes: Tensor) -> Tensor:
        """[B, ...] the state after node `nodes[b]` [B] of each row."""
        raise NotImplementedError


class _Window(_NodeState):
    """The last W inputs [B, C, W] of a convolution."""

    def step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = args[0]  # [B N, C, 1]
        batch, nodes = self._paths.shape
        entries = inputs.view(batch, nodes, -1).transpose(1, 2).to(self._text.dtype)
        entries = torch.cat([self._text, entries], dim=-1)
        channels, width = self._text.shape[1:]
        places = self._paths.windows(width).view(batch, 1, -1).expand(-1, channels, -1)
        windows = entries.gather(2, places).view(batch, channels, nodes, width).transpose(1, 2)
        self._windows = windows.reshape(batch * nodes, channels, width)
        # It writes the new entry into these windows: they are the states after the nodes then.
        given = {name: self._windows if part is self else part for name, part in kwargs.items()}
        return function(*(self._windows if part is self else part for part in args), **given)

    def after(self, nodes: Tensor) -> Tensor:
        windows = self._windows.view(*self._paths.shape, *self._windows.shape[1:])
        return windows[torch.arange(len(nodes), device=nodes.device), nodes]


class _Rule(_NodeState):
    """The memory [B, H, K, V] of a gated delta rule."""

    def step(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.autocast(self._text.device.type, enabled=False):
            return self._tree(*args, **kwargs)

    def _tree(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Of nodes [B N, 1, ...]; `g` is the decay of each head [B N, 1, H] or of each of its channels [.., H, K]."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        key, value, beta, g, out_dtype = key.to(dtype), value.to(dtype), beta.to(dtype), g.to(dtype), query.dtype
        query = query.to(dtype)
        if use_qk_l2norm_in_kernel:
            query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        query = query * query.shape[-1] ** -0.5
        heads = value.shape[2]
        query, key = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (query, key))
        # [B, H, N, ...] of each
        batch, nodes = self._paths.shape
        query, key, value = (part.view(batch, nodes, heads, -1).transpose(1, 2) for part in (query, key, value))
        rate, log = beta.view(batch, nodes, heads).transpose(1, 2)[..., None], g.view(batch, nodes, heads, -1)
        seen = self._paths.ancestors
        # Sums over each stretch of a path by itself: differences of sums from the text on would cancel.
        decays = (self._paths.between.flatten(1, 2).to(dtype) @ log.flatten(2)).exp()
        decays = decays.view(batch, nodes, nodes, heads, -1).permute(0, 3, 1, 2, 4)
        decays = decays * seen[:, None, :, :, None]
        from_text = (seen.to(dtype) @ log.flatten(2)).exp().view(batch, nodes, heads, -1).transpose(1, 2)
        if decays.shape[-1] == 1:
            corrections, reads = (part @ key.mT * decays[..., 0] for part in (key * rate, query))
        else:
            decayed = key[:, :, None] * decays
            corrections, reads = ((decayed @ part[..., None])[..., 0] for part in (key * rate, query))
        text = self._text.to(dtype)
        old = rate * (value - (key * from_text) @ text)
        new = torch.linalg.solve_triangular(corrections, old, upper=False, unitriangular=True)
        out = (query * from_text) @ text + reads @ new
        self._log, self._key, self._new = log, key, new
        return out.transpose(1, 2).reshape(batch * nodes, 1, heads, -1).to(out_dtype), self._text

    def after(self, nodes: Tensor) -> Tensor:
        with torch.autocast(self._text.device.type, enabled=False):
            return self._after(nodes)

    def _after(self, nodes: Tensor) -> Tensor:
        rows = torch.arange(len(nodes), device=nodes.device)
        seen, dtype = self._paths.ancestors[rows, nodes], self._key.dtype
        between = (seen[:, None] & ~self._paths.ancestors).to(dtype)  # [B, N, N], as those of the paths at this node
        decays = (between @ self._log.flatten(2)).exp().view(self._log.shape) * seen[..., None, None]
        from_text = (seen[:, None].to(dtype) @ self._log.flatten(2)).exp().view(len(nodes), *self._log.shape[2:], 1)
        kept = self._text.to(dtype) * from_text
        return (kept + (self._key * decays.transpose(1, 2)).mT @ self._new).to(self._text.dtype)


# Larger trees go by levels: what the nodes see of each other grows with the square of their number, and more. So does
# a single node, which is stock's own step then, wherever trees may.
_MOST = 128

_KINDS: dict[str, type[_NodeState]] = {"conv_states": _Window, "recurrent_states": _Rule}


class _StatesAtOnce:
    """The states of nodes, made when one is accepted."""

    def __init__(self, states: dict[StateSlot, _NodeState]) -> None:
        self._states = states

    def after(self, path: Tensor, counts: list[int] | Tensor, before: States) -> States:
        """See `hf_dart.cache.states.NodeStates`."""
        new: States = {slot: before[slot] for slot in self._states}
        if path.shape[1] == 0:
            return new
        for slot, state in self._states.items():
            device = before[slot].device
            number = torch.as_tensor(counts, device=device)
            nodes = path.to(device).gather(1, (number - 1).clamp(min=0)[:, None])[:, 0]
            accepted = (number > 0).view(-1, *[1] * (before[slot].ndim - 1))
            new[slot] = torch.where(accepted, state.after(nodes), before[slot])
        return new


@dataclass(frozen=True)
class AtOnce:
    """`by_levels` in one call, for a module that hands its states to a convolution and a gated delta rule alone.

    Args:
        function: of the module's forward, `taking_node_states`.
    """

    function: FunctionType

    def __call__(
        self,
        mixer: Mixer,
        forward: Callable[..., Any],
        cache: StatefulCache,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """As `by_levels`. It is not right for every mixer: see `hf_dart.models.tree_form`."""
        held = cache.states
        fewest = 2 if held.takes_levels else 1
        if not fewest <= held.shape[1] <= _MOST:
            return by_levels(mixer, forward, cache, args, kwargs)
        text = {slot: held.committed[slot] for slot in mixer.slots if isinstance(slot, StateSlot)}
        states = {slot: _KINDS[slot.kind](state, held.paths(state.device)) for slot, state in text.items()}
        shape, lent = held.shape, cache.lend(states)

        def single(part: Any) -> Any:
            if part is cache:
                return lent
            by_node = isinstance(part, Tensor) and part.shape[:2] == shape
            return part.flatten(0, 1)[:, None] if by_node else part

        given = tree_map(single, (args, kwargs))
        outputs = self.function(mixer.module, *given[0], **given[1])
        held.keep(_StatesAtOnce(states))
        return tree_map(lambda part: part.view(*shape, *part.shape[2:]) if isinstance(part, Tensor) else part, outputs)


def taking_node_states(forward: Any) -> FunctionType | None:
    """A copy of a module's forward whose calls of functions are taken over by the states of nodes among the arguments.

    The module, and the file that it is from, stay as they are.

    Args:
        forward: the bound method. If it is none of plain Python, None is returned.
    """
    function = getattr(forward, "__func__", None)
    return _copied(function) if isinstance(function, FunctionType) else None


def _copied(function: FunctionType) -> FunctionType:
    inner = getattr(function, "__wrapped__", None)
    closure = function.__closure__
    if isinstance(inner, FunctionType) and closure is not None:  # a decorator's: the forward itself is within
        copy = _copied(inner)
        closure = tuple(CellType(copy) if cell.cell_contents is inner else cell for cell in closure)
    scope = dict(function.__globals__)
    # torch.compile would look functions up in the module of this name.
    del scope["__name__"]
    for name in _names(function.__code__):
        if isinstance(scope.get(name), FunctionType | nn.Module):
            scope[name] = _taken_over(scope[name])
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _names(code: CodeType) -> set[str]:
    inside = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inside)


def _taken_over(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        for part in (*args, *kwargs.values()):
            if isinstance(part, _NodeState):
                return part.step(function, args, kwargs)
        return function(*args, **kwargs)

    return call
