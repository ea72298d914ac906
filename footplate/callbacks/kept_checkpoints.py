"""The checkpoints that a saver keeps: the best by a score, or the latest.

Pure bookkeeping of paths and scores: `ModelCheckpoint` writes and deletes the files.
"""

from __future__ import annotations

from footplate.callbacks.monitored_metric import better


class KeptCheckpoints:
    """The paths and scores of at most `save_top_k` checkpoints.

    Args:
        save_top_k: how many to keep; -1 keeps all, 0 keeps none.
        mode: "min" or "max": which score is better.

    Attributes:
        scores: the score of each checkpoint by its path: the best first, or without a score (0.0), the oldest first.
    """

    def __init__(self, save_top_k: int, mode: str) -> None:
        self.scores: dict[str, float] = {}
        self._save_top_k = save_top_k
        self._mode = mode

    def accepts(self, score: float | None) -> bool:
        """Return True if a checkpoint with this score would be kept. A checkpoint without a score is the latest."""
        if self._save_top_k == 0:
            return False
        if self._save_top_k == -1 or score is None or len(self.scores) < self._save_top_k:
            return True
        return any(better(score, other, self._mode) for other in self.scores.values())

    def add(self, path: str, score: float | None) -> None:
        """Add a checkpoint, and drop the worst or the oldest if there are too many."""
        if score is None:
            # A path that is saved again becomes the latest.
            self.scores.pop(path, None)
            self.scores[path] = 0.0
            if self._save_top_k != -1:
                self.scores = dict(list(self.scores.items())[-self._save_top_k :])
            return

        self.scores[path] = score
        ranked = sorted(self.scores.items(), key=lambda item: self._rank(item[1]))
        self.scores = dict(ranked if self._save_top_k == -1 else ranked[: self._save_top_k])

    def best(self) -> str:
        """The best path. Without a metric, all scores are equal and the latest path is the best."""
        return min(reversed(self.scores), key=lambda path: self._rank(self.scores[path]))

    def superseded(self) -> str:
        """The path that the next checkpoint would replace; empty if there is room for one more."""
        if self._save_top_k == -1 or len(self.scores) < self._save_top_k:
            return ""
        return max(self.scores, key=lambda path: self._rank(self.scores[path]))

    def _rank(self, score: float) -> float:
        return score if self._mode == "min" else -score
