"""The victim: a real site with one record, asked for one step, and its release as a server decodes it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client.data import SiteData
from client.site import Site, Workbench
from common import coding
from common.broadcast import digest_of, encode_floats
from common.coding import Values
from common.mask import Indices, kept_count
from common.plan import RoundPlan
from simulations.seeded import SeededRandomness


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the server asks: the model by name, and how the site must protect its answer.

    ``noise_multiplier`` 0 asks without clipping and noise, as plain federated learning does.
    """

    model: str
    density: float
    noise_multiplier: float
    clip_norm: float
    value_coding: coding.ValueCoding = "f32"


@dataclass(frozen=True, slots=True)
class Release:
    """What the server gets: the sum of masked, clipped and noised gradients (here of one record) on the mask."""

    kept: Indices
    gradient: NDArray[np.float64]


class Victim:
    """A site of one record; every question is a new round with a new mask and new noise."""

    def __init__(
        self, picture: NDArray[np.float32], target: int, start: Values, seed: int, workbench: Workbench
    ) -> None:
        self._start, self._seed = start, seed
        data = SiteData(picture[None], np.array([target], np.int64), np.array([0]), declared_size=1)
        self._site = Site(data, SeededRandomness(seed, 0), workbench)

    def ask(self, question: Question, round_number: int) -> Release:
        """Let the site train one step at learning rate 1 and turn its coded movement back into a gradient."""
        plan = self._plan(question, round_number)
        data = self._site.train(plan.to_bytes(), encode_floats(self._start, "f32"))
        update = coding.decode(
            data,
            size=plan.mask.size,
            max_kept=plan.mask.kept,
            value_coding=plan.value_coding,
            grid_step=plan.grid_step(self._site.declared_size),
        )
        return Release(plan.mask.indices(), -update.values.astype(np.float64))

    def _plan(self, question: Question, round_number: int) -> RoundPlan:
        private = question.noise_multiplier > 0
        return RoundPlan(
            run="attack",
            round=round_number,
            model_version=0,
            model=question.model,
            mask_seed=self._seed,
            mask_epoch=round_number,
            mask_size=self._start.size,
            mask_kept=kept_count(self._start.size, question.density),
            private=private,
            privacy_unit="record",
            cohort=1.0,
            steps=1,
            sampling_rate=1.0,
            clip_norm=question.clip_norm,
            noise_multiplier=question.noise_multiplier,
            learning_rate=1.0,
            momentum=0.0,
            physical_batch_size=1,
            value_coding=question.value_coding,
            index_coding="seed",
            grid=0.5,
            model_digest=digest_of(self._start),
            model_step=0.0,
        )
