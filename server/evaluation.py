"""How the model does on the server's own test set; no site is asked anything."""

from dataclasses import dataclass

import torch

from common.coding import Values
from common.datasets import Dataset, as_floats
from common.models import FlatModel, right_answers, sample_losses

_BATCH = 500


@dataclass(frozen=True, slots=True)
class Score:
    """What the test set says of a model; numbers, unlike classes, have no accuracy: their loss speaks."""

    accuracy: float | None
    loss: float


class Evaluator:
    """Holds a test set and a module of its own."""

    def __init__(self, model_name: str, dataset: Dataset) -> None:
        self._model = FlatModel.of(model_name)
        self._model.module.eval()
        self._inputs = dataset.test_inputs
        self._targets = torch.tensor(dataset.test_targets)
        if len(self._inputs):
            self._model.require_fit(model_name, torch.tensor(as_floats(self._inputs[:2])), dataset.test_targets)

    @torch.no_grad()
    def score(self, model: Values) -> Score | None:
        """Return accuracy and mean loss; None where the test set is empty."""
        count = len(self._inputs)
        if not count:
            return None
        self._model.load(model)
        correct: int | None = 0
        loss = 0.0
        for start in range(0, count, _BATCH):
            targets = self._targets[start : start + _BATCH]
            outputs = self._model.module(torch.tensor(as_floats(self._inputs[start : start + _BATCH])))
            right = right_answers(outputs, targets)
            correct = None if right is None or correct is None else correct + right
            loss += float(sample_losses(self._model.module, outputs, targets).sum())
        return Score(None if correct is None else correct / count, loss / count)
