"""`DrafterCallback`: drafts in the rollouts of TRL's trainers, and what they brought in the trainer's logs."""

from __future__ import annotations

from collections import deque
from typing import Any

from hf_dart.decoding.api import attach
from hf_dart.decoding.session import Observer, Session
from hf_dart.decoding.stats import DraftStats
from hf_dart.drafters.base import Drafter
from hf_dart.learning.learner import Learner
from hf_dart.training.trainers.evaluation import CountedWrites


class DrafterCallback(CountedWrites):
    """Drafts for the rollouts of TRL's `GRPOTrainer` and `RLOOTrainer`, where `generate` writes them.

        trainer = GRPOTrainer(model=model, ...)
        trainer.add_callback(DrafterCallback(trainer, drafter, learner=Learner(), memory=SuffixStore()))

    Completions, rewards and losses are those of training without it. The trainer logs, as means per step,
    `drafts/tau` (tokens per forward of the policy), `drafts/seconds` (of rollouts) and `drafts/learning_seconds` (of
    the learner); before evaluations' stands `eval_`. The model drafts by itself afterwards, too, until
    `hf_dart.detach(model)`.

    Args:
        trainer: of which every process has its own drafter, learner and memory.
        drafter: for the trainer's policy, such as `load_drafter(path, target=trainer.model)`.
        learner, memory: as for [`attach`]; a memory is of completions, which later epochs copy from.

    Raises:
        TypeError: the trainer is another one, or an argument is none of its kind.
        ValueError: `generate` does not write its rollouts, or the drafter does not fit the policy, or cannot learn.
    """

    def __init__(self, trainer: Any, drafter: Drafter[Any], learner: Learner | None = None, memory: Any = None) -> None:
        if not hasattr(trainer, "use_transformers_continuous_batching"):
            raise TypeError(
                f"A DrafterCallback takes TRL's GRPOTrainer or RLOOTrainer, not {type(trainer).__name__}; "
                "hf_dart.attach(model, drafter) drafts in any trainer that calls generate."
            )
        if trainer.use_vllm or trainer.use_transformers_continuous_batching:
            raise ValueError(
                "Drafts are made in generate, which does not write the rollouts of this trainer; leave use_vllm and "
                "use_transformers_continuous_batching out."
            )
        self.trainer, self.learner = trainer, learner
        self._rollouts, self._learnt = _Rollouts(), 0.0
        attach(trainer.model, drafter, learner=learner, memory=memory)
        drafter.observers = (*(one for one in drafter.observers if not isinstance(one, _Rollouts)), self._rollouts)

    def on_step_end(self, *given: Any, **known: Any) -> None:
        """Log the rollouts of a step; a step on those of an earlier one has none."""
        super().on_step_end(*given, **known)
        self._log("train")

    def on_prediction_step(self, *given: Any, **known: Any) -> None:
        """Log the rollouts of an evaluated batch."""
        self._log("eval")

    def _log(self, mode: str) -> None:
        stats = DraftStats()
        while self._rollouts.stats:
            stats.merge(self._rollouts.stats.pop())
        if not stats.rounds:
            return
        figures = {"tau": stats.tau, "seconds": sum(stats.seconds.values())}
        if self.learner is not None:
            figures["learning_seconds"] = self.learner.stats.seconds - self._learnt
            self._learnt = self.learner.stats.seconds
        for name, figure in figures.items():
            self.trainer._metrics[mode][f"drafts/{name}"].append(figure)


class _Rollouts(Observer):
    """Observer of calls (`Drafter.observers`) that keeps their statistics; copies of the drafter have a copy of it."""

    def __init__(self) -> None:
        self.stats = deque[DraftStats](maxlen=256)  # nobody takes them away when training has ended

    def __call__(self, session: Session) -> _Rollouts:
        """Keep the statistics of a call, which go on counting."""
        self.stats.append(session.stats)
        return self
