"""Where the ranks of a worker stand: in which stage of the model, and where in it.

    --pipeline-parallel-size 3 --tensor-parallel-size 2

    ranks 4 5   stage 0, embeds tokens
    ranks 2 3   stage 1
    ranks 0 1   stage 2, the last one, draws tokens

Rank 0 draws, so it is of the last stage. Hidden states go from rank 4 to 2 to 0, and from 5 to 3 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.stage import Stage


@dataclass(slots=True, frozen=True)
class Layout:
    num_stages: int = 1
    ranks_per_stage: int = 1
    has_one_cache: bool = False  # the ranks of a stage have the same KV heads, and one cache together

    @property
    def size(self) -> int:
        return self.num_stages * self.ranks_per_stage

    @property
    def num_caches(self) -> int:
        return 1 if self.has_one_cache else self.ranks_per_stage

    def stage(self, rank: int) -> Stage:
        return Stage(self.num_stages - 1 - rank // self.ranks_per_stage, self.num_stages)

    def place_in_stage(self, rank: int) -> int:
        """The rank's number among those of its stage; these share its layers."""
        return rank % self.ranks_per_stage

    def stage_mates(self, rank: int) -> range:
        """The ranks of the same stage, this one included."""
        first = rank - self.place_in_stage(rank)
        return range(first, first + self.ranks_per_stage)

    def before(self, rank: int) -> int | None:
        """The rank that hidden states come from; None for the first stage."""
        return None if self.stage(rank).is_first else rank + self.ranks_per_stage

    def after(self, rank: int) -> int | None:
        """The rank that hidden states go to; None for the last stage."""
        return None if self.stage(rank).is_last else rank - self.ranks_per_stage
