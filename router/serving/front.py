"""What every interface does with a request: admit it, prepare it, generate its answer.

gRPC and REST translate to `Prompt` and `Given` and from `Output`; nothing else differs between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.serving.admission import Admission
from router.serving.decisions import Decisions
from router.serving.embedding import Embedder
from router.serving.generation import Generation
from router.serving.preparation import Preparation


@dataclass(slots=True, frozen=True)
class Front:
    """Shared by both interfaces of a router."""

    admission: Admission
    preparation: Preparation
    generation: Generation
    decisions: Decisions
    embedder: Embedder
