"""Which layers of a decoder one stage has (pipeline parallelism, arXiv 1811.06965).

    stage 0               embedding, the first layers
    stages between        the next layers each
    the last stage        the last layers, the last norm, the head

Hidden states pass from stage to stage. A stage may be one rank, or several that share each of its layers
(engine/models/shard.py). A head that is the embedding is in both the first and the last stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import StartupError


@dataclass(slots=True, frozen=True)
class Stage:
    number: int = 0  # of `count`, from 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def layers(self, num_layers: int) -> range:
        """The layers of this stage: as many as in each other, or one more in the first ones, since the last one has
        the head. Raises `StartupError` if a stage has none."""
        if num_layers < self.count:
            raise StartupError(
                f"--pipeline-parallel-size {self.count} leaves a stage without any of {num_layers} layers"
            )
        most, rest = divmod(num_layers, self.count)
        start = self.number * most + min(self.number, rest)
        return range(start, start + most + (self.number < rest))
