"""`python -m common.grammar_child [MODEL_TOKENS]`: the child of `common.grammar_process`, which says what it is for."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from common.bounded_child import Job, prepare, serve
from common.grammar_process import LIMITS, ModelTokens
from common.grammar_trial import Trial
from common.guided import Guided


def main(arguments: Sequence[str]) -> int:
    prepare()
    trial = Trial(ModelTokens(**json.loads(arguments[0])) if arguments else None)
    return serve(partial(_check, trial), LIMITS, opens_files=True)  # what a grammar takes is read from a file


def _check(trial: Trial, job: Job) -> dict[str, object]:
    (kind,) = job
    try:
        grammar, num_bytes = trial(_guided(kind, job[kind]))
    except ValueError as error:
        return {"wrong": str(error)}
    except Exception:
        raise
    except BaseException:  # of native code, which gave up
        return {"wrong": f"{kind} cannot be used: the compiler of grammars does not take it"}
    return {"grammar": grammar, "bytes": num_bytes}


def _guided(kind: str, value: object) -> Guided:
    if isinstance(value, list):
        return Guided(choice=tuple(map(str, value)))
    if isinstance(value, bool):
        return Guided(json_object=value)
    return replace(Guided(), **{kind: str(value)})  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
